"""The `data` section: which text, which tokens."""

from pydantic import Field

from megaspeed.config.section import Section

BUNDLED_CORPUS = "python-stdlib"
"""The source that every machine has: the Python standard library's own files."""


class DataConfig(Section):
    """The corpus and how it is cut into samples."""

    train: tuple[str, ...] = Field(
        default=(BUNDLED_CORPUS,),
        strict=False,
        min_length=1,
        description="Sources of training text: paths, globs, or python-stdlib.",
    )
    validation: tuple[str, ...] | None = Field(
        default=None,
        strict=False,
        min_length=1,
        description="Sources of validation text. Left out: validation_fraction of the documents "
        "of `train`.",
    )
    validation_fraction: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Fraction of the training documents held out for validation where "
        "`validation` is left out; 0 for none.",
    )
    tokenizer: str = Field(
        default="train",
        min_length=1,
        description="train: a byte-level BPE of model.vocab_size tokens trained on the corpus; "
        "otherwise the path of a tokenizer.",
    )
    sequence_length: int = Field(
        gt=0,
        description="Tokens of one sample; at most model.max_position_embeddings.",
    )
    seed: int = Field(default=1234, ge=0, lt=2**63, description="Seed of the sampling order.")

"""The `data` section: the corpus, the tokenizer and the samples."""

from typing import Any, Self

from pydantic import Field, model_validator

from megaspeed.config.section import PathText, Section

BUNDLED_CORPUS = "python-stdlib"
"""A source that every machine has: the files of Python's standard library."""


class Source(Section):
    """A source of text or of token ids, with its settings."""

    path: PathText | None = None
    """A file, a glob, a folder written by datasets' save_to_disk or by `megaspeed tokenize`, or
    python-stdlib. A file's format follows from its suffix."""
    dataset: str | None = Field(default=None, min_length=1)
    """The name passed to datasets.load_dataset, instead of a path."""
    configuration: str | None = Field(default=None, min_length=1)
    """Configuration of the dataset, which is passed to load_dataset."""
    split: str = Field(default="train", min_length=1)
    """Split of the dataset, or of a folder of save_to_disk that has several splits."""
    text_field: str = Field(default="text", min_length=1)
    """Name of the field of JSON lines, or of the column of a table, that contains the text."""
    weight: float | None = Field(default=None, gt=0)
    """Share of the samples that come from this source, relative to the weights of the others.
    State it for all sources of a list or for none. If omitted: each source is read once per
    epoch."""

    @model_validator(mode="after")
    def _names_one_place(self) -> Self:
        if (self.path is None) == (self.dataset is None):
            raise ValueError("an object that states either path or dataset")
        if self.dataset is None and self.configuration is not None:
            raise ValueError("an object without configuration, which only a dataset can have")
        return self

    def __str__(self) -> str:
        return str(self.path if self.dataset is None else self.dataset)


PathOrSource = PathText | Source


class DataConfig(Section):
    """The corpus and how it is cut into samples."""

    train: tuple[PathOrSource, ...] = Field(default=(BUNDLED_CORPUS,), strict=False, min_length=1)
    """Sources of the training data: paths, globs, python-stdlib, or objects."""
    validation: tuple[PathOrSource, ...] | None = Field(default=None, strict=False, min_length=1)
    """Sources of the validation data, as in train. If omitted: validation_fraction of train."""
    validation_fraction: float = Field(default=0.05, ge=0, lt=1)
    """Fraction of the tokens of train held out for validation if validation is omitted; 0 for none.
    The hash of the text decides which. A long document is divided if necessary."""
    tokenizer: PathText = "train"
    """Path of a tokenizer. train: the tokenizer of the token files, or if there are none, a
    byte-level BPE of model.vocab_size tokens trained on the corpus."""
    sequence_length: int = Field(gt=0)
    """Tokens of one sample; at most model.max_position_embeddings."""
    reset_at_documents: bool = False
    """Whether attention and positions restart at every document of a sample, so that no token sees
    another document's text. FlashAttention does this without a mask. A mask is needed with
    attention dropout, on a GPU in fp32 or if FlashAttention does not support the GPU or the head
    size, and on a CPU with a sliding window."""
    seed: int = Field(default=1234, ge=0, lt=2**63)
    """Seed of the sampling order."""

    @model_validator(mode="before")
    @classmethod
    def _without_former_rule(cls, values: Any) -> Any:
        """Omit ``hold_out_by``, which version 0.2 wrote into config.json. One rule is left."""
        if not isinstance(values, dict) or "hold_out_by" not in values:
            return values
        if values["hold_out_by"] != "tokens":
            raise ValueError(
                "an object without hold_out_by, because only tokens are held out now, not the "
                "complete documents of version 0.1; list what was held out as validation"
            )
        return {key: value for key, value in values.items() if key != "hold_out_by"}

    @property
    def train_sources(self) -> tuple[Source, ...]:
        """The sources of `train` as objects."""
        return _as_objects(self.train)

    @property
    def validation_sources(self) -> tuple[Source, ...] | None:
        """The sources of `validation` as objects; None if omitted."""
        return None if self.validation is None else _as_objects(self.validation)


def _as_objects(sources: tuple[PathOrSource, ...]) -> tuple[Source, ...]:
    return tuple(Source(path=given) if isinstance(given, str) else given for given in sources)

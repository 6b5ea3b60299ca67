"""The `model` section: the shape of the GPT, in Hugging Face's field names."""

from typing import Any, Literal

from pydantic import Field, model_validator

from megaspeed.config.presets import PRESETS
from megaspeed.config.section import LARGEST_COUNT, Section

PresetName = Literal[
    "gpt2-nano",
    "gpt2-tiny",
    "gpt2",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "gpt-7.5b",
    "gpt3-175b",
    "mt-nlg-530b",
    "llama-nano",
    "llama-tiny",
    "llama-2-7b",
    "llama-2-70b",
    "llama-3-8b",
    "llama-3-70b",
]

DERIVED_FIELDS = ("num_key_value_heads", "intermediate_size", "tie_word_embeddings")
"""Fields that are worked out from others where they are left out or null."""


class RopeScaling(Section):
    """Llama-3's stretching of the rotary embedding to longer sequences."""

    rope_type: Literal["llama3"] = Field(
        description="How the frequencies are scaled; llama3 is the only way there is."
    )
    factor: float = Field(
        gt=0, description="Low frequencies are divided by this number (8.0 in Llama 3.1)."
    )
    low_freq_factor: float = Field(
        gt=0,
        description="Wavelengths above original_max_position_embeddings / low_freq_factor "
        "positions are scaled in full.",
    )
    high_freq_factor: float = Field(
        gt=0,
        description="Wavelengths below original_max_position_embeddings / high_freq_factor "
        "positions are left alone; between the two the scaling is blended.",
    )
    original_max_position_embeddings: int = Field(
        gt=0, description="Positions the model was first trained on."
    )


class ModelConfig(Section):
    """The shape of the model. A preset gives every field; fields beside it override the preset."""

    preset: PresetName | None = Field(
        default=None,
        description="Name of a public shape that gives every field of this section; fields "
        "stated beside it override the preset's.",
    )
    from_hf: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of a Hugging Face model, or its config.json, which gives every field "
        "of this section; fields stated beside it override the file's. The resolved config has "
        "the fields in its place.",
    )
    architecture: Literal["gpt2", "llama"] = Field(
        description="gpt2: learned positions, LayerNorm, GELU, biases. llama: rotary positions, "
        "RMSNorm, SwiGLU, grouped-query attention, no biases."
    )
    vocab_size: int = Field(
        gt=0,
        le=LARGEST_COUNT,
        description="Number of token ids. It need not divide by parallel.tensor: it is padded "
        "inside and the padding is never visible.",
    )
    hidden_size: int = Field(
        gt=0, le=LARGEST_COUNT, description="Width of the residual stream, in elements."
    )
    num_hidden_layers: int = Field(
        gt=0, le=LARGEST_COUNT, description="Number of transformer blocks."
    )
    num_attention_heads: int = Field(gt=0, le=LARGEST_COUNT, description="Number of query heads.")
    num_key_value_heads: int = Field(
        default=None,
        validate_default=True,
        gt=0,
        le=LARGEST_COUNT,
        description="Number of key and value heads. Left out: num_attention_heads.",
    )
    intermediate_size: int = Field(
        default=None,
        validate_default=True,
        gt=0,
        le=LARGEST_COUNT,
        description="Width of the feed-forward layer, in elements. Left out: 4 x hidden_size "
        "for gpt2; llama must state it.",
    )
    max_position_embeddings: int = Field(
        gt=0, le=LARGEST_COUNT, description="Longest sequence the model can take, in tokens."
    )
    tie_word_embeddings: bool = Field(
        default=None,
        validate_default=True,
        description="Whether the head shares the embedding's weight. Left out: true for gpt2, "
        "false for llama.",
    )
    embedding_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Dropout probability after the embedding."
    )
    attention_dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Dropout probability of attention weights."
    )
    residual_dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Dropout probability before each addition to the residual stream.",
    )
    layer_norm_epsilon: float = Field(
        default=1e-5, gt=0, description="Added to the variance in LayerNorm (gpt2)."
    )
    rms_norm_eps: float = Field(
        default=1e-5, gt=0, description="Added to the mean square in RMSNorm (llama)."
    )
    rope_theta: float = Field(
        default=10000.0, gt=0, description="Base of the rotary frequencies (llama)."
    )
    rope_scaling: RopeScaling | None = Field(
        default=None, description="Scaling of the rotary frequencies (llama); null for none."
    )
    initializer_range: float = Field(
        default=0.02, gt=0, description="Standard deviation of initial weights."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset_and_derive(cls, given: Any) -> Any:
        """Runs before the fields are checked, so that a filled-in value is checked as well."""
        if not isinstance(given, dict):
            return given
        preset = given.get("preset")
        shape = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
        stated = {k: v for k, v in given.items() if v is not None or k not in DERIVED_FIELDS}
        return _derive({**shape, **stated})

    @property
    def head_dim(self) -> int:
        """K: elements of one attention head."""
        return self.hidden_size // self.num_attention_heads


def _derive(fields: dict[str, Any]) -> dict[str, Any]:
    """Add the fields that follow from others; leaves out what cannot be worked out."""
    is_gpt2 = fields.get("architecture") == "gpt2"
    derived: dict[str, Any] = {"tie_word_embeddings": is_gpt2}
    if "num_attention_heads" in fields:
        derived["num_key_value_heads"] = fields["num_attention_heads"]
    if is_gpt2 and type(fields.get("hidden_size")) is int:
        derived["intermediate_size"] = 4 * fields["hidden_size"]
    return {**derived, **fields}

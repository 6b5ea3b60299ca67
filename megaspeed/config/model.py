"""The `model` section: the shape of the GPT, in Hugging Face's field names."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from megaspeed.config.families import FAMILIES, FamilyName
from megaspeed.config.presets import PRESETS
from megaspeed.config.section import (
    LARGEST_HEADS,
    LARGEST_LAYERS,
    LARGEST_LENGTH,
    LARGEST_VOCABULARY,
    LARGEST_WIDTH,
    PathText,
    Section,
)

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

FEATURES = (
    "norm",
    "positions",
    "mlp",
    "qkv_bias",
    "attention_output_bias",
    "mlp_bias",
    "qk_norm",
    "tie_word_embeddings",
)
"""Fields that the family sets if they are omitted or null."""

DERIVED_FIELDS = (*FEATURES, "num_key_value_heads", "head_dim", "intermediate_size")
"""Fields that are derived from others if they are omitted or null."""


class RopeScaling(Section):
    """Llama 3's scaling of the rotary frequencies for longer sequences."""

    rope_type: Literal["llama3"] = Field(
        description="How the frequencies are scaled; only llama3 is supported."
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
        gt=0, le=LARGEST_LENGTH, description="Positions the model was first trained on."
    )


class ModelConfig(Section):
    """The shape of the model. A preset gives every field; fields beside it override the preset."""

    preset: PresetName | None = Field(
        default=None,
        description="Name of a public shape that gives every field of this section; fields "
        "stated beside it override the preset's.",
    )
    from_hf: PathText | None = Field(
        default=None,
        description="Folder of a Hugging Face model, or its config.json, which gives every field "
        "of this section; fields stated beside it override the file's. The resolved config has "
        "the fields in its place.",
    )
    architecture: FamilyName = Field(
        description="The family of Hugging Face models that the model is exported to. It sets "
        "every feature that is omitted (norm, positions, mlp, biases, qk_norm, "
        "tie_word_embeddings)."
    )
    vocab_size: int = Field(
        gt=0,
        le=LARGEST_VOCABULARY,
        description="Number of token ids. It need not be divisible by parallel.tensor: it is "
        "padded internally, and the padding is never visible.",
    )
    hidden_size: int = Field(
        gt=0, le=LARGEST_WIDTH, description="Width of the residual stream, in elements."
    )
    num_hidden_layers: int = Field(
        gt=0, le=LARGEST_LAYERS, description="Number of transformer blocks."
    )
    num_attention_heads: int = Field(gt=0, le=LARGEST_HEADS, description="Number of query heads.")
    num_key_value_heads: int = Field(
        default=None,
        validate_default=True,
        gt=0,
        le=LARGEST_HEADS,
        description="Number of key and value heads. If omitted: num_attention_heads.",
    )
    intermediate_size: int = Field(
        default=None,
        validate_default=True,
        gt=0,
        le=LARGEST_WIDTH,
        description="Width of the feed-forward layer, in elements. If omitted: 4 x hidden_size if "
        "mlp is gelu; swiglu must state it.",
    )
    head_dim: int = Field(  # type: ignore[assignment]
        default=None,
        gt=0,
        le=LARGEST_WIDTH,
        description="Elements of one attention head. If omitted: hidden_size / "
        "num_attention_heads.",
    )
    norm: Literal["layer_norm", "rms_norm"] = Field(
        default=None,
        validate_default=True,
        description="layer_norm: with a bias (Ba et al. 2016); rms_norm (Zhang and Sennrich 2019). "
        "If omitted: the family's.",
    )
    positions: Literal["learned", "rotary"] = Field(
        default=None,
        validate_default=True,
        description="learned: added to the token embedding; rotary: queries and keys are rotated "
        "(Su et al. 2021). If omitted: the family's.",
    )
    mlp: Literal["gelu", "swiglu"] = Field(
        default=None,
        validate_default=True,
        description="gelu: down(gelu(up(x))); swiglu: down(silu(gate(x)) * up(x)) (Shazeer 2020). "
        "If omitted: the family's.",
    )
    qkv_bias: bool = Field(
        default=None,
        validate_default=True,
        description="Whether the projection to queries, keys and values has a bias. If omitted: "
        "the family's.",
    )
    attention_output_bias: bool = Field(
        default=None,
        validate_default=True,
        description="Whether the attention's output projection has a bias. If omitted: the "
        "family's.",
    )
    mlp_bias: bool = Field(
        default=None,
        validate_default=True,
        description="Whether the feed-forward layer's matrices have biases. If omitted: the "
        "family's.",
    )
    qk_norm: bool = Field(
        default=None,
        validate_default=True,
        description="Whether each head's queries and keys pass an RMSNorm before the rotation, "
        "with one weight for all query heads and one for all key heads. If omitted: the family's.",
    )
    sliding_window: int | None = Field(
        default=None,
        gt=0,
        le=LARGEST_LENGTH,
        description="Each token attends to this many tokens, itself included; null for all "
        "earlier ones. A sequence that is longer needs a mask, which flash attention cannot take.",
    )
    max_position_embeddings: int = Field(
        gt=0, le=LARGEST_LENGTH, description="Longest sequence the model can take, in tokens."
    )
    tie_word_embeddings: bool = Field(
        default=None,
        validate_default=True,
        description="Whether the head shares the embedding's weight. If omitted: the family's.",
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
        default=1e-5, gt=0, description="Added to the variance in layer_norm."
    )
    rms_norm_eps: float = Field(
        default=1e-5, gt=0, description="Added to the mean square in rms_norm and qk_norm."
    )
    rope_theta: float = Field(default=10000.0, gt=0, description="Base of the rotary frequencies.")
    rope_scaling: RopeScaling | None = Field(
        default=None, description="Scaling of the rotary frequencies; null for none."
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

    @model_validator(mode="after")
    def _fill_head_dim(self) -> Self:
        """Runs last, so that ``model_fields_set`` contains head_dim only if it was stated."""
        if "head_dim" not in self.model_fields_set:
            self.__dict__["head_dim"] = max(1, self.hidden_size // self.num_attention_heads)
        return self


def _derive(fields: dict[str, Any]) -> dict[str, Any]:
    """Adds the fields that follow from others, as far as those are stated."""
    family = FAMILIES.get(str(fields.get("architecture")))
    derived: dict[str, Any] = {} if family is None else dict(family.features)
    heads, hidden = fields.get("num_attention_heads"), fields.get("hidden_size")
    if heads is not None:
        derived["num_key_value_heads"] = heads
    if type(hidden) is int and {**derived, **fields}.get("mlp") == "gelu":
        derived["intermediate_size"] = 4 * hidden
    return {**derived, **fields}

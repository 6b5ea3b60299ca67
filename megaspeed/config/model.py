"""The ``model`` section: the shape of the GPT, in Hugging Face's field names."""

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from megaspeed.config.families import FAMILIES, FamilyName
from megaspeed.config.section import (
    LARGEST_EXPERTS,
    LARGEST_HEADS,
    LARGEST_LAYERS,
    LARGEST_LENGTH,
    LARGEST_VOCABULARY,
    LARGEST_WIDTH,
    PathText,
    Section,
)

PRESETS: Mapping[str, Mapping[str, Any]] = json.loads(
    files("megaspeed.config").joinpath("presets.json").read_text(encoding="utf-8")
)
"""Name -> fields of a public model's shape, from its published ``config.json`` or its paper:

    gpt3-175b    Brown et al. 2020, "Language Models are Few-Shot Learners", Table 2.1
    mt-nlg-530b  Smith et al. 2022, "Using DeepSpeed and Megatron to Train Megatron-Turing NLG
                 530B", the section on the model and its training
    gpt-7.5b     Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
                 Clusters", Table 1; the ZeRO paper's Table 1 has a model of this size

GPT-2 has 124M parameters (gpt2), 355M (gpt2-medium), 774M (gpt2-large) or 1.5B (gpt2-xl). The nano
and tiny models are megaspeed's own, for tests and for a first run.
"""

if TYPE_CHECKING:
    PresetName = str
else:
    PresetName = Literal[tuple(PRESETS)]

ContextMethod = Literal["ulysses", "all_gather"]
ExpertExchange = Literal["all_to_all", "all_gather"]

DERIVED_FIELDS = (
    *FAMILIES["gpt2"].features,
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "norm_topk_prob",
)
"""Fields that are computed from others if they are omitted or null."""


class LinearScaling(Section):
    """The same scaling of all rotary frequencies (Chen et al. 2023, Position Interpolation)."""

    rope_type: Literal["linear"]
    """All frequencies are divided by one factor (Chen et al. 2023)."""
    factor: float = Field(ge=1)
    """The frequencies are divided by this number."""


class Llama3Scaling(Section):
    """Llama 3's scaling of the rotary frequencies for longer sequences."""

    rope_type: Literal["llama3"]
    """Low frequencies are scaled, as in Llama 3.1."""
    factor: float = Field(gt=0)
    """Low frequencies are divided by this number (8.0 in Llama 3.1)."""
    low_freq_factor: float = Field(gt=0)
    """Wavelengths above original_max_position_embeddings / low_freq_factor positions are scaled in
    full."""
    high_freq_factor: float = Field(gt=0)
    """Wavelengths below original_max_position_embeddings / high_freq_factor positions are not
    scaled; between the two the scaling is blended."""
    original_max_position_embeddings: int = Field(gt=0, le=LARGEST_LENGTH)
    """Longest sequence of the model's original training, in tokens."""


class YarnScaling(Section):
    """YaRN's scaling of the rotary frequencies and of the attention (Peng et al. 2023)."""

    rope_type: Literal["yarn"]
    """Low frequencies and the attention scores are scaled (Peng et al. 2023, YaRN)."""
    factor: float = Field(ge=1)
    """Low frequencies are divided by this number, usually the longest sequence /
    original_max_position_embeddings."""
    original_max_position_embeddings: int = Field(gt=0, le=LARGEST_LENGTH)
    """Longest sequence of the model's original training, in tokens."""
    beta_fast: float = Field(default=32.0, gt=0)
    """Frequencies with more turns in original_max_position_embeddings positions are not scaled."""
    beta_slow: float = Field(default=1.0, gt=0)
    """Frequencies with fewer turns in original_max_position_embeddings positions are scaled in
    full; between the two the scaling is blended."""
    truncate: bool = True
    """Whether the two pairs of dims between which the scaling is blended are rounded outwards to
    whole numbers."""
    attention_factor: float | None = Field(default=None, gt=0)
    """Cosines and sines are multiplied by this number, so scores by its square. If omitted: 0.1 x
    ln(factor) + 1, or computed from mscale and mscale_all_dim."""
    mscale: float | None = Field(default=None, gt=0)
    """If it is stated, attention_factor is (0.1 x mscale x ln(factor) + 1) / (0.1 x mscale_all_dim
    x ln(factor) + 1), as in DeepSeek-V2."""
    mscale_all_dim: float | None = Field(default=None, gt=0)
    """See mscale. Both must be stated, or neither."""


RopeScaling = Annotated[
    LinearScaling | Llama3Scaling | YarnScaling, Field(discriminator="rope_type")
]


class ModelConfig(Section):
    """The shape of the model: a preset, fields, or a preset and the fields that differ."""

    preset: PresetName | None = None
    """Name of a public shape that gives every field of this section; fields stated beside it
    override the preset's."""
    from_hf: PathText | None = None
    """Folder of a Hugging Face model, or its config.json, which gives every field of this section;
    fields stated beside it override the file's. The resolved config has the fields, not from_hf."""
    architecture: FamilyName
    """The family of Hugging Face models that the model is exported to. It sets every feature that
    is omitted (norm, norm_position, positions, mlp, parallel_residual, biases, qk_norm,
    norm_topk_prob, tie_word_embeddings)."""
    vocab_size: int = Field(gt=0, le=LARGEST_VOCABULARY)
    """Number of token ids. It need not be divisible by parallel.tensor: it is padded internally,
    and the padding is never visible."""
    hidden_size: int = Field(gt=0, le=LARGEST_WIDTH)
    """Width of the residual stream, in elements."""
    num_hidden_layers: int = Field(gt=0, le=LARGEST_LAYERS)
    """Number of transformer blocks."""
    num_attention_heads: int = Field(gt=0, le=LARGEST_HEADS)
    """Number of query heads."""
    num_key_value_heads: int = Field(default=None, gt=0, le=LARGEST_HEADS)  # type: ignore[assignment]
    """Number of key and value heads. If omitted: num_attention_heads."""
    intermediate_size: int = Field(gt=0, le=LARGEST_WIDTH)
    """Width of the feed-forward layer, in elements. If omitted: 4 x hidden_size if mlp is gelu;
    swiglu must state it."""
    head_dim: int = Field(default=None, gt=0, le=LARGEST_WIDTH)  # type: ignore[assignment]
    """Elements of one attention head. If omitted: hidden_size / num_attention_heads."""
    num_experts: int | None = Field(default=None, gt=1, le=LARGEST_EXPERTS)
    """Number of experts: feed-forward layers of a block, of which each token uses
    num_experts_per_tok (Shazeer et al. 2017, "Outrageously large neural networks"). null: a block
    has one feed-forward layer, which all tokens use."""
    num_experts_per_tok: int | None = Field(default=None, gt=0, le=LARGEST_EXPERTS)
    """Number of experts that each token uses: those with the largest scores. The scores are the
    softmax of the router's output."""
    moe_intermediate_size: int | None = Field(default=None, gt=0, le=LARGEST_WIDTH)
    """Width of one expert, in elements. If omitted: intermediate_size."""
    norm_topk_prob: bool = False
    """Whether the scores of the experts that a token uses are divided by their sum. If omitted: the
    family's."""
    router_aux_loss_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the auxiliary loss, which balances experts. For each block and sequence, this
    loss is num_experts x the sum over experts of (the fraction of the sequence's tokens that use
    the expert) x (the expert's mean score in the sequence) (Fedus et al. 2021, "Switch
    Transformers", equation 4). The loss that is reported does not contain it."""
    router_bias_rate: float = Field(default=0.0, ge=0)
    """Rate of the bias that balances experts. After each step, the bias of an expert rises by this
    number if the expert got fewer tokens than the mean, and falls by it if the expert got more
    (Wang et al. 2024, "Auxiliary-loss-free load balancing strategy"). The bias is added to the
    score of the expert only to choose experts. Usual: 0.001."""
    norm: Literal["layer_norm", "rms_norm"]
    """layer_norm: with a bias (Ba et al. 2016); rms_norm (Zhang and Sennrich 2019). If omitted: the
    family's."""
    positions: Literal["learned", "rotary"]
    """learned: added to the token embedding; rotary: queries and keys are rotated (Su et al. 2021).
    If omitted: the family's."""
    mlp: Literal["gelu", "exact_gelu", "swiglu"]
    """gelu: down(gelu(up(x))) with the tanh approximation of GELU; exact_gelu: without it; swiglu:
    down(silu(gate(x)) * up(x)) (Shazeer 2020). If omitted: the family's."""
    norm_position: Literal["before", "after"]
    """before: x + f(norm(x)), where f is the attention or the feed-forward layer; after: x +
    norm(f(x)), as in OLMo 2. If omitted: the family's."""
    parallel_residual: bool
    """Whether attention and MLP read the same input x: a block is x + attention(norm(x)) +
    mlp(norm(x)), with two norms, as in GPT-NeoX. If omitted: the family's."""
    qkv_bias: bool
    """Whether the projection to queries, keys and values has a bias. If omitted: the family's."""
    attention_output_bias: bool
    """Whether the attention's output projection has a bias. If omitted: the family's."""
    mlp_bias: bool
    """Whether the feed-forward layer's matrices have biases. If omitted: the family's."""
    qk_norm: bool | Literal["all_heads"]
    """Whether queries and keys pass an RMSNorm before the rotation. true: over each head, with one
    weight for all query heads and one for all key heads; all_heads: over all query heads together,
    and over all key heads together, as in OLMo 2. If omitted: the family's."""
    sliding_window: int | None = Field(default=None, gt=0, le=LARGEST_LENGTH)
    """Each token attends to this many tokens, itself included; null for all earlier ones. If the
    sequence is longer, attention needs a mask of S x S, unless a GPU can use FlashAttention (in 16
    bits, without attention dropout)."""
    max_position_embeddings: int = Field(gt=0, le=LARGEST_LENGTH)
    """Longest sequence the model can take, in tokens."""
    tie_word_embeddings: bool
    """Whether the head shares the embedding's weight. If omitted: the family's."""
    embedding_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability after the embedding."""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of attention weights."""
    residual_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability before each addition to the residual stream."""
    layer_norm_epsilon: float = Field(default=1e-5, gt=0)
    """Added to the variance in layer_norm."""
    rms_norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the mean square in rms_norm and qk_norm."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies; null for none."""
    partial_rotary_factor: float = Field(default=1.0, gt=0, le=1)
    """Fraction of each head's elements that are rotated. These are the first ones."""
    no_rope_layer_interval: int | None = Field(default=None, gt=1, le=LARGEST_LAYERS)
    """Every n-th block, counted from 1, does not rotate its queries and keys (Yang et al. 2025,
    "Rope to Nope and back again"). This is n; null to rotate in all blocks."""
    embedding_multiplier: float = Field(default=1.0, gt=0)
    """The token embedding is multiplied by this number."""
    residual_multiplier: float = Field(default=1.0, gt=0)
    """The outputs of the attention and of the feed-forward layer are multiplied by this number
    before they are added to the residual stream."""
    attention_multiplier: float | None = Field(default=None, gt=0)
    """Attention scores are multiplied by this number; null for 1 / sqrt(head_dim)."""
    logits_scaling: float = Field(default=1.0, gt=0)
    """Logits are divided by this number."""
    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of initial weights."""

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward layer has a gate."""
        return self.mlp == "swiglu"

    @property
    def expert_width(self) -> int:
        """Width of one expert, or of the feed-forward layer if there are no experts."""
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that are rotated; 0 without rotary positions."""
        is_rotary = self.positions == "rotary"
        return int(self.head_dim * self.partial_rotary_factor) if is_rotary else 0

    def why_mask(self, device_type: str, element_bytes: int) -> str | None:
        """Return why attention within documents, within a window, or to gathered keys needs a mask.

        Args:
            device_type: "cpu" or "cuda".
            element_bytes: of queries, keys and values.

        Returns:
            What the kernel without a mask does not support; None if it supports this attention.
        """
        if self.attention_dropout > 0.0:
            return "the dropout of fused kernels depends on the layout"
        if device_type == "cpu":
            window = self.sliding_window
            return None if window is None else "torch's FlashAttention for CPUs has no window"
        if element_bytes != 2:
            return "torch's FlashAttention for GPUs needs 16-bit numbers"
        if self.head_dim > 256 or self.head_dim % 8 != 0:
            return "torch's FlashAttention needs a head size that is a multiple of 8 up to 256"
        return None

    def warnings(self) -> Iterator[str]:
        """Yield a warning, with a fix, for each setting that works but is slow or trains badly."""
        if dropout := self._dropout_warning():
            yield dropout
        if self.num_experts and not (self.router_bias_rate or self.router_aux_loss_coef):
            yield (
                "nothing balances the experts (model.router_bias_rate and "
                "model.router_aux_loss_coef are 0), so a few of them may get most tokens; to "
                "balance them, --set model.router_bias_rate=0.001"
            )

    def _dropout_warning(self) -> str | None:
        """Return a warning with the rates, the cost and a fix; None if there is no dropout."""
        names = ("embedding_dropout", "attention_dropout", "residual_dropout")
        rates = {name: getattr(self, name) for name in names if getattr(self, name) > 0.0}
        if not rates:
            return None
        stated = ", ".join(f"model.{name} {rate:g}" for name, rate in rates.items())
        cost = "each mask is computed again in backward"
        if self.attention_dropout > 0.0:
            cost = "attention runs without its fused kernel, and keeps S x S matrices of each head"
        mend = " ".join(f"model.{name}=0" for name in rates)
        return f"the model has dropout ({stated}), so {cost}; to train without it, --set {mend}"

    def local_heads(self, tp: int) -> tuple[int, int]:
        """Return the query and the key/value heads of one of ``tp`` tensor ranks."""
        return self.num_attention_heads // tp, max(1, self.num_key_value_heads // tp)

    def exchanged_features(self, method: ContextMethod, *, cp: int, tp: int) -> tuple[int, ...]:
        """Return the features of a token in each message of a block's forward over a context axis.

        Args:
            method: ulysses or all_gather.
            cp: ranks of the context axis. Ulysses copies key/value heads if there are fewer.
            tp: ranks of the tensor axis.

        Returns:
            Of q query and kv key features: (q + 2 kv, q) for the two all-to-alls of ulysses, or
            (2 kv,) for the all-gather of keys and values.
        """
        heads, shared = self.local_heads(tp)
        if method == "all_gather":
            return (2 * shared * self.head_dim,)
        return (heads + 2 * max(shared, cp)) * self.head_dim, heads * self.head_dim

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        """Add the fields of the preset and of the family. Runs before the fields are checked."""
        if not isinstance(given, dict):
            return given
        preset = given.get("preset")
        shape = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
        stated = {k: v for k, v in given.items() if v is not None or k not in DERIVED_FIELDS}
        fields = {**shape, **stated}
        # If a value that others depend on is invalid, the others get any valid value.
        family = FAMILIES.get(str(fields.get("architecture")), FAMILIES["gpt2"])
        fields = {**family.features, **fields}
        if "intermediate_size" not in fields and "moe_intermediate_size" in fields:
            fields["intermediate_size"] = fields["moe_intermediate_size"]
        if fields["mlp"] != "swiglu" and "intermediate_size" not in fields:
            hidden = fields.get("hidden_size")
            if not isinstance(hidden, int) or not 0 < hidden <= LARGEST_WIDTH:
                hidden = 1
            fields["intermediate_size"] = 4 * hidden
        return fields

    @model_validator(mode="after")
    def _fill_in_heads(self) -> Self:
        """Run last, so that ``model_fields_set`` contains head_dim only if the JSON states it."""
        head_dim = max(1, self.hidden_size // self.num_attention_heads)
        computed = {"num_key_value_heads": self.num_attention_heads, "head_dim": head_dim}
        if self.num_experts is not None:
            computed["moe_intermediate_size"] = self.intermediate_size
        for name in computed.keys() - self.model_fields_set:
            self.__dict__[name] = computed[name]
        return self

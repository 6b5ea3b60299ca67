"""The families of models. To add one, define its ``Family`` and name it in ``FAMILIES``."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

# A family of models: the features that its members share, and how transformers writes one.


@dataclass(frozen=True)
class Key:
    """A key of a config.json that is one of our fields.

    Attributes:
        theirs: the key.
        ours: the field of the `model` section.
        default: transformers' value if the file omits the key. None: the field is derived, or null.
    """

    theirs: str
    ours: str
    default: Any = None


@dataclass(frozen=True)
class FixedKey:
    """A key that must have one of some values; the first is transformers' default."""

    key: str
    allowed: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Family:
    """What `model.architecture` names.

    Attributes:
        features: fields of the `model` section that the family sets unless the JSON states them.
        class_name: transformers' class with the language-modelling head.
        keys: the keys of its config.json that are fields of ours.
        fixed: the keys for which our model supports only some values.
        other_names: second names of keys that transformers accepts.
        prefix: start of the name of every tensor but the head's. Files of the model without its
            head omit it.
        blocks: their name for the list of blocks.
        modules: our module -> their modules. Names within a block omit "blocks.3.". There is one of
            their modules for each section of our rows (``model/parameters.py``), or one for all.
        transposes_blocks: whether the matrices of a block are stored as (in, out).
        buffers: regular expression for names of constants that older files also contain.
    """

    features: Mapping[str, Any]
    class_name: str
    keys: tuple[Key, ...]
    fixed: tuple[FixedKey, ...]
    other_names: Mapping[str, str] = field(default_factory=dict)
    prefix: str
    blocks: str
    modules: Mapping[str, tuple[str, ...]]
    transposes_blocks: bool = False
    buffers: str


# Llama (Touvron et al. 2023), and the keys and names that later families share with it.
#
# These families rotate dim i of a head together with dim i + K/2. Our model does the same, so the
# rows of a head keep their order.

KEYS = (
    Key("vocab_size", "vocab_size", 32000),
    Key("hidden_size", "hidden_size", 4096),
    Key("num_hidden_layers", "num_hidden_layers", 32),
    Key("num_attention_heads", "num_attention_heads", 32),
    Key("num_key_value_heads", "num_key_value_heads"),
    Key("head_dim", "head_dim"),
    Key("intermediate_size", "intermediate_size", 11008),
    Key("max_position_embeddings", "max_position_embeddings", 2048),
    Key("tie_word_embeddings", "tie_word_embeddings", False),
    Key("attention_dropout", "attention_dropout"),
    Key("rms_norm_eps", "rms_norm_eps", 1e-6),
    Key("initializer_range", "initializer_range", 0.02),
)

LLAMA = Family(
    features={
        "norm": "rms_norm",
        "positions": "rotary",
        "mlp": "swiglu",
        "qkv_bias": False,
        "attention_output_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "tie_word_embeddings": False,
    },
    class_name="LlamaForCausalLM",
    keys=(
        *KEYS,
        Key("attention_bias", "qkv_bias", False),
        Key("attention_bias", "attention_output_bias", False),
        Key("mlp_bias", "mlp_bias", False),
    ),
    fixed=(
        FixedKey("hidden_act", ("silu", "swish")),
        FixedKey("pretraining_tp", (1, None)),
        FixedKey("sliding_window", (None,)),
        FixedKey("attention_chunk_size", (None,)),
    ),
    prefix="model.",
    blocks="model.layers",
    modules={
        "embedding.tokens": ("model.embed_tokens",),
        "attention_norm": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.query_norm": ("self_attn.q_norm",),
        "attention.key_norm": ("self_attn.k_norm",),
        "attention.output": ("self_attn.o_proj",),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": ("mlp.down_proj",),
        "head.norm": ("model.norm",),
        "head.output": ("lm_head",),
    },
    buffers=r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
)


# GPT-2 (Radford et al. 2019). Its blocks store (in, out) matrices, called Conv1D there.

GPT2 = Family(
    features={
        "norm": "layer_norm",
        "positions": "learned",
        "mlp": "gelu",
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "qk_norm": False,
        "tie_word_embeddings": True,
    },
    class_name="GPT2LMHeadModel",
    keys=(
        Key("vocab_size", "vocab_size", 50257),
        Key("n_embd", "hidden_size", 768),
        Key("n_layer", "num_hidden_layers", 12),
        Key("n_head", "num_attention_heads", 12),
        Key("n_inner", "intermediate_size"),
        Key("n_positions", "max_position_embeddings", 1024),
        Key("tie_word_embeddings", "tie_word_embeddings", True),
        Key("embd_pdrop", "embedding_dropout", 0.1),
        Key("attn_pdrop", "attention_dropout", 0.1),
        Key("resid_pdrop", "residual_dropout", 0.1),
        Key("layer_norm_epsilon", "layer_norm_epsilon", 1e-5),
        Key("initializer_range", "initializer_range", 0.02),
    ),
    fixed=(
        FixedKey("activation_function", ("gelu_new", "gelu_pytorch_tanh")),
        FixedKey("scale_attn_weights", (True,)),
        FixedKey("scale_attn_by_inverse_layer_idx", (False,)),
        FixedKey("reorder_and_upcast_attn", (False,)),
    ),
    other_names={
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    prefix="transformer.",
    blocks="transformer.h",
    modules={
        "embedding.tokens": ("transformer.wte",),
        "embedding.positions": ("transformer.wpe",),
        "attention_norm": ("ln_1",),
        "attention.qkv": ("attn.c_attn",),
        "attention.output": ("attn.c_proj",),
        "mlp_norm": ("ln_2",),
        "mlp.up": ("mlp.c_fc",),
        "mlp.down": ("mlp.c_proj",),
        "head.norm": ("transformer.ln_f",),
        "head.output": ("lm_head",),
    },
    transposes_blocks=True,
    buffers=r"h\.\d+\.attn\.(bias|masked_bias)",
)


# Mistral (Jiang et al. 2023): Llama with a sliding window.

MISTRAL = replace(
    LLAMA,
    class_name="MistralForCausalLM",
    keys=(
        *KEYS,
        Key("num_key_value_heads", "num_key_value_heads", 8),
        Key("intermediate_size", "intermediate_size", 14336),
        Key("max_position_embeddings", "max_position_embeddings", 131072),
        Key("sliding_window", "sliding_window", 4096),
    ),
    fixed=(FixedKey("hidden_act", ("silu", "swish")),),
)


# Qwen2 and Qwen2.5, dense (Yang et al. 2024): Llama with biases of queries, keys and values.

QWEN2 = replace(
    LLAMA,
    features={**LLAMA.features, "qkv_bias": True},
    class_name="Qwen2ForCausalLM",
    keys=(
        *KEYS,
        Key("vocab_size", "vocab_size", 151936),
        Key("num_key_value_heads", "num_key_value_heads", 32),
        Key("intermediate_size", "intermediate_size", 22016),
        Key("max_position_embeddings", "max_position_embeddings", 32768),
    ),
    fixed=(FixedKey("hidden_act", ("silu", "swish")), FixedKey("use_sliding_window", (False,))),
)


# Qwen3, dense (Yang et al. 2025): Llama with norms of queries and keys and its own head size.

QWEN3 = replace(
    LLAMA,
    features={**LLAMA.features, "qk_norm": True},
    class_name="Qwen3ForCausalLM",
    keys=(
        *KEYS,
        Key("vocab_size", "vocab_size", 151936),
        Key("num_key_value_heads", "num_key_value_heads", 32),
        Key("head_dim", "head_dim", 128),
        Key("intermediate_size", "intermediate_size", 22016),
        Key("max_position_embeddings", "max_position_embeddings", 32768),
        Key("attention_bias", "qkv_bias", False),
        Key("attention_bias", "attention_output_bias", False),
    ),
    fixed=(FixedKey("hidden_act", ("silu", "swish")), FixedKey("use_sliding_window", (False,))),
)


# The families of models, one file each. To add one, write its file and name it here.

FamilyName = Literal["gpt2", "llama", "mistral", "qwen2", "qwen3"]

FAMILIES: Mapping[str, Family] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
}

"""The families of models.

To add one, define its ``Family``, and name it in ``FAMILIES``.

Models of Llama's families rotate dim i of a head together with dim i + K/2, as our model does, so
the rows of a head keep their order.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple


class Key(NamedTuple):
    """A key of a config.json."""

    name: str
    # The value of transformers if the file omits the key. None: the field is derived, or null.
    default: Any = None
    # Their value -> ours, if they differ. Other values are refused. If several of theirs mean the
    # same, an export writes the first.
    values: Mapping[str, str] | None = None


def _keys(**defaults: Any) -> dict[str, Key]:
    """Return keys with the names of our fields."""
    return {name: Key(name, default) for name, default in defaults.items()}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A value of ``model.architecture``."""

    # Fields of the ``model`` section that the family sets unless the JSON states them.
    features: Mapping[str, Any]
    class_name: str  # transformers' class with the language-modelling head
    keys: Mapping[str, Key]  # field of the ``model`` section -> the key of the config.json
    # Other keys of the config.json -> the values that our model supports; the first is
    # transformers' default.
    fixed: Mapping[str, tuple[Any, ...]]
    # Second names of keys that transformers accepts -> the key.
    other_names: Mapping[str, str] = field(default_factory=dict)
    # The kinds of rotary scaling that its files may state.
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    # Start of the name of every tensor but the head's. Files of the model without its head omit it.
    prefix: str
    blocks: str  # their name for the list of blocks
    # Our module -> their modules. Names within a block omit "blocks.3.". There is one of their
    # modules for each section of our rows (``model/parameters.py``), or one for all. "{}" stands
    # for the number of an expert.
    modules: Mapping[str, tuple[str, ...]]
    transposes_blocks: bool = False  # whether the matrices of a block are stored as (in, out)
    # Whether the rows of ``attention.qkv`` are stored head by head: query, key and value of the
    # first head, then those of the second one.
    interleaves_heads: bool = False
    buffers: str  # regular expression for names of constants that older files also contain


_SHARED_KEYS = {"mlp": Key("hidden_act", "silu", {"silu": "swiglu", "swish": "swiglu"})}
_SHARED_KEYS |= _keys(
    vocab_size=32000,
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=None,
    head_dim=None,
    intermediate_size=11008,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
    attention_dropout=None,
    rms_norm_eps=1e-6,
    initializer_range=0.02,
)
_LAYER_NORM_KEYS = {name: key for name, key in _SHARED_KEYS.items() if name != "rms_norm_eps"}
_ATTENTION_BIASES = {
    "qkv_bias": Key("attention_bias", False),
    "attention_output_bias": Key("attention_bias", False),
}
_GELU = dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu")
_GELU |= {"gelu": "exact_gelu"}

# Touvron et al. 2023
LLAMA = Family(
    features={
        "norm": "rms_norm",
        "norm_position": "before",
        "positions": "rotary",
        "mlp": "swiglu",
        "parallel_residual": False,
        "qkv_bias": False,
        "attention_output_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "tie_word_embeddings": False,
    },
    class_name="LlamaForCausalLM",
    keys={**_SHARED_KEYS, **_ATTENTION_BIASES, **_keys(mlp_bias=False)},
    fixed={
        "pretraining_tp": (1, None),
        "sliding_window": (None,),
        "attention_chunk_size": (None,),
    },
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

# Radford et al. 2019. Its blocks store (in, out) matrices, called Conv1D in transformers.
GPT2 = Family(
    features={
        "norm": "layer_norm",
        "norm_position": "before",
        "positions": "learned",
        "mlp": "gelu",
        "parallel_residual": False,
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "qk_norm": False,
        "tie_word_embeddings": True,
    },
    class_name="GPT2LMHeadModel",
    keys={
        **_keys(
            vocab_size=50257,
            tie_word_embeddings=True,
            layer_norm_epsilon=1e-5,
            initializer_range=0.02,
        ),
        "hidden_size": Key("n_embd", 768),
        "num_hidden_layers": Key("n_layer", 12),
        "num_attention_heads": Key("n_head", 12),
        "intermediate_size": Key("n_inner"),
        "max_position_embeddings": Key("n_positions", 1024),
        "embedding_dropout": Key("embd_pdrop", 0.1),
        "attention_dropout": Key("attn_pdrop", 0.1),
        "residual_dropout": Key("resid_pdrop", 0.1),
        "mlp": Key("activation_function", "gelu_new", _GELU),
    },
    fixed={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
    },
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

# Jiang et al. 2023: Llama with a sliding window
MISTRAL = replace(
    LLAMA,
    class_name="MistralForCausalLM",
    keys={
        **_SHARED_KEYS,
        **_keys(num_key_value_heads=8, intermediate_size=14336),
        **_keys(max_position_embeddings=131072, sliding_window=4096),
    },
    fixed={},
)

_QWEN_KEYS = {
    **_SHARED_KEYS,
    **_keys(vocab_size=151936, max_position_embeddings=32768),
    **_keys(num_key_value_heads=32, intermediate_size=22016),
}
_QWEN_FIXED = {"use_sliding_window": (False,)}

# Yang et al. 2024, dense, also Qwen2.5: Llama with biases of queries, keys and values
QWEN2 = replace(
    LLAMA,
    features={**LLAMA.features, "qkv_bias": True},
    class_name="Qwen2ForCausalLM",
    keys=_QWEN_KEYS,
    fixed=_QWEN_FIXED,
)

# Yang et al. 2025, dense: Llama with norms of queries and keys and its own head size
QWEN3 = replace(
    LLAMA,
    features={**LLAMA.features, "qk_norm": True},
    class_name="Qwen3ForCausalLM",
    keys={**_QWEN_KEYS, **_keys(head_dim=128), **_ATTENTION_BIASES},
    fixed=_QWEN_FIXED,
)

# Abdin et al. 2024, also Phi-4: Mistral with fused matrices. In transformers, its config refuses
# linear and Llama 3's scaling and takes yarn for longrope, and its model ignores embd_pdrop.
PHI3 = replace(
    MISTRAL,
    class_name="Phi3ForCausalLM",
    keys={
        **MISTRAL.keys,
        **_keys(vocab_size=32064, hidden_size=3072, intermediate_size=8192, rms_norm_eps=1e-5),
        **_keys(num_key_value_heads=None, max_position_embeddings=4096, sliding_window=None),
        **_keys(partial_rotary_factor=1.0),
        "residual_dropout": Key("resid_pdrop", 0.0),
    },
    rope_types=("default",),
    modules={
        **LLAMA.modules,
        "attention.qkv": ("self_attn.qkv_proj",),
        "mlp.gate_up": ("mlp.gate_up_proj",),
    },
)

# Lozhkov et al. 2024: Llama's attention and names, GPT-2's norms, biases and feed-forward layer
STARCODER2 = replace(
    LLAMA,
    features={**GPT2.features, "positions": "rotary"},
    class_name="Starcoder2ForCausalLM",
    keys={
        **_LAYER_NORM_KEYS,
        **_keys(vocab_size=49152, hidden_size=3072, intermediate_size=12288),
        **_keys(num_hidden_layers=30, num_attention_heads=24, num_key_value_heads=2),
        **_keys(max_position_embeddings=4096, sliding_window=None, tie_word_embeddings=True),
        **_keys(residual_dropout=0.0, embedding_dropout=0.0, initializer_range=0.018042),
        **dict.fromkeys(("qkv_bias", "attention_output_bias", "mlp_bias"), Key("use_bias", True)),
        "layer_norm_epsilon": Key("norm_epsilon", 1e-5),
        "mlp": Key("hidden_act", "gelu_pytorch_tanh", _GELU),
    },
    fixed={},
    modules={**LLAMA.modules, "mlp.up": ("mlp.c_fc",), "mlp.down": ("mlp.c_proj",)},
)

# OLMo et al. 2024: Llama with norms after attention and MLP, and norms over all heads
OLMO2 = replace(
    LLAMA,
    features={**LLAMA.features, "norm_position": "after", "qk_norm": "all_heads"},
    class_name="Olmo2ForCausalLM",
    keys={**_SHARED_KEYS, **_ATTENTION_BIASES, **_keys(vocab_size=50304, rms_norm_eps=1e-5)},
    fixed={},
    modules={
        **LLAMA.modules,
        "attention_norm": ("post_attention_layernorm",),
        "mlp_norm": ("post_feedforward_layernorm",),
    },
)

# "{}" is the number of an expert.
_EXPERTS = {
    **LLAMA.modules,
    "mlp.router": ("mlp.gate",),
    "mlp.gate_up": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "mlp.down": ("mlp.experts.{}.down_proj",),
}
# Settings of other mixtures, which transformers' classes of these families do not read
_NO_OTHER_EXPERTS = {
    "n_shared_experts": (None, 0),
    "shared_expert_intermediate_size": (None, 0),
    "first_k_dense_replace": (None, 0),
    "scoring_func": (None, "softmax"),
    "n_group": (None, 1),
    "mlp_bias": (None, False),
}

# Jiang et al. 2024: Mistral with experts, whose scores are always normalized
MIXTRAL = replace(
    MISTRAL,
    features={**LLAMA.features, "norm_topk_prob": True},
    class_name="MixtralForCausalLM",
    keys={
        **MISTRAL.keys,
        **_keys(sliding_window=None, rms_norm_eps=1e-5, rope_theta=1e6, num_experts_per_tok=2),
        "num_experts": Key("num_local_experts", 8),
    },
    fixed={**_NO_OTHER_EXPERTS, "router_jitter_noise": (0.0, 0)},
    other_names={"num_experts": "num_local_experts"},
    modules={
        **_EXPERTS,
        "mlp.router": ("block_sparse_moe.gate",),
        "mlp.gate_up": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        "mlp.down": ("block_sparse_moe.experts.{}.w2",),
    },
)

# Yang et al. 2025: Qwen3 with experts in each block. transformers 5.23 writes num_local_experts,
# older versions num_experts.
QWEN3_MOE = replace(
    QWEN3,
    features={**QWEN3.features, "norm_topk_prob": False},
    class_name="Qwen3MoeForCausalLM",
    keys={
        **QWEN3.keys,
        **_keys(hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, head_dim=None),
        **_keys(num_key_value_heads=4, moe_intermediate_size=768, norm_topk_prob=False),
        **_keys(num_experts=128, num_experts_per_tok=8),
    },
    fixed={
        **_QWEN_FIXED,
        **_NO_OTHER_EXPERTS,
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], None),
    },
    other_names={"num_local_experts": "num_experts"},
    modules=_EXPERTS,
)

# Muennighoff et al. 2024: Llama with experts, and norms over all heads
OLMOE = replace(
    LLAMA,
    features={**LLAMA.features, "qk_norm": "all_heads", "norm_topk_prob": False},
    class_name="OlmoeForCausalLM",
    keys={
        **{name: key for name, key in _SHARED_KEYS.items() if name != "head_dim"},
        **_ATTENTION_BIASES,
        **_keys(vocab_size=50304, hidden_size=2048, intermediate_size=2048, num_hidden_layers=16),
        **_keys(num_attention_heads=16, max_position_embeddings=4096, rms_norm_eps=1e-5),
        **_keys(num_experts=64, num_experts_per_tok=8, norm_topk_prob=False),
    },
    fixed={**_NO_OTHER_EXPERTS, "clip_qkv": (None,)},
    other_names={"num_local_experts": "num_experts"},
    modules=_EXPERTS,
)

# Bakouch et al. 2025: Llama in which every fourth block has no rotation
SMOLLM3 = replace(
    LLAMA,
    features={**LLAMA.features, "tie_word_embeddings": True},
    class_name="SmolLM3ForCausalLM",
    keys={
        **LLAMA.keys,
        **_keys(vocab_size=128256, hidden_size=2048, num_hidden_layers=36),
        **_keys(num_attention_heads=16, num_key_value_heads=4, tie_word_embeddings=True),
        **_keys(max_position_embeddings=32768, rope_theta=2e6, no_rope_layer_interval=4),
    },
    fixed={"use_sliding_window": (False,)},
)

# Granite Team, IBM 2024, dense: Llama with four multipliers
GRANITE = replace(
    LLAMA,
    class_name="GraniteForCausalLM",
    keys={
        **LLAMA.keys,
        **_keys(embedding_multiplier=1.0, residual_multiplier=1.0),
        **_keys(attention_multiplier=1.0, logits_scaling=1.0),
    },
    fixed={},
)

# Bellagente et al. 2024: Llama with layer norms, which rotates a quarter of each head
STABLELM = replace(
    LLAMA,
    features={**LLAMA.features, "norm": "layer_norm"},
    class_name="StableLmForCausalLM",
    keys={
        **{name: key for name, key in _LAYER_NORM_KEYS.items() if name != "head_dim"},
        **_keys(vocab_size=50304, hidden_size=2560, intermediate_size=6912),
        **_keys(num_key_value_heads=32, max_position_embeddings=4096, partial_rotary_factor=0.25),
        "qkv_bias": Key("use_qkv_bias", False),
        "layer_norm_epsilon": Key("layer_norm_eps", 1e-5),
    },
    # Its hidden_dropout applies only to the output of the feed-forward layer.
    fixed={"qk_layernorm": (False,), "use_parallel_residual": (False,), "hidden_dropout": (0.0, 0)},
)

# Black et al. 2022, also Pythia (Biderman et al. 2023)
GPT_NEOX = Family(
    features={
        **GPT2.features,
        "positions": "rotary",
        "mlp": "exact_gelu",
        "parallel_residual": True,
        "tie_word_embeddings": False,
    },
    class_name="GPTNeoXForCausalLM",
    keys={
        **_keys(vocab_size=50432, hidden_size=6144, num_hidden_layers=44, num_attention_heads=64),
        **_keys(intermediate_size=24576, max_position_embeddings=2048, initializer_range=0.02),
        **_keys(tie_word_embeddings=False, attention_dropout=0.0),
        **dict.fromkeys(("qkv_bias", "attention_output_bias"), Key("attention_bias", True)),
        **dict.fromkeys(("embedding_dropout", "residual_dropout"), Key("hidden_dropout", 0.0)),
        "mlp": Key("hidden_act", "gelu", _GELU),
        "parallel_residual": Key("use_parallel_residual", True),
        "layer_norm_epsilon": Key("layer_norm_eps", 1e-5),
        "rope_theta": Key("rotary_emb_base", 10000.0),
        "partial_rotary_factor": Key("rotary_pct", 0.25),
    },
    fixed={"head_dim": (None,)},  # it would change only the rotation
    prefix="gpt_neox.",
    blocks="gpt_neox.layers",
    modules={
        "embedding.tokens": ("gpt_neox.embed_in",),
        "attention_norm": ("input_layernorm",),
        "attention.qkv": ("attention.query_key_value",),
        "attention.output": ("attention.dense",),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp.up": ("mlp.dense_h_to_4h",),
        "mlp.down": ("mlp.dense_4h_to_h",),
        "head.norm": ("gpt_neox.final_layer_norm",),
        "head.output": ("embed_out",),
    },
    interleaves_heads=True,
    buffers=r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
)

_DEEPSEEK = "latent attention, shared experts, dense first blocks or groups of experts"

UNSUPPORTED: Mapping[str, str] = {
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": f"{_DEEPSEEK} with sigmoid scores",
    "glm4_moe": "shared experts, sigmoid scores or dense first blocks",
    "gpt_oss": "biases of experts, clamped activations, attention sinks or alternating windows",
    "qwen2_moe": "shared experts",
    "qwen3_next": "linear attention or shared experts",
}
"""Family of a mixture of experts that is not supported -> what it needs and our model lacks."""

FAMILIES: Mapping[str, Family] = {
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    "granite": GRANITE,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "olmo2": OLMO2,
    "olmoe": OLMOE,
    "phi3": PHI3,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "smollm3": SMOLLM3,
    "stablelm": STABLELM,
    "starcoder2": STARCODER2,
}

if TYPE_CHECKING:
    FamilyName = str
else:
    FamilyName = Literal[tuple(FAMILIES)]

"""Llama (Touvron et al. 2023), and the keys and names that later families share with it.

These families rotate dim i of a head together with dim i + K/2. Our model does the same, so the
rows of a head keep their order.
"""

from megaspeed.config.families.family import Family, FixedKey, Key

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

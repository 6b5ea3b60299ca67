"""GPT-2 (Radford et al. 2019). Its blocks store (in, out) matrices, called Conv1D there."""

from megaspeed.config.families.family import Family, FixedKey, Key

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

"""Qwen3, dense (Yang et al. 2025): Llama with norms of queries and keys and its own head size."""

from dataclasses import replace

from megaspeed.config.families.family import FixedKey, Key
from megaspeed.config.families.llama import KEYS, LLAMA

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

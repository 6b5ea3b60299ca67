"""Qwen2 and Qwen2.5, dense (Yang et al. 2024): Llama with biases of queries, keys and values."""

from dataclasses import replace

from megaspeed.config.families.family import FixedKey, Key
from megaspeed.config.families.llama import KEYS, LLAMA

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

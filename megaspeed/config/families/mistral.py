"""Mistral (Jiang et al. 2023): Llama with a sliding window."""

from dataclasses import replace

from megaspeed.config.families.family import FixedKey, Key
from megaspeed.config.families.llama import KEYS, LLAMA

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

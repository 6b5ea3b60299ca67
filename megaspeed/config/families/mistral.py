"""Mistral (Jiang et al. 2023): Llama with a sliding window."""

from megaspeed.config.families.family import Family, FixedKey, Key
from megaspeed.config.families.llama import BUFFERS, FEATURES, KEYS, MODULES

MISTRAL = Family(
    features=FEATURES,
    class_name="MistralForCausalLM",
    keys=(
        *KEYS,
        Key("num_key_value_heads", "num_key_value_heads", 8),
        Key("intermediate_size", "intermediate_size", 14336),
        Key("max_position_embeddings", "max_position_embeddings", 131072),
        Key("sliding_window", "sliding_window", 4096),
    ),
    fixed=(FixedKey("hidden_act", ("silu", "swish")),),
    prefix="model.",
    blocks="model.layers",
    modules=MODULES,
    buffers=BUFFERS,
)

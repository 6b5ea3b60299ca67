"""The public shapes of GPT models, under the names people know them by.

Sources: the `config.json` of each model as published. GPT-2 is named by the sizes of its
parameters: gpt2 124M, gpt2-medium 355M, gpt2-large 774M, gpt2-xl 1.5B. The nano and tiny models
are ours: nano trains in seconds in a test, tiny learns something from a megabyte of text.

Three shapes are known from papers alone, with GPT-2's vocabulary and learned positions:

    gpt3-175b    Brown et al. 2020, "Language Models are Few-Shot Learners", Table 2.1
    mt-nlg-530b  Smith et al. 2022, "Using DeepSpeed and Megatron to Train Megatron-Turing NLG
                 530B", the section on the model and its training
    gpt-7.5b     Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
                 Clusters", Table 1: the size of which the ZeRO paper's Table 1 speaks
"""

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "gpt2-nano": {
        "architecture": "gpt2",
        "vocab_size": 320,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    },
    "gpt2-tiny": {
        "architecture": "gpt2",
        "vocab_size": 2000,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    },
    "gpt2": {
        "architecture": "gpt2",
        "vocab_size": 50257,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 1024,
    },
    "gpt2-medium": {
        "architecture": "gpt2",
        "vocab_size": 50257,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "max_position_embeddings": 1024,
    },
    "gpt2-large": {
        "architecture": "gpt2",
        "vocab_size": 50257,
        "hidden_size": 1280,
        "num_hidden_layers": 36,
        "num_attention_heads": 20,
        "max_position_embeddings": 1024,
    },
    "gpt2-xl": {
        "architecture": "gpt2",
        "vocab_size": 50257,
        "hidden_size": 1600,
        "num_hidden_layers": 48,
        "num_attention_heads": 25,
        "max_position_embeddings": 1024,
    },
    "gpt-7.5b": {
        "architecture": "gpt2",
        "vocab_size": 50257,
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "gpt3-175b": {
        "architecture": "gpt2",
        "vocab_size": 50257,
        "hidden_size": 12288,
        "num_hidden_layers": 96,
        "num_attention_heads": 96,
        "max_position_embeddings": 2048,
    },
    "mt-nlg-530b": {
        "architecture": "gpt2",
        "vocab_size": 50257,
        "hidden_size": 20480,
        "num_hidden_layers": 105,
        "num_attention_heads": 128,
        "max_position_embeddings": 2048,
    },
    "llama-nano": {
        "architecture": "llama",
        "vocab_size": 320,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 64,
    },
    "llama-tiny": {
        "architecture": "llama",
        "vocab_size": 2000,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 352,
        "max_position_embeddings": 256,
    },
    "llama-2-7b": {
        "architecture": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    },
    "llama-2-70b": {
        "architecture": "llama",
        "vocab_size": 32000,
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    },
    "llama-3-8b": {
        "architecture": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    },
    "llama-3-70b": {
        "architecture": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    },
}

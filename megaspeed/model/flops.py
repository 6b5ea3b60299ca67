"""Floating-point operations of the model's matrix products, counted exactly from the shapes.

A product of (m, k) by (k, n) is 2 m k n operations; everything else (norms, activations, softmax)
is left out, as is usual (Narayanan et al. 2021, appendix; Chowdhery et al. 2022, PaLM, appendix B).
Attention is counted over the full S x S square, as there; also where it begins anew with every
document of a row, which masks scores and multiplies as much. A backward pass costs twice the
forward; operations repeated by activation checkpointing are not counted, so MFU compares useful
work.
"""

from megaspeed.config import ModelConfig

# The embedding multiplies nothing; a row's look-up and its gradient's scatter move about this many
# elements a hidden unit, which matters only to break ties when layers are shared out to pipeline
# stages.
_EMBEDDING_OPERATIONS_PER_ELEMENT = 4


def forward_flops_per_token(config: ModelConfig, sequence_length: int) -> list[float]:
    """Forward operations a token of each layer: [embedding, block, ..., block, head]."""
    hidden, head_dim = config.hidden_size, config.head_dim
    qkv = 2 * hidden * (config.num_attention_heads + 2 * config.num_key_value_heads) * head_dim
    output = 2 * config.num_attention_heads * head_dim * hidden
    scores_and_mix = 2 * 2 * sequence_length * config.num_attention_heads * head_dim
    matrices = 2 if config.architecture == "gpt2" else 3
    mlp = 2 * matrices * hidden * config.intermediate_size
    block = float(qkv + output + scores_and_mix + mlp)
    head = float(2 * hidden * config.vocab_size)
    embedding = float(_EMBEDDING_OPERATIONS_PER_ELEMENT * hidden)
    return [embedding, *[block] * config.num_hidden_layers, head]


def training_flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Forward and backward operations a token of the whole model's matrix products."""
    return 3.0 * sum(forward_flops_per_token(config, sequence_length)[1:])

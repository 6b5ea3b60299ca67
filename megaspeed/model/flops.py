"""Floating-point operations of the model's matrix products, counted exactly from the shapes.

A product of (m, k) by (k, n) is 2 m k n operations; everything else (norms, activations, softmax)
is left out, as is usual (Narayanan et al. 2021, appendix; Chowdhery et al. 2022, PaLM, appendix B).
Attention is counted over the full S x S square, as there: a mask of documents or of a sliding
window does not reduce the number of products. A backward pass costs twice the forward. Operations
that activation checkpointing repeats are not counted, so MFU compares useful work.
"""

from collections.abc import Iterable

from megaspeed.config.model import ModelConfig
from megaspeed.model.parameters import Row, block_rows, head_rows

# The embedding multiplies nothing; a row's look-up and its gradient's scatter move about this many
# elements a hidden unit, which matters only to break ties when layers are shared out to pipeline
# stages.
_EMBEDDING_OPERATIONS_PER_ELEMENT = 4


def forward_flops_per_token(config: ModelConfig, sequence_length: int) -> list[float]:
    """Forward operations a token of each layer: [embedding, block, ..., block, head]."""
    scores_and_mix = 2 * 2 * sequence_length * config.num_attention_heads * config.head_dim
    block = float(_products(block_rows(config).values()) + scores_and_mix)
    head = float(_products(head_rows(config).values()))
    embedding = float(_EMBEDDING_OPERATIONS_PER_ELEMENT * config.hidden_size)
    return [embedding, *[block] * config.num_hidden_layers, head]


def training_flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Forward and backward operations a token of the whole model's matrix products."""
    return 3.0 * sum(forward_flops_per_token(config, sequence_length)[1:])


def _products(rows: Iterable[Row]) -> int:
    """Forward operations a token of the matrix products of a layer's modules."""
    return sum(2 * row.rows * row.columns for row in rows if row.kind == "linear" and row.columns)

"""Tensor parallelism: layers, collectives, and the plan that applies them to the plain model."""

from megaspeed.tensor_parallel.axis import TensorAxis
from megaspeed.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megaspeed.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megaspeed.tensor_parallel.parallelize import initial_shard, materialize, parallelize
from megaspeed.tensor_parallel.plan import ParameterShard, shard_of, vocabulary_rows_per_rank

__all__ = [
    "ColumnParallelLinear",
    "ParameterShard",
    "RowParallelLinear",
    "TensorAxis",
    "VocabParallelEmbedding",
    "initial_shard",
    "materialize",
    "parallelize",
    "shard_of",
    "vocab_parallel_cross_entropy",
    "vocabulary_rows_per_rank",
]

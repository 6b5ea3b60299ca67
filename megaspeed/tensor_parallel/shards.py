"""The shard of each parameter that one tensor rank holds, and what follows from it. No torch.

The model's table (``model/parameters.py``) states how each parameter is split. This file computes
the rows and columns of each rank. ``parallelize`` applies them to the model. Also here, for the
engine and for predictions: the optimizer group of each parameter, which gradients are compressed,
and how many tokens a chunk of the loss has.
"""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from megaspeed.config.model import ModelConfig
from megaspeed.config.run import Compression
from megaspeed.model.parameters import EMBEDDING_WEIGHT, HEAD_WEIGHT, Parameter

_VOCABULARY_ROW_MULTIPLE = 8
"""A multiple of 16 bytes in bf16, which tensor cores need for full speed."""

_LOGITS_OF_A_CHUNK = 2**28
"""The most logits that exist at once. In 16 bits each takes 6 bytes, so all take 1.5 GiB. For a
vocabulary of 128k, this is 2,048 tokens. With fewer tokens in a chunk, adding to the weight's
gradient would take as long as computing the product."""


@dataclass(frozen=True, kw_only=True)
class ParameterShard:
    """The part of one parameter that one tensor rank holds."""

    full_shape: tuple[int, ...]  # the full, unpadded shape of the parameter
    rows: tuple[range, ...]  # ranges of dim 0, concatenated in the local tensor
    columns: range | None = None  # range of dim 1; None for a vector, or if dim 1 is not split
    padding_rows: int = 0  # rows of zeros after them
    owned_rows: int
    """How many leading local rows this rank counts in a norm. Over the tensor axis, each element is
    counted once: a replicated parameter only on the first rank."""

    @property
    def logical_rows(self) -> int:
        """Local rows without padding."""
        return sum(len(r) for r in self.rows)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor, with padding."""
        rows = self.logical_rows + self.padding_rows
        if len(self.full_shape) == 1:
            return (rows,)
        return rows, self.full_shape[1] if self.columns is None else len(self.columns)


def shard_of(
    config: ModelConfig,
    parameter: Parameter,
    *,
    rank: int,
    size: int,
    ep_rank: int = 0,
    ep: int = 1,
) -> ParameterShard:
    """The shard of tensor rank ``rank`` of ``size``, which is expert rank ``ep_rank`` of ``ep``."""
    shape, split = parameter.shape, parameter.split
    rows = shape[0]
    if split == "experts":
        own = _chunk(range(rows), ep_rank, ep)
        return ParameterShard(full_shape=shape, rows=(own,), owned_rows=len(own))
    if split in ("replicated", "each head"):
        return ParameterShard(
            full_shape=shape, rows=(range(rows),), owned_rows=rows if rank == 0 else 0
        )
    if split == "columns":
        columns = _chunk(range(shape[1]), rank, size)
        return ParameterShard(
            full_shape=shape, rows=(range(rows),), columns=columns, owned_rows=rows
        )
    if split == "vocabulary":
        return _vocabulary_shard(shape, rank, size)
    if split == "heads":
        return _heads_shard(config, parameter, rank, size)
    held = tuple(_chunk(section, rank, size) for section in _sections(parameter))
    return ParameterShard(full_shape=shape, rows=held, owned_rows=rows // size)


def gradient_is_partial(parameter: Parameter, *, size: int, sequence_parallel: bool) -> bool:
    """Whether each tensor rank computes only a part of a replicated parameter's gradient.

    It has seen its own heads or, with sequence parallelism, its own part of the sequence. The
    gradient is summed over the tensor axis once a step (``zero/gradients.py``).
    """
    if parameter.split == "each head":
        return size > 1
    is_in_a_block_or_the_head = parameter.split == "replicated" and parameter.layer != "embedding"
    return size > 1 and sequence_parallel and is_in_a_block_or_the_head


def gradient_is_product(config: ModelConfig, parameter: Parameter, *, size: int) -> bool:
    """Whether one matrix product in a block computes the gradient of a parameter.

    Key/value heads that several tensor ranks hold are no such case: their product is summed over
    these ranks, in every backward.
    """
    is_shared = parameter.split == "heads" and key_value_replicas(config, size) > 1
    is_one_product = parameter.is_block_matrix and parameter.row.kind == "linear"
    return is_one_product and not is_shared


def is_compressed(
    config: ModelConfig, parameter: Parameter, compression: Compression | None, *, size: int
) -> bool:
    """Whether the gradient of a parameter is compressed before it is sent over the data axis.

    Vectors are not compressed, because they are small. A matrix of which each tensor rank has a
    copy is not compressed either: a block may also contain elements of other matrices, so the
    copies would differ. PowerSGD compresses a matrix only if it sends less than the matrix (Vogels
    et al. 2019, section 3).
    """
    is_copied = size > 1 and parameter.split == "replicated"
    if compression is None or len(parameter.shape) == 1 or is_copied:
        return False
    if compression.type == "int8":
        return True
    rows, columns = shard_of(config, parameter, rank=0, size=size).local_shape
    return compression.rank * (rows + columns) < rows * columns


OptimizerGroup = Literal[
    "tied",
    "partial",
    "partial and decaying",
    "not compressed",
    "orthogonalized",
    "decaying",
    "other",
]
"""The parameter groups of the optimizer: a weight that two pipeline stages share, parameters whose
gradient is summed over the tensor axis (without weight decay, and with it), matrices that are not
compressed although others are, those whose update Muon orthogonalizes, other parameters with weight
decay, and the rest. The gradients of the first four groups are not reduced like all others."""

PARTIAL: tuple[OptimizerGroup, ...] = ("partial", "partial and decaying")
"""The groups of parameters whose gradient is summed over the tensor axis."""


def optimizer_group(
    config: ModelConfig,
    parameter: Parameter,
    compression: Compression | None,
    *,
    has_pipeline: bool,
    has_muon: bool,
    size: int,
    sequence_parallel: bool,
) -> OptimizerGroup:
    """Return the optimizer group of a parameter, on ``size`` tensor ranks."""
    is_shared = config.tie_word_embeddings and has_pipeline
    if is_shared and parameter.name in (EMBEDDING_WEIGHT, HEAD_WEIGHT):
        return "tied"
    if gradient_is_partial(parameter, size=size, sequence_parallel=sequence_parallel):
        return "partial and decaying" if parameter.decays else "partial"
    is_matrix = compression is not None and len(parameter.shape) > 1
    if is_matrix and not is_compressed(config, parameter, compression, size=size):
        return "not compressed"
    if has_muon and parameter.is_block_matrix:
        return "orthogonalized"
    return "decaying" if parameter.decays else "other"


def vocabulary_rows_per_rank(vocab_size: int, size: int) -> int:
    """Rows of the padded vocabulary on each tensor rank."""
    return math.ceil(vocab_size / size / _VOCABULARY_ROW_MULTIPLE) * _VOCABULARY_ROW_MULTIPLE


def tokens_of_a_chunk(tokens: int, columns: int) -> int:
    """The tokens of a chunk, if a rank has ``columns`` logits of each token.

    If possible with less than twice as many chunks as necessary, all chunks have the same length.
    Then compiled code has one shape.
    """
    chunks = max(1, math.ceil(tokens * columns / _LOGITS_OF_A_CHUNK))
    even = (count for count in range(chunks, 2 * chunks) if tokens % count == 0)
    return math.ceil(tokens / next(even, chunks))


def query_rows(parameter: Parameter, shard: ParameterShard) -> int:
    """The leading local rows of a parameter that is split by heads, which no other tensor rank
    holds. Rows of keys and values follow. The norm of all keys has no others.
    """
    return len(shard.rows[0]) if "query" in parameter.row.sections else 0


def key_value_replicas(config: ModelConfig, size: int) -> int:
    """The number of tensor ranks that hold each key/value head; 1 if there is a head for each."""
    return max(1, size // config.num_key_value_heads)


def _vocabulary_shard(full_shape: tuple[int, ...], rank: int, size: int) -> ParameterShard:
    per_rank = vocabulary_rows_per_rank(full_shape[0], size)
    held = range(min(rank * per_rank, full_shape[0]), min((rank + 1) * per_rank, full_shape[0]))
    return ParameterShard(
        full_shape=full_shape,
        rows=(held,),
        padding_rows=per_rank - len(held),
        owned_rows=len(held),
    )


def _heads_shard(config: ModelConfig, parameter: Parameter, rank: int, size: int) -> ParameterShard:
    """Complete heads of each section: query, key, value, or some of them.

    With fewer key/value heads than ranks, ``key_value_replicas`` neighbouring ranks hold each
    key/value head, and the first of them counts it.
    """
    replicas = key_value_replicas(config, size)
    held, owned_rows = [], 0
    for name, section in zip(parameter.row.sections, _sections(parameter), strict=True):
        copies = 1 if name == "query" else replicas
        held.append(_chunk(section, rank // copies, size // copies))
        owned_rows += len(held[-1]) if rank % copies == 0 else 0
    return ParameterShard(full_shape=parameter.shape, rows=tuple(held), owned_rows=owned_rows)


def _sections(parameter: Parameter) -> list[range]:
    """The rows of each section of the parameter's module."""
    stops = list(accumulate(parameter.row.sections.values()))
    return [range(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


def _chunk(full: range, index: int, count: int) -> range:
    size = len(full) // count
    return range(full.start + index * size, full.start + (index + 1) * size)


COLUMN_BYTES = 16
"""The columns of weights that are sent after the features take a multiple of this, so that each
row of the message is aligned."""


def columns_of_weights(active: int, element_bytes: int, method: str) -> int:
    """Return c, the columns that are sent after the features. They have 1 weight, or with
    all_gather ``active`` weights, and padding.
    """
    used = active if method == "all_gather" else 1
    return -(-used * element_bytes // COLUMN_BYTES) * COLUMN_BYTES // element_bytes

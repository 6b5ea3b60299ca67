"""One table that says how each parameter is split along the tensor axis. Pure arithmetic, no torch.

    parameter of                 split                        this rank holds
    embedding.tokens             vocabulary                   V'/tp rows, V' = padded vocabulary
    embedding.positions          replicated                   all
    blocks.*.attention.qkv       heads                        H/tp query, H_kv/tp key, value heads
    blocks.*.attention.output    columns (row-parallel)       H/tp heads' columns; the bias whole
    blocks.*.mlp.up              rows (column-parallel)       F/tp rows
    blocks.*.mlp.gate_up         rows in two sections         F/tp rows of gate, F/tp rows of up
    blocks.*.mlp.down            columns (row-parallel)       F/tp columns; the bias whole
    *norm                        replicated                   all
    head.output                  vocabulary                   V'/tp rows

The model does not know of it; ``parallelize`` applies it from outside.
"""

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from megaspeed.config import ModelConfig

Split = Literal["replicated", "vocabulary", "heads", "rows", "two_sections", "columns"]

PLAN: dict[str, Split] = {
    "embedding.tokens": "vocabulary",
    "embedding.positions": "replicated",
    "blocks.*.attention.qkv": "heads",
    "blocks.*.attention.output": "columns",
    "blocks.*.mlp.up": "rows",
    "blocks.*.mlp.gate_up": "two_sections",
    "blocks.*.mlp.down": "columns",
    "blocks.*norm": "replicated",
    "head.norm": "replicated",
    "head.output": "vocabulary",
}

# A shard of the vocabulary is a whole number of 16-byte units in bf16, which tensor cores need for
# full speed.
_VOCABULARY_ROW_MULTIPLE = 8


@dataclass(frozen=True, kw_only=True)
class ParameterShard:
    """The part of one parameter that one tensor rank holds.

    Attributes:
        full_shape: the parameter's logical shape.
        rows: the ranges of dim 0 held, one below the other in the local tensor.
        columns: the range of dim 1 held; None for a vector or where dim 1 is whole.
        padding_rows: rows of zeros below them that belong to no logical parameter.
        owned_rows: how many leading local rows this rank counts, so that over the tensor axis every
            logical element is counted once: all of them for a true shard, none on the later copies
            of a replicated one.
    """

    full_shape: tuple[int, ...]
    rows: tuple[range, ...]
    columns: range | None = None
    padding_rows: int = 0
    owned_rows: int

    @property
    def logical_rows(self) -> int:
        """Local rows that hold logical parameters."""
        return sum(len(r) for r in self.rows)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor, padding included."""
        rows = self.logical_rows + self.padding_rows
        if len(self.full_shape) == 1:
            return (rows,)
        return rows, self.full_shape[1] if self.columns is None else len(self.columns)


def split_of(name: str) -> Split:
    """How the plan splits the parameter called ``name``, such as ``blocks.3.mlp.up.weight``."""
    module, _, kind = name.rpartition(".")
    split = next(s for pattern, s in PLAN.items() if fnmatchcase(module, pattern))
    # A row-parallel layer adds its bias after the sum, so every rank holds it whole.
    return "replicated" if split == "columns" and kind == "bias" else split


def shard_of(
    config: ModelConfig, name: str, full_shape: tuple[int, ...], *, rank: int, size: int
) -> ParameterShard:
    """The part of parameter ``name`` that tensor rank ``rank`` of ``size`` holds."""
    split = split_of(name)
    rows = full_shape[0]
    if split == "replicated":
        return ParameterShard(
            full_shape=full_shape, rows=(range(rows),), owned_rows=rows if rank == 0 else 0
        )
    if split == "columns":
        columns = _chunk(range(full_shape[1]), rank, size)
        return ParameterShard(
            full_shape=full_shape, rows=(range(rows),), columns=columns, owned_rows=rows
        )
    if split == "vocabulary":
        return _vocabulary_shard(full_shape, rank, size)
    if split == "heads":
        return _heads_shard(config, full_shape, rank, size)
    sections = 2 if split == "two_sections" else 1
    held = tuple(_chunk(section, rank, size) for section in _sections(rows, sections))
    return ParameterShard(full_shape=full_shape, rows=held, owned_rows=rows // size)


def vocabulary_rows_per_rank(vocab_size: int, size: int) -> int:
    """Rows of the padded vocabulary on each tensor rank."""
    return (
        math.ceil(math.ceil(vocab_size / size) / _VOCABULARY_ROW_MULTIPLE)
        * _VOCABULARY_ROW_MULTIPLE
    )


def key_value_replicas(config: ModelConfig, size: int) -> int:
    """On how many tensor ranks each key/value head stands; 1 where heads are as many as ranks."""
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


def _heads_shard(
    config: ModelConfig, full_shape: tuple[int, ...], rank: int, size: int
) -> ParameterShard:
    """Whole heads of each of the three sections q, k, v.

    With fewer key/value heads than ranks, each key/value head stands on ``key_value_replicas``
    neighbouring ranks, and the first of them counts it.
    """
    replicas = key_value_replicas(config, size)
    query_rows = config.num_attention_heads * config.head_dim
    kv_rows = config.num_key_value_heads * config.head_dim
    query = _chunk(range(query_rows), rank, size)
    key = _chunk(range(query_rows, query_rows + kv_rows), rank // replicas, size // replicas)
    value = range(key.start + kv_rows, key.stop + kv_rows)
    owns_key_value = rank % replicas == 0
    return ParameterShard(
        full_shape=full_shape,
        rows=(query, key, value),
        owned_rows=len(query) + (2 * len(key) if owns_key_value else 0),
    )


def _sections(rows: int, count: int) -> list[range]:
    size = rows // count
    return [range(i * size, (i + 1) * size) for i in range(count)]


def _chunk(whole: range, index: int, count: int) -> range:
    size = len(whole) // count
    return range(whole.start + index * size, whole.start + (index + 1) * size)

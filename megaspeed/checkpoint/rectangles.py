"""Where a flat range of a tensor shard lies in its logical tensor. Pure arithmetic, no torch.

ZeRO cuts a rank's tensors into flat ranges; a checkpoint stores rectangles of logical tensors. A
flat range of a matrix is at most three rectangles of each section of its rows:

    local shard, 4 columns        elements [2, 14)
    . . a a                       a: the rest of the first row
    b b b b                       b: whole rows
    b b b b
    c c . .                       c: the beginning of the last row

Rows and columns of the shard are shifted to where they stand in the logical tensor
(``tensor_parallel.plan.ParameterShard``). Vocabulary padding belongs to no logical tensor and is
left out.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megaspeed.tensor_parallel.plan import ParameterShard


@dataclass(frozen=True)
class Rectangle:
    """A rectangle of a logical tensor, and where its elements lie, row by row, in the local one.

    Attributes:
        offsets: its first element in the logical tensor, an index for each dim.
        sizes: its extent, likewise.
        start: its first element in the flattened local tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.sizes)


def rectangles_of(
    shard: ParameterShard, start: int, stop: int, *, largest: int
) -> Iterator[Rectangle]:
    """Elements [start, stop) of the flattened local tensor.

    Args:
        shard: what of the logical tensor the local one holds.
        start, stop: the flat range.
        largest: elements of one rectangle; one row of a matrix may have more.
    """
    width = 1 if len(shard.full_shape) == 1 else shard.local_shape[1]
    section_start = 0
    for rows in shard.rows:
        section_stop = section_start + len(rows) * width
        low, high = max(start, section_start), min(stop, section_stop)
        if low < high:
            for first, row, column, height, length in _boxes(
                low - section_start, high - section_start, width, largest
            ):
                yield _shifted(
                    shard, rows.start + row, column, height, length, section_start + first
                )
        section_start = section_stop


def _boxes(
    low: int, high: int, width: int, largest: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """(first element, row, column, rows, columns) of each rectangle of a section's flat range."""
    rows_at_once = max(1, largest // width)
    while low < high:
        row, column = divmod(low, width)
        if column or high - low < width:
            height, length = 1, min(width - column, high - low)
        else:
            height, length = min((high - low) // width, rows_at_once), width
        yield low, row, column, height, length
        low += height * length


def _shifted(
    shard: ParameterShard, row: int, column: int, height: int, length: int, start: int
) -> Rectangle:
    if len(shard.full_shape) == 1:
        return Rectangle((row,), (height,), start)
    first_column = 0 if shard.columns is None else shard.columns.start
    return Rectangle((row, first_column + column), (height, length), start)

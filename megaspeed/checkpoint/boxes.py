"""Boxes of logical tensors: where a flat range of a shard lies, and whether boxes tile a tensor.

ZeRO cuts a rank's tensors into flat ranges, and a checkpoint stores boxes of logical tensors. A
flat range of a matrix is at most three boxes of each section of its rows:

    local shard, 4 columns        elements [2, 14)
    . . a a                       a: the rest of the first row
    b b b b                       b: complete rows
    b b b b
    c c . .                       c: the beginning of the last row

Rows and columns of the shard are shifted to their place in the logical tensor
(``tensor_parallel.plan.ParameterShard``). Vocabulary padding is left out, because it belongs to no
logical tensor. Pure arithmetic, without torch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from megaspeed.tensor_parallel.plan import ParameterShard


@dataclass(frozen=True, order=True)
class Box:
    """A part of a tensor: in each dim, ``sizes`` indices from ``offsets`` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """The index after the last one, in each dim."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def elements(self) -> int:
        return prod(self.sizes)

    def __str__(self) -> str:
        spans = zip(self.offsets, self.ends, strict=True)
        return "[" + ", ".join(f"{start}:{end}" for start, end in spans) + "]"


def boxes_of(
    shard: ParameterShard, start: int, stop: int, *, largest: int
) -> Iterator[tuple[Box, int]]:
    """The boxes of elements [start, stop) of a flattened shard, each with its first element there.

    Args:
        shard: which part of the logical tensor the local tensor is.
        start, stop: the flat range.
        largest: how many elements a box may have. A single row of a matrix may have more.
    """
    vector = len(shard.full_shape) == 1
    width = 1 if vector else shard.local_shape[1]
    first_column = 0 if shard.columns is None else shard.columns.start
    section_start = 0
    for rows in shard.rows:
        section_stop = section_start + len(rows) * width
        low, high = max(start, section_start), min(stop, section_stop)
        while low < high:
            row, column = divmod(low - section_start, width)
            if column or high - low < width:
                height, length = 1, min(width - column, high - low)
            else:
                height, length = min((high - low) // width, max(1, largest // width)), width
            offsets, sizes = (rows.start + row, first_column + column), (height, length)
            yield Box(offsets[:1], sizes[:1]) if vector else Box(offsets, sizes), low
            low += height * length
        section_start = section_stop


def tiling_problem(shape: tuple[int, ...], boxes: Iterable[Box]) -> str | None:
    """Why some element of a tensor is not in exactly one of ``boxes``; None if all are.

    If the boxes are inside the tensor, share no element, and have as many elements as the tensor,
    then they contain every element once. The time is about proportional to the number of boxes,
    because in a checkpoint few boxes share a row.
    """
    # A sweep along the first dim: only boxes that reach into this row can share an element.
    reaching: list[Box] = []
    elements = 0
    for box in sorted(box for box in boxes if 0 not in box.sizes):
        if not _inside(box, shape):
            return f"{box} is not inside its {' x '.join(map(str, shape))}"
        reaching = [other for other in reaching if other.ends[0] > box.offsets[0]]
        shared = next((other for other in reaching if _overlap(other, box)), None)
        if shared is not None:
            return f"{shared} and {box} both hold some of its elements"
        reaching.append(box)
        elements += box.elements
    missing = prod(shape) - elements
    return f"{missing:,} of its {prod(shape):,} elements are in no file" if missing else None


def _inside(box: Box, shape: tuple[int, ...]) -> bool:
    if not len(box.offsets) == len(box.sizes) == len(shape) > 0:
        return False
    return all(
        min(offset, size) >= 0 and offset + size <= extent
        for offset, size, extent in zip(box.offsets, box.sizes, shape, strict=True)
    )


def _overlap(one: Box, other: Box) -> bool:
    starts = map(max, one.offsets, other.offsets)
    return all(
        start < end for start, end in zip(starts, map(min, one.ends, other.ends), strict=True)
    )

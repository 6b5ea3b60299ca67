"""Whether boxes tile a tensor: every element in exactly one of them. Pure arithmetic.

+-----+---+      inside, no two share an element, and as many elements as the tensor has:
|  a  | b |      then none can be left out
+-----+   |
|  c  |   |
+-----+---+
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, order=True)
class Box:
    """Indices from ``offsets`` on, ``sizes`` of them, in each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """The index after the last one, in each dim."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    def __str__(self) -> str:
        spans = zip(self.offsets, self.ends, strict=True)
        return "[" + ", ".join(f"{start}:{end}" for start, end in spans) + "]"


def tiling_problem(shape: tuple[int, ...], boxes: Iterable[Box]) -> str | None:
    """Why ``boxes`` are not ``shape`` exactly once; None where they are.

    The boxes of a checkpoint lie side by side, few in each row, so that the time is about
    proportional to their number.
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
        elements += prod(box.sizes)
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
    return all(
        max(starts) < min(ends)
        for starts, ends in zip(
            zip(one.offsets, other.offsets, strict=True),
            zip(one.ends, other.ends, strict=True),
            strict=True,
        )
    )

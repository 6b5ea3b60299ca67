"""Bytes as people read them: one unit for all numbers that stand together."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ByteUnit:
    """A unit and its size in bytes."""

    name: str
    size: int

    def text(self, number_of_bytes: int) -> str:
        """Without the unit's name, which stands in the heading.

        >>> ByteUnit("MiB", 2**20).text(3 * 2**20 // 2)
        '1.50'
        """
        return f"{number_of_bytes / self.size:,.2f}"


_UNITS = (ByteUnit("GiB", 2**30), ByteUnit("MiB", 2**20), ByteUnit("KiB", 2**10))


def unit_for(sizes: Iterable[int]) -> ByteUnit:
    """The largest unit of which the largest of the sizes is at least one; KiB for less."""
    largest = max(sizes, default=0)
    return next((unit for unit in _UNITS if largest >= unit.size), _UNITS[-1])

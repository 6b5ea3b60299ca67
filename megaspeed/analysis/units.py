"""Counts and bytes as people read them: one unit for a whole table.

Memory is counted in powers of two (1 GiB = 2^30 bytes), as GPUs are; traffic in powers of ten
(1 GB = 10^9 bytes), as networks are.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A unit of bytes."""

    name: str
    size: int

    def text(self, number: int) -> str:
        """``number`` bytes in this unit with two decimals, without its name.

        >>> MIB.text(3 * 2**20 // 2)
        '1.50'
        """
        return f"{number / self.size:,.2f}"

    def of(self, number: int) -> str:
        """``number`` bytes in this unit, from 1,000 on without decimals; without its name.

        >>> GIB.of(3 * 2**29)
        '1.50'
        """
        value = number / self.size
        return self.text(number) if value < 1000 else f"{value:,.0f}"

    def named(self, number: int) -> str:
        """``number`` bytes in this unit, with its name."""
        return f"{self.of(number)} {self.name}"


GIB = Unit(name="GiB", size=2**30)
MIB = Unit(name="MiB", size=2**20)
KIB = Unit(name="KiB", size=2**10)
GB = Unit(name="GB", size=10**9)
MB = Unit(name="MB", size=10**6)
KB = Unit(name="kB", size=10**3)


def memory_unit(numbers: Iterable[int]) -> Unit:
    """GiB, MiB or KiB: the first of which the largest number has at least one."""
    return _unit(numbers, (GIB, MIB, KIB))


def traffic_unit(numbers: Iterable[int]) -> Unit:
    """GB, MB or kB: the first of which the largest number has at least one."""
    return _unit(numbers, (GB, MB, KB))


def _unit(numbers: Iterable[int], units: tuple[Unit, ...]) -> Unit:
    largest = max(numbers, default=0)
    return next((unit for unit in units if largest >= unit.size), units[-1])


def short_count(number: int) -> str:
    """A count in four digits.

    >>> short_count(174_604_259_328)
    '174.6B'
    >>> short_count(801_920)
    '801.9K'
    """
    for letter, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.4g}{letter}"
    return str(number)


def counted(number: int, thing: str) -> str:
    """So many things.

    >>> counted(1, "rank"), counted(4480, "rank"), counted(2, "micro-batch")
    ('1 rank', '4,480 ranks', '2 micro-batches')
    """
    if number == 1:
        return f"1 {thing}"
    return f"{number:,} {thing}{'es' if thing.endswith('ch') else 's'}"


def readable_memory(number: int) -> str:
    """Bytes in the unit that suits them.

    >>> readable_memory(3 * 2**19)
    '1.50 MiB'
    """
    return memory_unit((number,)).named(number)

"""Counts and bytes as people read them, and tables that never cut a number.

Memory is counted in powers of two (1 GiB = 2^30 bytes), as GPUs are. Traffic is counted in powers
of ten (1 GB = 10^9 bytes), as networks are. A table has one unit, that of its largest number.
"""

import statistics
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from rich import box
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A unit of bytes."""

    name: str
    size: int

    def of(self, number: int) -> str:
        """``number`` bytes in this unit, without its name; two decimals if it is below 1,000.

        >>> GIB.of(3 * 2**29)
        '1.50'
        """
        value = number / self.size
        return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"

    def named(self, number: int) -> str:
        """``number`` bytes in this unit, with its name."""
        return f"{self.of(number)} {self.name}"


GIB, MIB, KIB = (Unit(name=f"{k}iB", size=2**n) for k, n in (("G", 30), ("M", 20), ("K", 10)))
GB, MB, KB = (Unit(name=f"{k}B", size=10**n) for k, n in (("G", 9), ("M", 6), ("k", 3)))


def memory_unit(numbers: Iterable[int]) -> Unit:
    """The largest of GiB, MiB and KiB that does not exceed the largest number; KiB if all do."""
    largest = max(numbers, default=0)
    return next((unit for unit in (GIB, MIB) if largest >= unit.size), KIB)


def traffic_unit(numbers: Iterable[int]) -> Unit:
    """The largest of GB, MB and kB that does not exceed the largest number; kB if all do."""
    largest = max(numbers, default=0)
    return next((unit for unit in (GB, MB) if largest >= unit.size), KB)


def readable_memory(number: int) -> str:
    """Bytes in GiB, MiB or KiB, with the unit's name.

    >>> readable_memory(3 * 2**19)
    '1.50 MiB'
    """
    return memory_unit((number,)).named(number)


def short_count(number: int) -> str:
    """A count with four significant digits.

    >>> short_count(174_604_259_328)
    '174.6B'
    >>> short_count(801_920)
    '801.9K'
    """
    for letter, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.4g}{letter}"
    return str(number)


def three_digits(number: float) -> str:
    """Three significant digits, and all digits before the decimal point.

    >>> three_digits(1.5), three_digits(15), three_digits(1500)
    ('1.50', '15.0', '1,500')
    """
    return f"{number:,.{0 if number >= 100 else 1 if number >= 10 else 2}f}"


def in_ms(seconds: float) -> str:
    """Milliseconds with ``three_digits``."""
    return three_digits(1e3 * seconds)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median and quartiles of some numbers."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Self:
        """Quartiles are interpolated between numbers. A single number has no spread."""
        twice = numbers if len(numbers) > 1 else [*numbers, *numbers]
        lower, _, upper = statistics.quantiles(twice, n=4, method="inclusive")
        return cls(median=statistics.median(numbers), lower=lower, upper=upper)


def counted(number: int, thing: str) -> str:
    """A number and its noun, in the plural if it is not 1.

    >>> counted(1, "rank"), counted(4480, "rank"), counted(2, "micro-batch")
    ('1 rank', '4,480 ranks', '2 micro-batches')
    """
    if number == 1:
        return f"1 {thing}"
    return f"{number:,} {thing}{'es' if thing.endswith('ch') else 's'}"


def table_of(*, left: Sequence[str] = (), right: Sequence[str] = ()) -> Table:
    """A table whose ``left`` columns hold words and whose ``right`` columns hold numbers."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a Markdown table with aligned columns. The first one holds words."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    rule = [("-" * width if i == 0 else "-" * (width - 1) + ":") for i, width in enumerate(widths)]
    for cells in (headings, rule, *rows):
        first, *others = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        yield f"| {' | '.join((first, *others))} |"


def wrapped(text: str, indent: str = "") -> list[str]:
    """The text in lines of at most 80 characters. ``indent`` precedes all but the first."""
    return textwrap.wrap(
        text, 80, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def show(parts: Iterable[str | Table]) -> None:
    """Print lines and tables.

    A table is as wide as its cells need, whatever the width of the terminal: rich would cut numbers
    in the middle ("1,1…") to make it fit.
    """
    console = Console(highlight=False, markup=False)
    unlimited = Console(markup=False, width=10_000)
    for part in parts:
        if isinstance(part, Table):
            part.width = unlimited.measure(part).maximum
        console.print(part, soft_wrap=True)

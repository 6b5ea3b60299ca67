"""Rows of a table to documents: what parquet files and datasets have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from megaspeed.data.text.cutting import pieces_of
from megaspeed.data.text.pieces import BadRecord, OnBad, Piece
from megaspeed.data.text.records import BRING_AGAIN, CORRECT_IT, what_is_wrong

T = TypeVar("T")


def pieces_of_rows(
    path: Path, column: str, rows: Iterable[tuple[int, object]], bytes_per_row: float, on_bad: OnBad
) -> Iterator[Piece]:
    """Each row that has text as a document; a mark is the number of rows that are behind.

    Args:
        path: of the table, for messages.
        column: the column of the text, for messages.
        rows: (number of the row counted from 0, what is in the column).
        bytes_per_row: of the table on disk, for progress.
        on_bad: told of each row that has no text.
    """
    for row, value in rows:
        wrong = what_is_wrong(value)
        if wrong is not None:
            problem = f'the column "{column}" must be a string, and is {wrong}'
            on_bad(BadRecord(path, f"row {row:,} (counted from 0)", problem, CORRECT_IT))
        elif value:
            yield from pieces_of(str(value), row + 1, round((row + 1) * bytes_per_row))


def until_broken(batches: Iterator[T], on_broken: Callable[[Exception], None]) -> Iterator[T]:
    """The batches, as many as can be read; where that breaks off, `on_broken` is told why."""
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:  # of the library that reads them, of many kinds
            on_broken(error)
            return
        yield batch


def cannot_be_read(path: Path, error: Exception) -> BadRecord:
    """A table that is no table, or is damaged."""
    problem = f"it cannot be read, or not to its end ({error})"
    return BadRecord(path, "as a whole", problem, BRING_AGAIN)

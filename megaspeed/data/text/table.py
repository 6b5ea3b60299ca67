"""Parquet: one row a document, one column of it the text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from megaspeed.data.text.pieces import BadRecord, OnBad, Piece
from megaspeed.data.text.records import BRING_AGAIN, STATE_FIELD, no_such_field
from megaspeed.data.text.rows import cannot_be_read, pieces_of_rows, until_broken
from megaspeed.data.text.text_format import TextFormat

_BATCH_BYTES = 4 << 20
_BATCH_ROWS = 1024
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Table(TextFormat):
    """A mark is the number of rows that are behind.

    Attributes:
        text_field: the column of the text.
    """

    has_records: ClassVar[bool] = True
    text_field: str = "text"

    def pieces(self, path: Path, after: int, on_bad: OnBad) -> Iterator[Piece]:
        from pyarrow import OSFile, parquet  # slow to import, and rarely needed

        size = path.stat().st_size
        try:
            # With its own settings a whole row group is in memory, which may be gigabytes.
            file = OSFile(os.fsencode(path), "rb")  # a name in str would have to be UTF-8
            table = parquet.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        except Exception as error:  # pyarrow's own kinds, OSError, ValueError
            on_bad(cannot_be_read(path, error))
            return
        with file, table:
            wrong = self._wrong_column(table.schema_arrow)
            if wrong is not None:
                on_bad(BadRecord(path, "its columns", wrong, STATE_FIELD))
                return
            rows = self._rows(table, path, after, on_bad)
            bytes_per_row = size / max(1, table.metadata.num_rows)
            yield from pieces_of_rows(path, self.text_field, rows, bytes_per_row, on_bad)

    def _wrong_column(self, schema: Any) -> str | None:
        if self.text_field not in schema.names:
            return no_such_field(self.text_field, schema.names, "column")
        if schema.names.count(self.text_field) > 1:
            times = schema.names.count(self.text_field)
            return f'one column must be named "{self.text_field}", and {times} are'
        kind = schema.field(self.text_field).type
        if str(kind).startswith("dictionary<"):
            kind = kind.value_type  # what its numbers stand for
        if str(kind) not in ("string", "large_string", "string_view"):
            return f'the column "{self.text_field}" must hold strings, and holds {kind}'
        return None

    def _rows(
        self, table: Any, path: Path, after: int, on_bad: OnBad
    ) -> Iterator[tuple[int, object]]:
        """(number, value) of the rows from number `after` on, of every row group that is whole."""
        at_once = _rows_at_once(table.metadata, self.text_field)
        behind = 0
        for group in range(table.metadata.num_row_groups):
            first, behind = behind, behind + table.metadata.row_group(group).num_rows
            if behind > after:
                batches = table.iter_batches(at_once, row_groups=[group], columns=[self.text_field])
                rows = _rows_of_group(batches, path, range(first, behind), on_bad)
                yield from ((row, value) for row, value in rows if row >= after)


def _rows_of_group(
    batches: Iterator[Any], path: Path, rows: range, on_bad: OnBad
) -> Iterator[tuple[int, object]]:
    """(number, value) of the rows of a group, as many as can be read."""
    row = rows.start

    def lose(error: Exception) -> None:
        lost = rows.stop - row
        problem = f"it and the rest of its row group, {lost:,} rows, cannot be read ({error})"
        on_bad(BadRecord(path, f"row {row:,} (counted from 0)", problem, BRING_AGAIN))

    for batch in until_broken(batches, lose):
        for scalar in batch.column(0):
            yield row, _value(scalar)
            row += 1


def _rows_at_once(metadata: Any, column: str) -> int:
    """As many as hold about 4 MiB of text, by what the file says of the column's size."""
    text_bytes = 0
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for index in range(row_group.num_columns):
            chunk = row_group.column(index)
            if chunk.path_in_schema == column:
                text_bytes += chunk.total_uncompressed_size
    rows = metadata.num_rows * _BATCH_BYTES // max(1, text_bytes)
    return int(min(max(1, rows), _BATCH_ROWS))


def _value(scalar: Any) -> object:
    """The text; the bytes where they are no UTF-8, which parquet does not check."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        text = getattr(scalar, "value", scalar)  # of a dictionary, what its number stands for
        return text.as_buffer().to_pybytes()

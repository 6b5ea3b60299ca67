"""The formats of text: plain text, JSON lines, Parquet, and datasets of the ``datasets`` library.

Plain text and JSON lines may be compressed as ``.gz`` or ``.zst``. An archive is decompressed while
it is read, and its checksums are verified. Parquet files are read by pyarrow directly, so that a
row group of gigabytes need not fit in memory. If a file is truncated or damaged, the text before
the damage is used, and the damage is reported.

``datasets`` maps the files of a dataset into memory. The kernel counts mapped pages as memory of
the process until it needs the memory elsewhere.
"""

import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaspeed.data.errors import DataError, StreamInterrupted
from megaspeed.data.pieces import (
    COPY_AGAIN,
    CORRECT_IT,
    PIECE_BYTES,
    STATE_FIELD,
    BadRecord,
    OnBad,
    Piece,
    TextFormat,
    cut_at_most,
    no_such_field,
    pieces_of,
    refuse,
    what_is_wrong,
)
from megaspeed.files.json_values import Facts
from megaspeed.files.paths import FileState, special_among, state_of

# datasets and pyarrow are slow to import and rarely needed, so they are imported where used.

ARCHIVES = {".gz": "gzip", ".zst": "zstd"}
"""Suffix -> name of the compression."""

DOCUMENT_SEPARATOR = b"<|endoftext|>"
_BOM = "\ufeff"  # ignored at the beginning of a file
_READ_BYTES = 1 << 16
# Longer than any document worth having. Reading such a line takes three times as much memory.
_LONGEST_LINE_BYTES = 1 << 30
# A piece, and enough bytes after it to see a separator with its line end.
_WINDOW_BYTES = PIECE_BYTES + len(DOCUMENT_SEPARATOR) + len(b"\r\n")
_BUFFER_BYTES = 1 << 20
_ROWS_AT_ONCE = 64
_STREAMED_AT_ONCE = 256
_ONE_SPLIT = "state.json"
_SEVERAL_SPLITS = "dataset_dict.json"


class ByteStream:
    """The bytes of a file, decompressed. They end before damage, which is reported."""

    def __init__(self, path: Path, on_bad: OnBad) -> None:
        """Raises OSError if the file cannot be opened."""
        self._path, self._on_bad = path, on_bad
        self._compression = ARCHIVES.get(path.suffix.lower())
        self._disk, self._bytes = _open(path, self._compression)
        self._is_damaged = False
        self.position = 0  # bytes read so far, decompressed

    def close(self) -> None:
        self._bytes.close()
        self._disk.close()

    def read(self, size: int) -> bytes:
        """Return the next ``size`` bytes; fewer only at the end of the file, or before damage."""
        found = bytearray()
        while size > len(found):
            block = self._next(self._bytes.read1, min(size - len(found), _READ_BYTES))
            if not block:
                break
            found += block
        return bytes(found)

    def line(self) -> bytes:
        """Read a line and its end, or the start of one that is too long; empty after the last."""
        return self._next(self._bytes.readline, _LONGEST_LINE_BYTES + 1)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the file on disk that were read so far."""
        return self.position if self._compression is None else int(self._disk.tell())

    def _next(self, read: Callable[..., bytes], size: int) -> bytes:
        if self._is_damaged:
            return b""
        try:
            data = read(size)
            if not data and self._compression is not None and self._disk.tell() == 0:
                raise EOFError("the file is empty, without an archive's header")
        except (OSError, EOFError, zlib.error) as error:
            self._is_damaged = True
            where = f"byte {self.disk_bytes:,} of {self._path.stat().st_size:,} on disk"
            problem = (
                f"the file is damaged or truncated and cannot be read further ({error}); "
                f"{self.position:,} bytes of text could be read"
            )
            self._on_bad(BadRecord(self._path, where, problem, COPY_AGAIN))
            return b""
        self.position += len(data)
        return data


def _open(path: Path, compression: str | None) -> tuple[Any, Any]:
    """Return (the file on disk, a buffered reader of its decompressed bytes)."""
    if compression == "zstd":
        import pyarrow

        disk = pyarrow.OSFile(os.fsencode(path), "rb")  # a str would have to be UTF-8
        stream: Any = pyarrow.CompressedInputStream(disk, compression)
        return disk, io.BufferedReader(stream, _READ_BYTES)
    disk = path.open("rb")
    return disk, disk if compression is None else gzip.GzipFile(fileobj=disk)


@dataclass(frozen=True, slots=True)
class PlainText(TextFormat):
    """UTF-8 text: one document, or several with ``<|endoftext|>`` between them."""

    def pieces(self, path: Path, on_bad: OnBad) -> Iterator[Piece]:
        with closing(ByteStream(path, on_bad)) as stream:
            has_text = is_bad = False  # of the document that is being read
            for start, content, ends_document in _cut(stream):
                text = ""
                try:
                    # After bytes that are not UTF-8, the rest of a document is skipped.
                    text = "" if is_bad else content.decode("utf-8")
                except UnicodeDecodeError as error:
                    is_bad = True
                    where, byte = f"byte {start + error.start:,}", content[error.start]
                    problem = f"text must be UTF-8, but this byte is 0x{byte:02x} ({error.reason})"
                    mend = "convert the file, for example with iconv -t UTF-8"
                    on_bad(BadRecord(path, where, problem, mend))
                if start == 0:
                    text = text.removeprefix(_BOM)
                if text or (ends_document and has_text):
                    yield Piece(text, ends_document, stream.disk_bytes)
                has_text = not ends_document and (has_text or bool(text))
                is_bad = is_bad and not ends_document


def _cut(stream: ByteStream) -> Iterator[tuple[int, bytes, bool]]:
    """Yield (offset in the text, a piece of one document, whether the document ends there)."""
    start, window = 0, bytearray()
    while window := window + stream.read(_WINDOW_BYTES - len(window)):
        separator = window.find(DOCUMENT_SEPARATOR, 0, _WINDOW_BYTES - len(b"\r\n"))
        if separator >= 0:
            stop = separator
            following = stop + len(DOCUMENT_SEPARATOR)
            # The line end after a separator belongs to it.
            line_ends = (end for end in (b"\r\n", b"\n") if window.startswith(end, following))
            following += len(next(line_ends, b""))
        elif len(window) > PIECE_BYTES:
            following = stop = cut_at_most(window, PIECE_BYTES)
        else:
            following = stop = len(window)
        ends_document = separator >= 0 or stop == len(window)
        yield start, bytes(window[:stop]), ends_document
        del window[:following]
        start += following


class _NoText(Exception):
    """A line has no text. Contains the reason and how to fix it."""

    def __init__(self, problem: str, mend: str = CORRECT_IT) -> None:
        self.problem, self.mend = problem, mend


@dataclass(frozen=True, slots=True)
class JsonLines(TextFormat):
    """One JSON object on each line. One of its fields is the text of a document."""

    text_field: str = "text"  # the name of this field

    def pieces(self, path: Path, on_bad: OnBad) -> Iterator[Piece]:
        with closing(ByteStream(path, on_bad)) as stream:
            number = start = 0
            while line := stream.line():
                number += 1
                text = ""
                try:
                    text = self._text_of(line if start else line.removeprefix(_BOM.encode()))
                except _NoText as wrong:
                    where = f"line {number:,} (byte {start:,})"
                    on_bad(BadRecord(path, where, wrong.problem, wrong.mend))
                if len(line) > _LONGEST_LINE_BYTES:
                    return
                if text:
                    yield from pieces_of(text, stream.disk_bytes)
                start = stream.position

    def _text_of(self, line: bytes) -> str:
        if len(line) > _LONGEST_LINE_BYTES:
            raise _NoText(
                f"a line must have at most {_LONGEST_LINE_BYTES:,} bytes, but this one has more, "
                "and the rest of the file is not read"
            )
        if not line.strip():
            return ""
        law, field = "a line must be one JSON object in UTF-8, but this one", self.text_field
        try:
            record = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:  # JSON's and UTF-8's errors are ValueErrors
            raise _NoText(f"{law} cannot be read ({error})") from None
        if not isinstance(record, dict):
            raise _NoText(f"{law} is {what_is_wrong(record) or 'a string'}")
        if field not in record:
            problem = no_such_field(field, record, "field")
            raise _NoText(problem, f"{STATE_FIELD}, or {CORRECT_IT}")
        wrong = what_is_wrong(record[field])
        if wrong is not None:
            raise _NoText(f'the field "{field}" must be a string, but is {wrong}')
        return str(record[field])


@dataclass(frozen=True, slots=True)
class Table(TextFormat):
    """A Parquet file."""

    text_field: str = "text"  # the column that has the text

    def pieces(self, path: Path, on_bad: OnBad) -> Iterator[Piece]:
        from pyarrow import OSFile, parquet

        try:
            # With its default settings, pyarrow reads a complete row group into memory.
            file = OSFile(os.fsencode(path), "rb")  # a str would have to be UTF-8
            table = parquet.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        except Exception as error:  # pyarrow's own kinds, OSError, ValueError
            on_bad(_cannot_be_read(path, error))
            return
        with file, table:
            batches = table.iter_batches(_ROWS_AT_ONCE, columns=[self.text_field])
            columns = (map(_value, batch.column(0)) for batch in batches)
            names = table.schema_arrow.names
            bytes_per_row = path.stat().st_size / max(1, table.metadata.num_rows)
            yield from _pieces_of_rows(path, self.text_field, names, columns, bytes_per_row, on_bad)


def _value(scalar: Any) -> object:
    """Return the text; bytes if it is not UTF-8, because Parquet does not check this."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return b""


def is_saved_dataset(path: Path) -> bool:
    """Return whether ``save_to_disk`` wrote this folder."""
    # Path.is_file would raise an error below a folder that this user may not enter.
    return any(os.path.isfile(path / name) for name in (_ONE_SPLIT, _SEVERAL_SPLITS))


@dataclass(frozen=True, slots=True)
class SavedDataset(TextFormat):
    """A folder that ``save_to_disk`` wrote."""

    split: str = "train"  # the name of the split, if the folder has several
    text_field: str = "text"  # the column that has the text

    def pieces(self, path: Path, on_bad: OnBad) -> Iterator[Piece]:
        import datasets

        try:
            dataset = datasets.load_from_disk(str(self._folder(path)))
        except Exception as error:  # of datasets, pyarrow, json
            on_bad(_cannot_be_read(path, error))
            return
        size_bytes = self.state(path)[1]
        yield from _pieces_of_dataset(
            path, dataset, self.text_field, on_bad, size_bytes / max(1, len(dataset))
        )

    def state(self, path: Path) -> FileState:
        """Return the total size of the files, and their latest times."""
        states = [state_of(file)[1:] for file in self._folder(path).iterdir() if file.is_file()]
        sizes, mtimes, ctimes = zip(*states, strict=True)
        return str(self._folder(path)), sum(sizes), max(mtimes), max(ctimes)

    def part(self) -> str:
        return self.split

    def problem(self, path: Path) -> str | None:
        """Why the folder cannot be opened; checks only the names of files and splits."""
        if (path / _SEVERAL_SPLITS).is_file() and not self._folder(path).is_dir():
            found = sorted(folder.name for folder in path.iterdir() if is_saved_dataset(folder))
            return (
                f"a dataset's split must be one of its own, but {path} has no {self.split!r}; "
                f"state one of {', '.join(found)} as split"
            )
        return next(special_among(sorted(self._folder(path).iterdir())), None)

    def _folder(self, path: Path) -> Path:
        return path / self.split if (path / _SEVERAL_SPLITS).is_file() else path


WITH_RECORDS = (JsonLines, Table, SavedDataset)
"""Formats of files on this machine whose first record shows whether ``text_field`` is right."""


@dataclass(frozen=True, slots=True)
class NamedDataset(TextFormat):
    """A dataset that ``datasets.load_dataset`` loads by name."""

    configuration: str | None = None  # passed to ``load_dataset``; None for its own default
    revision: str | None = None  # the same
    streaming: bool = False  # whether rows are read over the network, without a local copy
    split: str = "train"  # passed to ``load_dataset``
    text_field: str = "text"  # the column that has the text

    def pieces(self, path: Path, on_bad: OnBad) -> Iterator[Piece]:
        dataset = self._ask(path, "load_dataset", split=self.split, streaming=self.streaming)
        yield from _pieces_of_dataset(path, dataset, self.text_field, on_bad)

    def batches(self, path: Path, place: Facts) -> Iterator[tuple[Facts, list[Piece]]]:
        """Yield batches of the rows of a stream: (the place of the first row, pieces of all rows).

        Begin at ``place``, which an earlier call has yielded. If it is empty, begin at row 0.
        Raises DataError if a record is bad, or the stream cannot be read; StreamInterrupted if it
        may be readable later.
        """
        dataset = self._ask(path, "load_dataset", split=self.split, streaming=True)
        row, column = place.get("row", 0), self.text_field
        try:
            if column in (dataset.column_names or ()):  # a stream may not know its columns
                dataset = dataset.select_columns([column])
            if place:
                dataset.load_state_dict(place["dataset"])
            for rows in dataset.iter(batch_size=_STREAMED_AT_ONCE):
                values = (rows[column] for _ in range(1))  # read only if the column exists
                yield place, list(_pieces_of_rows(path, column, rows, values, 0.0, refuse, row))
                row += len(next(iter(rows.values())))
                place = {"row": row, "dataset": dataset.state_dict()}
        except DataError:
            raise
        except Exception as error:  # of datasets, the hub's client, the network
            problem = (
                f"a stream must be readable to its end, but {path}{self.part()} cannot be read "
                f"after row {row:,} ({error})"
            )
            if isinstance(error, ValueError):  # also pyarrow's, of a damaged file
                mend = "state a revision that can be read, or fewer tokens"
                raise DataError(f"{problem}; {mend}") from error
            mend = "start again: complete shards are kept"
            raise StreamInterrupted(f"{problem}; {mend}") from error

    def state(self, path: Path) -> FileState:
        """Return what identifies the dataset's files: names, sizes, times or the hub's hashes."""
        builder = self._ask(path, "load_dataset_builder")
        files = builder.config.data_files or {}
        origins = [sorted(map(repr, each.origin_metadata)) for each in files.values()]
        return f"{path}{self.part()} {builder.hash} {builder.config_id} {origins}", 0, 0, 0

    def part(self) -> str:
        configuration = f"/{self.configuration}" if self.configuration else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{configuration}{revision}[{self.split}]"

    def _ask(self, path: Path, function: str, **arguments: Any) -> Any:
        """Call a function of ``datasets``. Convert any exception to a DataError."""
        import datasets

        load = getattr(datasets, function)
        try:
            return load(str(path), self.configuration, revision=self.revision, **arguments)
        except Exception as error:  # of datasets, the hub's client, the network
            kind = StreamInterrupted if isinstance(error, ConnectionError) else DataError
            raise kind(
                f"datasets.load_dataset must find every dataset, but for {path}{self.part()} it "
                f"reports: {error}; correct the name, configuration, revision or split. Without a "
                "network, save the dataset elsewhere with save_to_disk and name that folder as path"
            ) from error


def _pieces_of_dataset(
    path: Path, dataset: Any, column: str, on_bad: OnBad, bytes_per_row: float = 0.0
) -> Iterator[Piece]:
    """Yield the texts in a column of a Dataset or an IterableDataset."""
    try:
        names = dataset.column_names or list(next(iter(dataset), ()))  # a stream may not know them
    except Exception as error:  # of datasets, the hub's client, the network
        on_bad(_cannot_be_read(path, error))
        return
    one_column = dataset.select_columns([column] if column in names else [])
    columns = (batch[column] for batch in one_column.iter(batch_size=_ROWS_AT_ONCE))
    yield from _pieces_of_rows(path, column, names, columns, bytes_per_row, on_bad)


def _pieces_of_rows(
    path: Path,
    column: str,
    names: Iterable[str],
    batches: Iterator[Iterable[object]],
    bytes_per_row: float,
    on_bad: OnBad,
    row: int = 0,
) -> Iterator[Piece]:
    """Yield the pieces of all rows with text. Each row is a document.

    Args:
        column: the column that has the text.
        names: the columns that the table has.
        batches: the values in the column. Rows after a batch that cannot be read are lost.
        bytes_per_row: size on the disk, for progress.
        on_bad: called with every bad record.
        row: the number of the first row.
    """
    if column not in names:
        problem = no_such_field(column, names, "column")
        on_bad(BadRecord(path, "its columns", problem, STATE_FIELD))
        return
    while True:
        try:
            values = next(batches, None)
        except Exception as error:  # pyarrow and datasets raise many kinds
            on_bad(_cannot_be_read(path, error))
            return
        if values is None:
            return
        for value in values:
            wrong = what_is_wrong(value)
            if wrong is not None:
                problem = f'the column "{column}" must be a string, but is {wrong}'
                on_bad(BadRecord(path, f"row {row:,} (counted from 0)", problem, CORRECT_IT))
            elif value:
                yield from pieces_of(str(value), round((row + 1) * bytes_per_row))
            row += 1


def _cannot_be_read(path: Path, error: Exception) -> BadRecord:
    problem = f"it cannot be read completely ({error})"
    return BadRecord(path, "the table", problem, COPY_AGAIN)

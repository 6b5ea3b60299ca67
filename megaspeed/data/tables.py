"""Tables with one document in each row: Parquet files, and datasets of the ``datasets`` library.

Parquet files are read by pyarrow directly, so that a row group of gigabytes need not fit in memory.
Datasets come from a folder that ``save_to_disk`` wrote, or by name from ``load_dataset``. The
library maps their files into memory. The kernel counts mapped pages as memory of the process until
it needs the memory elsewhere.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from megaspeed.config.data import Source
from megaspeed.data.errors import DataError
from megaspeed.data.pieces import (
    COPY_AGAIN,
    CORRECT_IT,
    STATE_FIELD,
    BadRecord,
    OnBad,
    Piece,
    TextFormat,
    no_such_field,
    pieces_of,
    what_is_wrong,
)
from megaspeed.files.paths import FileState, special_files, state_of

# datasets and pyarrow are slow to import and rarely needed, so they are imported where used.

_BUFFER_BYTES = 1 << 20
_ROWS_AT_ONCE = 64
_ONE_SPLIT = "state.json"
_SEVERAL_SPLITS = "dataset_dict.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")

T = TypeVar("T")

Row = tuple[int, object]
"""The number of a row, and its value in the column of the text."""


def is_saved_dataset(path: Path) -> bool:
    """Return whether ``save_to_disk`` wrote this folder."""
    # Path.is_file would raise an error below a folder that this user may not enter.
    return any(os.path.isfile(path / name) for name in (_ONE_SPLIT, _SEVERAL_SPLITS))


def _pieces_of_rows(
    path: Path, column: str, rows: Iterable[Row], bytes_per_row: float, on_bad: OnBad
) -> Iterator[Piece]:
    """Yield the pieces of all rows with text. Each row is a document."""
    for row, value in rows:
        wrong = what_is_wrong(value)
        if wrong is not None:
            problem = f'the column "{column}" must be a string, but is {wrong}'
            on_bad(BadRecord(path, f"row {row:,} (counted from 0)", problem, CORRECT_IT))
        elif value:
            yield from pieces_of(str(value), round((row + 1) * bytes_per_row))


def _until_broken(batches: Iterator[T], on_broken: Callable[[Exception], None]) -> Iterator[T]:
    """Yield the batches before the first one that cannot be read."""
    try:
        yield from batches
    except Exception as error:  # pyarrow and datasets raise many kinds
        on_broken(error)


def _cannot_be_read(path: Path, error: Exception) -> BadRecord:
    problem = f"it cannot be read completely ({error})"
    return BadRecord(path, "the table", problem, COPY_AGAIN)


@dataclass(frozen=True, slots=True)
class Table(TextFormat):
    """A Parquet file.

    Attributes:
        text_field: the column that has the text.
    """

    has_records: ClassVar[bool] = True
    text_field: str = "text"

    def pieces(self, path: Path, on_bad: OnBad) -> Iterator[Piece]:
        from pyarrow import OSFile, parquet

        size = path.stat().st_size
        try:
            # With its default settings, pyarrow reads a complete row group into memory.
            file = OSFile(os.fsencode(path), "rb")  # a str would have to be UTF-8
            table = parquet.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        except Exception as error:  # pyarrow's own kinds, OSError, ValueError
            on_bad(_cannot_be_read(path, error))
            return
        with file, table:
            wrong = self._wrong_column(table.schema_arrow)
            if wrong is not None:
                on_bad(BadRecord(path, "its columns", wrong, STATE_FIELD))
                return
            rows = self._rows(table, path, on_bad)
            bytes_per_row = size / max(1, table.metadata.num_rows)
            yield from _pieces_of_rows(path, self.text_field, rows, bytes_per_row, on_bad)

    def _wrong_column(self, schema: Any) -> str | None:
        if self.text_field not in schema.names:
            return no_such_field(self.text_field, schema.names, "column")
        if schema.names.count(self.text_field) > 1:
            times = schema.names.count(self.text_field)
            return f'one column must be named "{self.text_field}", but {times} are'
        kind = schema.field(self.text_field).type
        if str(kind).startswith("dictionary<"):
            kind = kind.value_type  # the type of its entries
        if str(kind) not in ("string", "large_string", "string_view"):
            return f'the column "{self.text_field}" must hold strings, but holds {kind}'
        return None

    def _rows(self, table: Any, path: Path, on_bad: OnBad) -> Iterator[Row]:
        """Yield the rows of the column. If a row group is damaged, its other rows are lost."""
        stop = 0
        for group in range(table.metadata.num_row_groups):
            row, stop = stop, stop + table.metadata.row_group(group).num_rows
            errors: list[Exception] = []
            batches = table.iter_batches(_ROWS_AT_ONCE, [group], [self.text_field])
            for batch in _until_broken(batches, errors.append):
                yield from enumerate(map(_value, batch.column(0)), start=row)
                row += len(batch)
            for error in errors:
                problem = (
                    f"it and the rest of its row group, {stop - row:,} rows, cannot be read "
                    f"({error})"
                )
                on_bad(BadRecord(path, f"row {row:,} (counted from 0)", problem, COPY_AGAIN))


def _value(scalar: Any) -> object:
    """Return the text; its bytes if they are not UTF-8, because Parquet does not check this."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        text = getattr(scalar, "value", scalar)  # an entry of a dictionary has it in .value
        return text.as_buffer().to_pybytes()


@dataclass(frozen=True, slots=True)
class SavedDataset(TextFormat):
    """A folder that ``save_to_disk`` wrote.

    Attributes:
        split: the name of the split, if the folder has several.
        text_field: the column that has the text.
    """

    has_records: ClassVar[bool] = True
    split: str = "train"
    text_field: str = "text"

    def pieces(self, path: Path, on_bad: OnBad) -> Iterator[Piece]:
        import datasets

        wrong = self.problem(path)
        if wrong is not None:
            raise DataError(wrong)
        try:
            dataset = datasets.load_from_disk(str(self._folder(path)))
        except Exception as error:  # of datasets, pyarrow, json
            on_bad(_cannot_be_read(path, error))
            return
        bytes_per_row = self.state(path)[1] / max(1, len(dataset))
        yield from _pieces_of_dataset(path, dataset, self.text_field, bytes_per_row, on_bad)

    def state(self, path: Path) -> FileState:
        files = (file for file in self._folder(path).iterdir() if file.is_file())
        return _state_of_all(str(self._folder(path)), files)

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
        return next(special_files(self._folder(path)), None)

    def _folder(self, path: Path) -> Path:
        return path / self.split if (path / _SEVERAL_SPLITS).is_file() else path


@dataclass(frozen=True, slots=True)
class NamedDataset(TextFormat):
    """A dataset that ``datasets.load_dataset`` loads by name.

    Attributes:
        configuration, revision: passed to ``load_dataset``; None for its own default.
        streaming: whether rows are read over the network when they are needed.
        split: passed to ``load_dataset``.
        text_field: the column that has the text.
    """

    configuration: str | None = None
    revision: str | None = None
    streaming: bool = False
    split: str = "train"
    text_field: str = "text"

    @classmethod
    def of(cls, source: Source) -> Self:
        """Return the format of a source that has the key ``dataset``."""
        return cls(
            source.configuration, source.revision, source.streaming, source.split, source.text_field
        )

    def pieces(self, path: Path, on_bad: OnBad) -> Iterator[Piece]:
        import datasets

        dataset = self._ask(path, datasets.load_dataset, split=self.split, streaming=self.streaming)
        yield from _pieces_of_dataset(path, dataset, self.text_field, 0.0, on_bad)

    def state(self, path: Path) -> FileState:
        """Return the state of the dataset's files. Needs no network if the revision is a commit.

        Sizes and times are those of files on this machine.
        """
        if self.revision is not None and _COMMIT.fullmatch(self.revision):
            return (f"{path}{self.part()}", 0, 0, 0)
        import datasets

        builder = self._ask(path, datasets.load_dataset_builder)
        files = builder.config.data_files or {}
        origins = {
            str(split): [list(map(str, names)), list(names.origin_metadata)]
            for split, names in files.items()
        }
        known = json.dumps([builder.hash, builder.config_id, origins])
        local = (Path(file) for names in files.values() for file in names if _is_local(file))
        return _state_of_all(f"{path}{self.part()} {known}", local)

    def part(self) -> str:
        configuration = f"/{self.configuration}" if self.configuration else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{configuration}{revision}[{self.split}]"

    def _ask(self, path: Path, load: Any, **arguments: Any) -> Any:
        """Call ``load``. Convert any exception to a DataError."""
        try:
            return load(str(path), self.configuration, revision=self.revision, **arguments)
        except Exception as error:  # of datasets, the hub's client, the network
            raise DataError(
                f"datasets.load_dataset must find every dataset, but for {path}{self.part()} it "
                f"reports: {error}; correct the name, configuration, revision or split. Without a "
                "network, save the dataset elsewhere with save_to_disk and name that folder as path"
            ) from error


def _pieces_of_dataset(
    path: Path, dataset: Any, column: str, bytes_per_row: float, on_bad: OnBad
) -> Iterator[Piece]:
    """Yield the texts in a column of a Dataset or an IterableDataset."""
    names = dataset.column_names  # None if they are unknown before a stream is read
    if names is not None:
        if column not in names:
            problem = no_such_field(column, names, "column")
            on_bad(BadRecord(path, "its columns", problem, STATE_FIELD))
            return
        dataset = dataset.select_columns([column])
    batches = _until_broken(
        dataset.iter(batch_size=_ROWS_AT_ONCE), lambda error: on_bad(_cannot_be_read(path, error))
    )
    values = (
        value
        for batch in batches
        for value in batch.get(column, [None] * len(next(iter(batch.values()))))
    )
    yield from _pieces_of_rows(path, column, enumerate(values), bytes_per_row, on_bad)


def _state_of_all(name: str, files: Iterable[Path]) -> FileState:
    """Return the total size of the files, and their latest times."""
    states = [(0, 0, 0), *(state_of(file)[1:] for file in files)]
    sizes, mtimes, ctimes = zip(*states, strict=True)
    return name, sum(sizes), max(mtimes), max(ctimes)


def _is_local(file: str) -> bool:
    return "://" not in file and Path(file).is_file()

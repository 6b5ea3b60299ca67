"""Datasets of the `datasets` library: a folder that `save_to_disk` wrote, or one known by name.

Rows are read a few at a time. The library maps a saved dataset's files into memory, so what was
read counts as the process's memory until the kernel needs it for something else.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from megaspeed.config.data import Source
from megaspeed.data.errors import DataError
from megaspeed.data.text.pieces import BadRecord, OnBad, Piece
from megaspeed.data.text.records import STATE_FIELD, no_such_field
from megaspeed.data.text.rows import cannot_be_read, pieces_of_rows, until_broken
from megaspeed.data.text.text_format import TextFormat
from megaspeed.files.reading import FileState, special_files

# datasets imports slowly and is rarely needed: it is imported where it is used.

_ROWS_AT_ONCE = 64
_ONE_SPLIT = "state.json"
_SEVERAL_SPLITS = "dataset_dict.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_saved_dataset(path: Path) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    # os.path: Path.is_file raises below a folder that this user may not enter.
    return any(os.path.isfile(path / name) for name in (_ONE_SPLIT, _SEVERAL_SPLITS))


@dataclass(frozen=True, slots=True)
class SavedDataset(TextFormat):
    """A mark is the number of rows that are behind.

    Attributes:
        split: which one, where the folder holds several.
        text_field: the column of the text.
    """

    has_records: ClassVar[bool] = True
    split: str = "train"
    text_field: str = "text"

    def pieces(self, path: Path, after: int, on_bad: OnBad) -> Iterator[Piece]:
        import datasets

        wrong = self.problem(path)
        if wrong is not None:
            raise DataError(wrong)
        try:
            dataset = datasets.load_from_disk(str(self._folder(path)))
        except Exception as error:  # of datasets, pyarrow, json
            on_bad(cannot_be_read(path, error))
            return
        bytes_per_row = self.state(path)[1] / max(1, len(dataset))
        yield from _pieces(path, dataset, self.text_field, after, bytes_per_row, on_bad)

    def state(self, path: Path) -> FileState:
        states = [file.stat() for file in self._folder(path).iterdir() if file.is_file()]
        return (
            str(self._folder(path)),
            sum(state.st_size for state in states),
            max(state.st_mtime_ns for state in states),
            max(state.st_ctime_ns for state in states),
        )

    def part(self) -> str:
        return self.split

    def problem(self, path: Path) -> str | None:
        """Why the folder cannot be opened, as far as the names in it show."""
        return self._wrong_split(path) or next(special_files(self._folder(path)), None)

    def _wrong_split(self, path: Path) -> str | None:
        """That the folder has several splits and not this one; None where all is well."""
        if not (path / _SEVERAL_SPLITS).is_file() or self._folder(path).is_dir():
            return None
        found = sorted(folder.name for folder in path.iterdir() if is_saved_dataset(folder))
        return (
            f"a dataset's split must be one of its own, and {path} has no {self.split!r}; "
            f"state one of {', '.join(found)} as split"
        )

    def _folder(self, path: Path) -> Path:
        return path / self.split if (path / _SEVERAL_SPLITS).is_file() else path


@dataclass(frozen=True, slots=True)
class NamedDataset(TextFormat):
    """What `datasets.load_dataset` finds by name. A mark is the number of rows that are behind.

    Attributes:
        configuration: which one of the dataset; None is its own choice.
        revision: which one of the dataset; None is the newest.
        streaming: whether rows are read over the network as they are needed.
        split: as load_dataset takes it.
        text_field: the column of the text.
    """

    configuration: str | None = None
    revision: str | None = None
    streaming: bool = False
    split: str = "train"
    text_field: str = "text"

    @classmethod
    def of(cls, source: Source) -> NamedDataset:
        """The format of a source that states `dataset`."""
        return cls(
            source.configuration, source.revision, source.streaming, source.split, source.text_field
        )

    def pieces(self, path: Path, after: int, on_bad: OnBad) -> Iterator[Piece]:
        import datasets

        dataset = self._ask(path, datasets.load_dataset, split=self.split, streaming=self.streaming)
        yield from _pieces(path, dataset, self.text_field, after, 0.0, on_bad)

    def state(self, path: Path) -> FileState:
        """What the library says of the files behind the name; asks nobody where a commit is named.

        Sizes and times are of files that are on this machine.
        """
        if self.revision is not None and _COMMIT.fullmatch(self.revision):
            return (f"{path}{self.part()}", 0, 0, 0)
        import datasets

        builder = self._ask(path, datasets.load_dataset_builder)
        files = builder.config.data_files or {}
        known = [builder.hash, builder.config_id, _origins(files)]
        here = [Path(file).stat() for names in files.values() for file in names if _is_here(file)]
        return (
            f"{path}{self.part()} {json.dumps(known)}",
            sum(state.st_size for state in here),
            max((state.st_mtime_ns for state in here), default=0),
            max((state.st_ctime_ns for state in here), default=0),
        )

    def part(self) -> str:
        configuration = f"/{self.configuration}" if self.configuration else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{configuration}{revision}[{self.split}]"

    def _ask(self, path: Path, load: Any, **arguments: Any) -> Any:
        """What `load` gives; whatever it raises is a DataError that says what to do."""
        try:
            return load(str(path), self.configuration, revision=self.revision, **arguments)
        except Exception as error:  # of datasets, the hub's client, the network
            raise DataError(
                f"datasets.load_dataset must find what data names, and for {path}{self.part()} it "
                f"says: {error}; correct the name, configuration, revision or split, or, where "
                "there is no network, save the dataset elsewhere with save_to_disk and name that "
                "folder as path"
            ) from error


def _pieces(
    path: Path, dataset: Any, column: str, after: int, bytes_per_row: float, on_bad: OnBad
) -> Iterator[Piece]:
    """Of a Dataset or an IterableDataset, from row `after` on."""
    names = dataset.column_names  # None where a stream does not know them beforehand
    if names is not None and column not in names:
        on_bad(BadRecord(path, "its columns", no_such_field(column, names, "column"), STATE_FIELD))
        return
    if names is not None:
        dataset = dataset.select_columns([column])
    if after == getattr(dataset, "num_rows", None):
        return  # skip() refuses to skip every row
    batches = dataset.skip(after).iter(batch_size=_ROWS_AT_ONCE)
    readable = until_broken(batches, lambda error: on_bad(cannot_be_read(path, error)))
    rows = _rows(readable, column, after)
    yield from pieces_of_rows(path, column, rows, bytes_per_row, on_bad)


def _rows(
    batches: Iterator[dict[str, list[object]]], column: str, first: int
) -> Iterator[tuple[int, object]]:
    numbers = count(first)
    for batch in batches:
        rows = len(next(iter(batch.values())))
        for value in batch.get(column, [None] * rows):
            yield next(numbers), value


def _origins(files: Any) -> dict[str, object]:
    """Split -> its files, and the commits or the modification times that they are of."""
    return {
        str(split): [list(map(str, names)), list(names.origin_metadata)]
        for split, names in files.items()
    }


def _is_here(file: str) -> bool:
    return "://" not in file and Path(file).is_file()

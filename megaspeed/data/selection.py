"""The files that one `data` section names: found, checked against each other, and their state."""

from __future__ import annotations

import time
from dataclasses import dataclass

from megaspeed.config.data import DataConfig
from megaspeed.data.errors import DataError
from megaspeed.data.sources import SourceFile, list_files
from megaspeed.data.tokenizer import (
    TRAIN,
    check_trainable,
    check_vocabulary,
    load_tokenizer,
    tokenizer_files,
)

_YOUNG_FILE_SECONDS = 2.0

FileState = tuple[str, str, int, int, int]  # name, path, size in bytes, mtime and ctime in ns


@dataclass(frozen=True)
class Selection:
    """The files of a corpus as they were at one moment.

    Attributes:
        train: files of the training documents.
        validation: files of the validation documents; None where a fraction is held out instead.
        states: of every file that is read, the tokenizer's too.
        seen_at_seconds: when the states were read, by the clock.
    """

    train: list[SourceFile]
    validation: list[SourceFile] | None
    states: list[FileState]
    seen_at_seconds: float

    def is_settled(self) -> bool:
        """Whether any later change of a file must show in its state.

        A file that changes twice within a tick of the file system's clock, and keeps its size,
        has the same state both times. Ticks are at most two seconds (FAT).
        """
        newest_ns = max(max(mtime_ns, ctime_ns) for *_, mtime_ns, ctime_ns in self.states)
        return newest_ns / 1e9 < self.seen_at_seconds - _YOUNG_FILE_SECONDS


def select_files(data: DataConfig) -> Selection:
    """Finds the files and reads their state; opens none.

    Raises:
        DataError: every problem with the sources.
    """
    now = time.time()
    train, validation = _list_both(data)
    vocabulary = [] if data.tokenizer == TRAIN else tokenizer_files(data.tokenizer)
    files = [*train, *(validation or []), *(SourceFile(path.name, path) for path in vocabulary)]
    return Selection(train, validation, [(file.name, *file.state()) for file in files], now)


def find_problems(data: DataConfig, vocab_size: int) -> tuple[str, ...]:
    """Every problem that shows without reading the corpus; empty where there is none."""
    problems: list[str] = []
    try:
        _list_both(data)
    except DataError as error:
        problems.extend(error.problems)
    try:
        if data.tokenizer == TRAIN:
            check_trainable(vocab_size)
        else:
            tokenizer = load_tokenizer(data.tokenizer)
            check_vocabulary(tokenizer.vocab_size, data.tokenizer, vocab_size)
    except DataError as error:
        problems.extend(error.problems)
    return tuple(problems)


def _list_both(data: DataConfig) -> tuple[list[SourceFile], list[SourceFile] | None]:
    """(training files, validation files or None)."""
    problems: list[str] = []
    listed: list[list[SourceFile]] = []
    for sources, setting in ((data.train, "data.train"), (data.validation, "data.validation")):
        try:
            listed.append([] if sources is None else list_files(sources, setting))
        except DataError as error:
            problems.extend(error.problems)
    if problems:
        raise DataError(*problems)
    train, validation = listed
    trained_on = {file.path.resolve() for file in train}
    shared = [str(file.path) for file in validation if file.path.resolve() in trained_on]
    if shared:
        raise DataError(
            f"validation text must not be trained on, and {len(shared)} of {len(validation)} "
            f"files of data.validation are in data.train too, the first {shared[0]}; "
            "narrow one of the two lists"
        )
    return train, None if data.validation is None else validation

"""The files that one `data` section names: found, checked against each other, and their state."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from megaspeed.config.data import DataConfig
from megaspeed.data.errors import DataError
from megaspeed.data.shares import Share, find_shares, token_places
from megaspeed.data.text.pieces import SKIP_BEFOREHAND, refuse
from megaspeed.data.text.sources import SourceFile
from megaspeed.data.tokenizer.choice import choose_tokenizer
from megaspeed.data.tokenizer.text_tokenizer import (
    TRAIN,
    check_vocabulary,
    load_tokenizer,
    tokenizer_files,
)
from megaspeed.data.tokenizer.training import check_trainable
from megaspeed.data.tokens.token_sources import why_not_tokens
from megaspeed.files.reading import FileState, are_settled


@dataclass(frozen=True)
class Selection:
    """The files of a corpus as they were at one moment.

    Attributes:
        train: what the training data comes from.
        validation: what the validation data comes from; None where a fraction is held out instead.
        tokenizer: the path of one that exists; None where it is to be trained, or none is needed.
        states: name and state of every file of text, and of the tokenizer's files.
        seen_at_seconds: when the states were read, by the clock.
    """

    train: tuple[Share, ...]
    validation: tuple[Share, ...] | None
    tokenizer: str | None
    states: list[tuple[str, FileState]]
    seen_at_seconds: float

    @property
    def shares(self) -> tuple[Share, ...]:
        """Of training and of validation."""
        return self.train + (self.validation or ())

    @property
    def has_text(self) -> bool:
        """Whether there is anything to tokenize."""
        return any(share.files for share in self.shares)

    def is_settled(self) -> bool:
        """Whether any later change of a file must show in its state."""
        return are_settled((state for _, state in self.states), self.seen_at_seconds)


def select_files(data: DataConfig) -> Selection:
    """Finds the files and reads their state; opens no text.

    Raises:
        DataError: every problem with the sources, or with the choice of the tokenizer.
    """
    now = time.time()
    train, validation = _find_both(data)
    shares = (*train, *(validation or ()))
    tokenizer = choose_tokenizer(data, shares)
    files = [file for share in shares for file in share.files]
    if tokenizer is not None:
        files += [SourceFile(path.name, path) for path in tokenizer_files(tokenizer)]
    states = [(file.name, file.state()) for file in files]
    return Selection(train, validation, tokenizer, states, now)


def find_problems(data: DataConfig, vocab_size: int) -> tuple[str, ...]:
    """Every problem that shows without reading the corpus; empty where there is none."""
    return tuple(each_problem(data, vocab_size))


def each_problem(data: DataConfig, vocab_size: int) -> Iterator[str]:
    """As `find_problems`, each as it is found."""
    shares: Sequence[Share] = ()
    try:
        train, validation = _find_both(data)
        shares = (*train, *(validation or ()))
    except DataError as error:
        yield from error.problems
    yield from _first_records(shares)
    yield from first_ids(shares, vocab_size)
    try:
        tokenizer = choose_tokenizer(data, shares)
        if tokenizer is not None:
            check_vocabulary(load_tokenizer(tokenizer).vocab_size, tokenizer, vocab_size)
        elif data.tokenizer == TRAIN and not token_places(shares):
            check_trainable(vocab_size)
    except DataError as error:
        yield from error.problems


def first_ids(shares: Sequence[Share], vocab_size: int) -> list[str]:
    """What is wrong with the first ids of each token file that does not say how wide they are."""
    problems = (why_not_tokens(place, vocab_size) for place in token_places(shares))
    return [problem for problem in problems if problem is not None]


def _find_both(data: DataConfig) -> tuple[tuple[Share, ...], tuple[Share, ...] | None]:
    """(shares of training, of validation or None)."""
    problems: list[str] = []
    found: list[tuple[Share, ...]] = []
    for sources, setting in (
        (data.train_sources, "data.train"),
        (data.validation_sources, "data.validation"),
    ):
        try:
            found.append(() if sources is None else find_shares(sources, setting))
        except DataError as error:
            problems.extend(error.problems)
    if problems:
        raise DataError(*problems)
    train, validation = found
    _check_apart(train, validation)
    return train, None if data.validation is None else validation


def _check_apart(train: Sequence[Share], validation: Sequence[Share]) -> None:
    trained_on, validated_on = _places(train), _places(validation)
    shared = [shown for place, shown in validated_on.items() if place in trained_on]
    if shared:
        raise DataError(
            f"validation data must not be trained on, and {len(shared)} of {len(validated_on)} "
            f"files of data.validation are in data.train too, the first {shared[0]}; "
            "narrow one of the two lists"
        )


def _places(shares: Sequence[Share]) -> dict[tuple[str, str], str]:
    """What each file is whatever it is called -> what it is called."""
    text = {file.place(): str(file.path) for share in shares for file in share.files}
    return text | {(str(place.resolve()), ""): str(place) for place in token_places(shares)}


def _first_records(shares: Sequence[Share]) -> Iterator[str]:
    """What is wrong with the first record of each file of records; a wrong field shows there."""
    on_bad = partial(refuse, otherwise=SKIP_BEFOREHAND)
    for file in (file for share in shares for file in share.files if file.format.has_records):
        try:
            next(file.pieces(on_bad=on_bad), None)
        except DataError as error:
            yield from error.problems

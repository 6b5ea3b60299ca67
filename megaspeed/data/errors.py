"""The error of bad data."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from megaspeed.config.errors import MOST_LISTED, shortened

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


class DataError(ValueError):
    """The corpus, the tokenizer or the token files cannot be trained on."""

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems  # each states the rule, the numbers and what to do

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        numbers = (f"{i}. {problem}" for i, problem in enumerate(self.problems, start=1))
        return "\n".join(shortened(numbers, MOST_LISTED))


class StreamInterrupted(DataError):
    """A stream cannot be read now. The same command may succeed later."""


class StreamEnded(DataError):
    """A stream gets no more shards, because of its data. All ranks raise this together."""


def raise_any(problems: Iterable[str | None]) -> None:
    """Raise DataError if there is a problem; None means no problem."""
    found = [problem for problem in problems if problem is not None]
    if found:
        raise DataError(*found)


def for_each(items: Iterable[Item], function: Callable[[Item], Outcome]) -> list[Outcome]:
    """Return the results of ``function`` for all items.

    Raises DataError with the problems of all items for which ``function`` raised one.
    """
    results: list[Outcome] = []
    problems: list[str] = []
    for item in items:
        try:
            results.append(function(item))
        except DataError as error:
            problems.extend(error.problems)
    raise_any(problems)
    return results

"""The exception for a wrong configuration. It lists all problems, each with its key."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

KeyPath = tuple[str | int, ...]
"""The path of a value in the JSON: ("data", "train", 0) is the first source in `data.train`."""

MOST_LISTED = 20
"""The largest number of problems that one message lists; it counts the others."""

_LONGEST_KEY = 100
"""Characters of a key that are shown."""


def dotted(path: KeyPath) -> str:
    """A key path as a user writes it.

    >>> dotted(("data", "train", 0))
    'data.train[0]'
    """
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            shown = part if len(part) <= _LONGEST_KEY else part[:_LONGEST_KEY] + "..."
            text += f".{shown}" if text else shown
    return text


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Args:
        path: where in the JSON; empty if it does not belong to one key.
        message: the error message.
        meant: for an unknown key, the key that was probably meant. Its value may be wrong, too.
    """

    path: KeyPath
    message: str
    meant: KeyPath = ()


class ConfigError(ValueError):
    """The configuration cannot be run.

    Args:
        problems: one complete sentence for each thing that is wrong.
        where: what was being read, shown in the heading, such as the path of the file.
    """

    def __init__(self, problems: Sequence[str], where: str = "the configuration") -> None:
        self.problems = tuple(problems)
        self.where = where
        super().__init__(numbered(self.problems, where))


def shortened(sentences: Iterable[str], most: int) -> list[str]:
    """The first ``most`` sentences, and the number of the others.

    >>> shortened(["one", "two", "three"], 1)
    ['one', 'and 2 more']
    """
    told = list(sentences)
    more = len(told) - most
    return told if more <= 0 else [*told[:most], f"and {more:,} more"]


def numbered(problems: Sequence[str], where: str) -> str:
    """The problems as a numbered list with a heading, at most ``MOST_LISTED`` of them."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems):,} problems"
    told = problems[:MOST_LISTED]
    lines = [f"{index}. {problem}" for index, problem in enumerate(told, start=1)]
    lines += shortened(problems, MOST_LISTED)[len(told) :]
    return "\n".join([f"{count} in {where}:", *(f"  {line}" for line in lines)])

"""The exception for a wrong configuration, and how its problems are listed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

KeyPath = tuple[str | int, ...]
"""The path of a value in the JSON: ("data", "train", 0) is the first source in ``data.train``."""

MOST_LISTED = 20
"""How many problems a message lists. It only counts the others."""

_LONGEST_KEY = 100
"""Characters of a key that are shown."""


def dotted(path: KeyPath) -> str:
    """Return a key path as a user writes it.

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
    """A mistake in the JSON."""

    path: KeyPath  # the key; empty if the mistake is not in one key
    message: str
    meant: KeyPath = ()  # for an unknown key, the known key that was probably meant


class ConfigError(ValueError):
    """The configuration cannot be run.

    Args:
        problems: a sentence for each mistake.
        where: what was read, such as the path of the file, for the heading.
    """

    def __init__(self, problems: Sequence[str], where: str = "the configuration") -> None:
        self.problems = tuple(problems)
        self.where = where
        count = "1 problem" if len(problems) == 1 else f"{len(problems):,} problems"
        listed = [f"{number}. {problem}" for number, problem in enumerate(problems, start=1)]
        lines = [f"{count} in {where}:", *shortened(listed, MOST_LISTED)]
        if len(listed) > MOST_LISTED:
            lines[-1] += "; megaspeed check --json FILE writes all of them"
        super().__init__("\n  ".join(lines))


def shortened(sentences: Iterable[str], most: int) -> list[str]:
    """Return the first ``most`` sentences, and the number of the others.

    >>> shortened(["one", "two", "three"], 1)
    ['one', 'and 2 more']
    """
    listed = list(sentences)
    more = len(listed) - most
    return listed if more <= 0 else [*listed[:most], f"and {more:,} more"]

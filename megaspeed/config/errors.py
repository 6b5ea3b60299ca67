"""What a wrong configuration raises: every problem at once, each one naming its key."""

from collections.abc import Sequence
from dataclasses import dataclass

KeyPath = tuple[str | int, ...]
"""The way to a value in the JSON: ("data", "train", 0) is the first source in `data.train`."""


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
            text += f".{part}" if text else part
    return text


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Args:
        path: where in the JSON; empty if not at one key.
        message: what to say of it.
        meant: for an unknown key the one that was probably meant, whose value is in doubt as well.
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


def numbered(problems: Sequence[str], where: str) -> str:
    """The problems as a numbered list under one heading."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"{index}. {problem}" for index, problem in enumerate(problems, start=1)]
    return "\n".join([f"{count} in {where}:", *(f"  {line}" for line in lines)])

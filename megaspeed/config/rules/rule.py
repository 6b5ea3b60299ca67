"""A rule: a condition on the keys that it names, and an error message for each violation."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from megaspeed.config.degrees import World
from megaspeed.config.errors import KeyPath, Problem
from megaspeed.config.run import RunConfig


@dataclass(frozen=True)
class Launch:
    """A config and the processes that will run it."""

    config: RunConfig
    world: World


Subject = TypeVar("Subject", RunConfig, Launch)
Check = Callable[[Subject], Iterator[str]]


@dataclass(frozen=True)
class Rule(Generic[Subject]):
    """One rule. `reads` names its keys. If one of them is invalid, the rule is not checked."""

    reads: tuple[KeyPath, ...]
    check: Check[Subject]

    def problems(self, subject: Subject, broken: "_Broken") -> Iterator[Problem]:
        """The violations; none if one of the keys is already known to be invalid."""
        if not any(map(broken.touches, self.reads)):
            for message in self.check(subject):
                yield Problem(self.reads[0], message)


def rule(*reads: str) -> Callable[[Check[Subject]], Rule[Subject]]:
    """Make a rule from a generator function; `reads` are the dotted keys that it reads."""
    paths = tuple(tuple(name.split(".")) for name in reads)
    return lambda check: Rule(paths, check)


def apply_rules(
    rules: Iterable[Rule[Subject]], subject: Subject, broken: frozenset[KeyPath]
) -> list[Problem]:
    """All problems of all rules, in order."""
    index = _Broken(broken)
    return [problem for law in rules for problem in law.problems(subject, index)]


class _Broken:
    """The paths of invalid values, and all paths above them."""

    def __init__(self, paths: frozenset[KeyPath]) -> None:
        self._paths = paths
        self._above = {path[:length] for path in paths for length in range(len(path))}

    def touches(self, read: KeyPath) -> bool:
        """Whether an invalid path is this one, above it, or below it."""
        leading = (read[:length] for length in range(1, len(read) + 1))
        return read in self._above or any(path in self._paths for path in leading)

"""What a rule is: a law over the keys that it names, and the sentences for where it is broken."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from megaspeed.config.degrees import World
from megaspeed.config.errors import KeyPath, Problem
from megaspeed.config.run import RunConfig


@dataclass(frozen=True)
class Launch:
    """A config together with the processes that it is to run on."""

    config: RunConfig
    world: World


Subject = TypeVar("Subject", RunConfig, Launch)
Check = Callable[[Subject], Iterator[str]]


@dataclass(frozen=True)
class Rule(Generic[Subject]):
    """One law. `reads` names the keys it looks at: it is silent where one of them is broken."""

    reads: tuple[KeyPath, ...]
    check: Check[Subject]

    def problems(self, subject: Subject, broken: "_Broken") -> Iterator[Problem]:
        """What the subject breaks; nothing where a key it reads is already known to be wrong."""
        if not any(map(broken.touches, self.reads)):
            for message in self.check(subject):
                yield Problem(self.reads[0], message)


def rule(*reads: str) -> Callable[[Check[Subject]], Rule[Subject]]:
    """Make a rule of a generator function; `reads` are the dotted keys that it looks at."""
    paths = tuple(tuple(name.split(".")) for name in reads)
    return lambda check: Rule(paths, check)


def apply_rules(
    rules: Iterable[Rule[Subject]], subject: Subject, broken: frozenset[KeyPath]
) -> list[Problem]:
    """All problems of all rules, in order."""
    index = _Broken(broken)
    return [problem for law in rules for problem in law.problems(subject, index)]


class _Broken:
    """The broken paths, found by what they lead to and by what leads to them."""

    def __init__(self, paths: frozenset[KeyPath]) -> None:
        self._paths = paths
        self._above = {path[:length] for path in paths for length in range(len(path))}

    def touches(self, read: KeyPath) -> bool:
        """Whether a broken path is this one, leads to it, or is led to by it."""
        leading = (read[:length] for length in range(1, len(read) + 1))
        return read in self._above or any(path in self._paths for path in leading)

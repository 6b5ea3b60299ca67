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

    def problems(self, subject: Subject, broken: frozenset[KeyPath]) -> Iterator[Problem]:
        """What the subject breaks; nothing where a key it reads is already known to be wrong."""
        if not any(_overlap(read, path) for read in self.reads for path in broken):
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
    return [problem for law in rules for problem in law.problems(subject, broken)]


def _overlap(one: KeyPath, other: KeyPath) -> bool:
    """Whether one path is the other or leads to it."""
    shared = min(len(one), len(other))
    return one[:shared] == other[:shared]

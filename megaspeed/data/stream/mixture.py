"""What a training stream is drawn from: token files, gathered into components with weights.

    mixture     component "books"  weight 3      file . file . file
                component "code"   weight 1      file

    sequences of a component    0 1 2 . 3 4 . 5 6 7 8      each within one file

Without weights there is one component, which is read once an epoch; with weights each component
gives its share of the samples, and comes to its own epochs at its own pace.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from itertools import accumulate

from megaspeed.data.tokens.token_file import TokenFile


def count_sequences(tokens: int, sequence_length: int) -> int:
    """Whole sequences of `sequence_length` inputs, each with its target, among `tokens`."""
    return max(0, (tokens - 1) // sequence_length)


@dataclass(frozen=True)
class Component:
    """Files that are drawn from as one.

    Attributes:
        files: in order, at least one.
        weight: share of the samples, relative to the other components' weights.
        name: what a person calls it: its source, as the configuration has it.
    """

    files: tuple[TokenFile, ...]
    weight: float
    name: str

    def __post_init__(self) -> None:
        assert self.files and self.weight > 0, self

    @property
    def fingerprint(self) -> str:
        """Of one file the file's own; else sha256 over the files' fingerprints, in order."""
        fingerprints = [file.index.corpus_fingerprint for file in self.files]
        return fingerprints[0] if len(fingerprints) == 1 else _hash(fingerprints)

    @property
    def tokens(self) -> int:
        """Of all files."""
        return sum(file.index.tokens for file in self.files)

    def first_sequences(self, sequence_length: int) -> list[int]:
        """For each file the number of the first sequence in it, and behind them the number of all.

        No sequence goes over the end of a file.
        """
        counts = (count_sequences(file.index.tokens, sequence_length) for file in self.files)
        return list(accumulate(counts, initial=0))

    def sequences(self, sequence_length: int) -> int:
        """Sequences of one epoch."""
        return self.first_sequences(sequence_length)[-1]


@dataclass(frozen=True)
class Mixture:
    """Components, at least one, in the order of the configuration."""

    components: tuple[Component, ...]

    def __post_init__(self) -> None:
        assert self.components

    @property
    def files(self) -> tuple[TokenFile, ...]:
        """Of all components."""
        return tuple(file for component in self.components for file in component.files)

    @property
    def tokens(self) -> int:
        """Of all components."""
        return sum(component.tokens for component in self.components)

    @property
    def fingerprint(self) -> str:
        """Of one component the component's; else sha256 over (weight, fingerprint) of each."""
        entries = [(component.weight, component.fingerprint) for component in self.components]
        return entries[0][1] if len(entries) == 1 else _hash(entries)

    def sequences(self, sequence_length: int) -> int:
        """Sequences of all components, each counted once."""
        return sum(component.sequences(sequence_length) for component in self.components)


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode("utf-8")).hexdigest()

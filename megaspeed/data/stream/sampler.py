"""The order of the training stream: which tokens sample i is.

    (k, j)    = mixing(i): component k, and how many samples before i were drawn from it
    n         = whole sequences of component k: the sum of (tokens - 1) // S over its files
    epoch     = j // n
    sequence  = permutation_{seed, fingerprint of k, epoch}(j % n)
    sample i  = tokens[s * S : s * S + S + 1] of the file with that sequence, its s-th

i counts the samples consumed since the first step. Nothing else enters: not the data degree, the
micro-batch, the accumulation or the number of steps. So every layout trains on the same samples
in the same order, and a run resumes at any i without replaying what came before. With a single
component, j is i.

The last token of a sequence is the first of the next: in one epoch every token of a file but the
first is predicted exactly once (but for a rest shorter than S at the end of the file).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from megaspeed.data.stream.mixing import Mixing
from megaspeed.data.stream.mixture import Component, Mixture
from megaspeed.data.stream.permutation import Permutation


@dataclass(frozen=True)
class Sampler:
    """Draw index -> sequence index, of one component.

    Attributes:
        seed: `data.seed`.
        fingerprint: of the component.
        sequences: n above, at least 1.
    """

    seed: int
    fingerprint: str
    sequences: int

    def __post_init__(self) -> None:
        assert self.sequences >= 1, self.sequences

    def sequence_of(self, draw: int) -> int:
        """The sequence, in [0, sequences), that draw `draw` >= 0 of the component is."""
        epoch, position = divmod(draw, self.sequences)
        key = f"{self.seed}:{self.fingerprint}:{epoch}".encode()
        return Permutation.keyed(self.sequences, key)(position)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sample's tokens are.

    Attributes:
        component: of the mixture, counted from 0.
        draw: how many samples before it are of that component.
        sequence: of the component, counted over its files.
        file: of the component, counted from 0.
        first_token: of the row in that file; the row has S + 1 tokens.
    """

    component: int
    draw: int
    sequence: int
    file: int
    first_token: int


@dataclass(frozen=True)
class _Shelf:
    """Sequence index -> place, of one component."""

    first_sequences: Sequence[int]
    sequence_length: int

    @classmethod
    def of(cls, component: Component, sequence_length: int) -> _Shelf:
        return cls(component.first_sequences(sequence_length), sequence_length)

    @property
    def sequences(self) -> int:
        return self.first_sequences[-1]

    def place(self, component: int, draw: int, sequence: int) -> Place:
        # The last file that begins at or before it: files without a sequence begin there, too.
        file = bisect_right(self.first_sequences, sequence) - 1
        within = sequence - self.first_sequences[file]
        return Place(component, draw, sequence, file, within * self.sequence_length)


@dataclass(frozen=True)
class TrainingOrder:
    """Sample index -> place, of the training stream."""

    mixing: Mixing
    samplers: tuple[Sampler, ...]
    shelves: tuple[_Shelf, ...]

    @classmethod
    def of(cls, mixture: Mixture, seed: int, sequence_length: int) -> TrainingOrder:
        """Every component of the mixture has at least one sequence."""
        shelves = tuple(_Shelf.of(each, sequence_length) for each in mixture.components)
        samplers = tuple(
            Sampler(seed, component.fingerprint, shelf.sequences)
            for component, shelf in zip(mixture.components, shelves, strict=True)
        )
        return cls(_mixing_of(mixture, seed), samplers, shelves)

    def place_of(self, sample: int) -> Place:
        """Where sample `sample` >= 0 of the stream is."""
        component, draw = self.mixing.draw(sample)
        sequence = self.samplers[component].sequence_of(draw)
        return self.shelves[component].place(component, draw, sequence)


@dataclass(frozen=True)
class ValidationOrder:
    """Row index -> place, of an evaluation: every component's sequences in order, unshuffled.

    Components are mixed as in training, so that the mean over rows weighs them alike. One that is
    used up begins again: a small one would else end the evaluation of all.
    """

    mixing: Mixing
    shelves: tuple[_Shelf, ...]

    @classmethod
    def of(cls, mixture: Mixture, seed: int, sequence_length: int) -> ValidationOrder:
        """Every component of the mixture has at least one sequence."""
        shelves = tuple(_Shelf.of(each, sequence_length) for each in mixture.components)
        return cls(_mixing_of(mixture, seed), shelves)

    @property
    def sequences(self) -> int:
        """Rows of a whole evaluation: as many as all components have sequences."""
        return sum(shelf.sequences for shelf in self.shelves)

    def place_of(self, row: int) -> Place:
        """Where row `row`, in [0, sequences), is."""
        component, draw = self.mixing.draw(row)
        shelf = self.shelves[component]
        return shelf.place(component, draw, draw % shelf.sequences)


def _mixing_of(mixture: Mixture, seed: int) -> Mixing:
    weights = [component.weight for component in mixture.components]
    return Mixing.of(weights, f"{seed}:{mixture.fingerprint}")

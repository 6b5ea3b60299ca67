"""The order of the training stream: computes which tokens sample i has, and reads them.

    (k, j)    = mixing(i): component k, and how many samples before i were drawn from it
    n         = complete sequences of component k: the sum of (tokens - 1) // S over its files
    epoch     = j // n
    sequence  = permutation_{seed, fingerprint of k, epoch}(j % n)
    sample i  = tokens[s * S : s * S + S + 1] of the file with that sequence, its s-th

i counts the samples since the first step. The sample does not depend on the data degree, the
micro-batch, the accumulation or the number of steps. So every layout trains on the same samples in
the same order, and a run resumes at any i without reading earlier samples again.

The last token of a sequence is the first of the next. So in one epoch, every token of a file except
the first is predicted exactly once. A remainder shorter than S at the end of the file is not used.

The permutation is a Feistel network, computed one value at a time in constant memory:

    i = left . right  (two halves of w bits, 4^w >= n)
    8 times:  left, right = right, left XOR F_key(right)
    repeated until the result is below n

A Feistel network is a bijection for any round function, and four rounds of a random one cannot be
distinguished from a random permutation (Luby and Rackoff, "How to construct pseudorandom
permutations from pseudorandom functions", SIAM J. Comput. 17(2), 1988). Repeating it until the
result is in [0, n) restricts it to any n (Black and Rogaway, "Ciphers with arbitrary finite
domains", CT-RSA 2002); 4^w < 4n, so this takes less than four rounds on average.
"""

import hashlib
import struct
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

from megaspeed.data.mixture import Mixing, Mixture, mix_64

_ROUNDS = 8
_MAPPED_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Permutation:
    """A permutation of [0, ``size``); calling it maps one index."""

    size: int
    half_bits: int
    round_keys: tuple[int, ...]

    @classmethod
    def keyed(cls, size: int, key: bytes) -> Self:
        """Return the permutation that a key selects; different keys give unrelated permutations."""
        assert size >= 1, size
        half_bits = ((size - 1).bit_length() + 1) // 2
        digest = hashlib.sha512(key).digest()
        return cls(size, half_bits, struct.unpack(f"<{_ROUNDS}Q", digest))

    def __call__(self, index: int) -> int:
        assert 0 <= index < self.size, (index, self.size)
        index = self._feistel(index)
        while index >= self.size:
            index = self._feistel(index)
        return index

    def _feistel(self, index: int) -> int:
        mask = (1 << self.half_bits) - 1
        left, right = index >> self.half_bits, index & mask
        for key in self.round_keys:
            left, right = right, left ^ (mix_64(right ^ key) & mask)
        return (left << self.half_bits) | right


@dataclass(frozen=True)
class Sampler:
    """The order of the sequences of one component.

    Attributes:
        seed: ``data.seed``.
        fingerprint: the fingerprint of the component.
        sequences: n in the module's docstring, at least 1.
    """

    seed: int
    fingerprint: str
    sequences: int

    def __post_init__(self) -> None:
        assert self.sequences >= 1, self.sequences

    def sequence_of(self, draw: int) -> int:
        """Return the number of the sequence that the component's sample ``draw`` has."""
        epoch, position = divmod(draw, self.sequences)
        key = f"{self.seed}:{self.fingerprint}:{epoch}".encode()
        return Permutation.keyed(self.sequences, key)(position)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sample's tokens are.

    Attributes:
        component: the component's number in the mixture, from 0.
        draw: number of earlier samples from that component.
        sequence: the sequence's number in the component, counted over all its files.
        file: the file's number in the component, from 0.
        first_token: where the row of S + 1 tokens begins in that file.
    """

    component: int
    draw: int
    sequence: int
    file: int
    first_token: int


@dataclass(frozen=True)
class TrainingOrder:
    """Maps sample index to place, for the training stream.

    Attributes:
        mixing: the order of components.
        samplers: for each component, the order of its sequences.
        first_sequences: for each component, the number of the first sequence in each file, then the
            number of all sequences.
        sequence_length: S, tokens.
    """

    mixing: Mixing
    samplers: tuple[Sampler, ...]
    first_sequences: tuple[list[int], ...]
    sequence_length: int

    @classmethod
    def of(cls, mixture: Mixture, seed: int, sequence_length: int) -> Self:
        """Order the sequences of a mixture, of which each component has at least one."""
        weights = [component.weight for component in mixture.components]
        firsts = [component.first_sequences(sequence_length) for component in mixture.components]
        samplers = [
            Sampler(seed, component.fingerprint, first[-1])
            for component, first in zip(mixture.components, firsts, strict=True)
        ]
        mixing = Mixing.of(weights, f"{seed}:{mixture.fingerprint}")
        return cls(mixing, tuple(samplers), tuple(firsts), sequence_length)

    def place_of(self, sample: int) -> Place:
        """Return the place of a sample of the stream; ``sample`` is at least 0."""
        component, draw = self.mixing.draw(sample)
        sequence = self._sequence_of(self.samplers[component], draw)
        first_sequences = self.first_sequences[component]
        # The last file that begins at or before the sequence, because a file may have no sequence.
        file = bisect_right(first_sequences, sequence) - 1
        first_token = (sequence - first_sequences[file]) * self.sequence_length
        return Place(component, draw, sequence, file, first_token)

    def _sequence_of(self, sampler: Sampler, draw: int) -> int:
        return sampler.sequence_of(draw)


class ValidationOrder(TrainingOrder):
    """Maps row index to place, for an evaluation. Sequences of a component are not shuffled.

    Components are mixed as in training, so the mean over rows has the same weights. A component
    whose sequences are used up is repeated, so a small one does not end the evaluation.
    """

    @property
    def sequences(self) -> int:
        """The number of sequences of all samplers. A complete evaluation reads each once."""
        return sum(sampler.sequences for sampler in self.samplers)

    def _sequence_of(self, sampler: Sampler, draw: int) -> int:
        return draw % sampler.sequences


class Rows:
    """Maps a file into memory when a row of it is read.

    A process may have a limited number of files open, often 1,024, so the least recently used
    files are closed.
    """

    def __init__(self, mixture: Mixture, sequence_length: int) -> None:
        self._mixture = mixture
        self._sequence_length = sequence_length
        self._mapped = lru_cache(_MAPPED_AT_ONCE)(self._map)

    def at(self, place: Place) -> NDArray[np.integer]:
        """Return the S + 1 ids of the row at this place, in the dtype of the file."""
        ids = self._mapped(place.component, place.file)
        return ids[place.first_token : place.first_token + self._sequence_length + 1]

    def _map(self, component: int, file: int) -> NDArray[np.integer]:
        return self._mixture.components[component].files[file].map()

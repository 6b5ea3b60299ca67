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

If component k is read in order, such as a stream, sequence j % n is permuted only within its file.

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
from operator import methodcaller
from typing import Self

import numpy as np
from numpy.typing import NDArray

from megaspeed.data.mixture import Mixing, Mixture, mix_64

_ROUNDS = 8
_MAPPED_AT_ONCE = 256


def permuted(index: int, size: int, key: bytes) -> int:
    """Map an index in [0, ``size``) by the permutation that the key selects.

    Different keys give unrelated permutations.
    """
    assert 0 <= index < size, (index, size)
    # Halves of equal size, so that each round can exchange them.
    half_bits = ((size - 1).bit_length() + 1) // 2
    mask = (1 << half_bits) - 1
    round_keys = struct.unpack(f"<{_ROUNDS}Q", hashlib.sha512(key).digest())
    while True:
        left, right = index >> half_bits, index & mask
        for round_key in round_keys:
            left, right = right, left ^ (mix_64(right ^ round_key) & mask)
        index = (left << half_bits) | right
        if index < size:
            return index


def shuffled(draw: int, sequences: int, key: str) -> int:
    """Return the sequence of sample ``draw`` of a component, in the order that ``key`` selects."""
    epoch, position = divmod(draw, sequences)
    return permuted(position, sequences, f"{key}:{epoch}".encode())


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sample's tokens are."""

    component: int  # its number in the mixture, from 0
    draw: int  # how many earlier samples are from that component
    sequence: int  # its number in the component, counted over all files
    file: int  # its number in the component, from 0
    first_token: int  # where the row of S + 1 tokens begins in that file


@dataclass(frozen=True)
class TrainingOrder:
    """Maps sample index to place, for the training stream."""

    mixing: Mixing  # the order of components
    # Of each component: ``data.seed`` and its fingerprint, which select the order of its sequences.
    keys: tuple[str, ...]
    # Of each component: the number of the first sequence in each file, then that of all sequences.
    first_sequences: tuple[list[int], ...]
    sequence_length: int  # S, tokens
    in_order: tuple[bool, ...]  # of each component: whether its files are read one after another

    @classmethod
    def of(cls, mixture: Mixture, seed: int, sequence_length: int) -> Self:
        """Order the sequences of a mixture, of which each component has at least one."""
        weights = [component.weight for component in mixture.components]
        keys = [f"{seed}:{component.fingerprint}" for component in mixture.components]
        firsts = [component.first_sequences(sequence_length) for component in mixture.components]
        assert all(first[-1] >= 1 for first in firsts), firsts
        mixing = Mixing.of(weights, f"{seed}:{mixture.fingerprint}")
        in_order = tuple(component.in_order for component in mixture.components)
        return cls(mixing, tuple(keys), tuple(firsts), sequence_length, in_order)

    def sequences_of(self, component: int) -> int:
        """Return the number of sequences of a component: n in the module's docstring."""
        return self.first_sequences[component][-1]

    def place_of(self, sample: int) -> Place:
        """Return the place of a sample of the stream; ``sample`` is at least 0."""
        component, draw = self.mixing.draw(sample)
        sequence = self._sequence_of(component, draw)
        file, first, _ = self._file_of(component, sequence)
        return Place(component, draw, sequence, file, (sequence - first) * self.sequence_length)

    def file_of(self, sample: int) -> tuple[int, int]:
        """Return the component and the file of a sample. A stream needs no permutation for it."""
        component, draw = self.mixing.draw(sample)
        if not self.in_order[component]:
            draw = self._sequence_of(component, draw)
        return component, self._file_of(component, draw % self.sequences_of(component))[0]

    def _file_of(self, component: int, sequence: int) -> tuple[int, int, int]:
        """Return (number of the file with a sequence, its first sequence, its sequences)."""
        firsts = self.first_sequences[component]
        # The last file that begins at or before the sequence, because a file may have no sequence.
        file = bisect_right(firsts, sequence) - 1
        return file, firsts[file], firsts[file + 1] - firsts[file]

    def _sequence_of(self, component: int, draw: int) -> int:
        sequences, key = self.sequences_of(component), self.keys[component]
        if not self.in_order[component]:
            return shuffled(draw, sequences, key)
        epoch, position = divmod(draw, sequences)
        file, first, size = self._file_of(component, position)
        return first + permuted(position - first, size, f"{key}:{epoch}:{file}".encode())


class ValidationOrder(TrainingOrder):
    """Maps row index to place, for an evaluation. Sequences of a component are not shuffled.

    Components are mixed as in training, so the mean over rows has the same weights. A component
    whose sequences are used up is repeated, so a small one does not end the evaluation.
    """

    @property
    def sequences(self) -> int:
        """The number of sequences of all components. A complete evaluation reads each once."""
        return sum(first[-1] for first in self.first_sequences)

    def _sequence_of(self, component: int, draw: int) -> int:
        return draw % self.sequences_of(component)


class Rows:
    """Maps a file into memory when a row of it is read.

    A process may have a limited number of files open, often 1,024, so the least recently used
    files are closed.
    """

    def __init__(self, mixture: Mixture, sequence_length: int) -> None:
        self._files = [component.files for component in mixture.components]
        self._sequence_length = sequence_length
        self._mapped = lru_cache(_MAPPED_AT_ONCE)(methodcaller("map"))

    def at(self, place: Place) -> NDArray[np.integer]:
        """Return the S + 1 ids of the row at this place, in the dtype of the file."""
        ids = self._mapped(self._files[place.component][place.file])
        return ids[place.first_token : place.first_token + self._sequence_length + 1]

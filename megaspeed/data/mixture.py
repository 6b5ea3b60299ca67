"""The data of a training stream: token files in components with weights.

    mixture     component "books"  weight 3      file . file . file
                component "code"   weight 1      file

    sequences of a component    0 1 2 . 3 4 . 5 6 7 8      each within one file

Without weights, there is one component, which is read once an epoch. With weights, each component
supplies its share of the samples, and has its own epochs.

**The component of sample i.** Shares are exact, the order is shuffled, and no table is needed:

    weights 3 : 1, blocks of 1,024          samples  0 ... 1023 | 1024 ... 2047 | ...
                                            draws     768 : 256 |   768 : 256

A block is halved until one sample is left. A component with an even number of draws has half of
them in each half. Components with an odd number are paired. A bit that depends on the seed decides
which of the two has one more draw in the left half; the other has one more in the right half:

                    768 : 256
            384 : 128       384 : 128
               ...              3 : 1
                             2 : 0    1 : 1
                             A   A    B   A

So after any number of complete blocks, every component has its share to within one sample. Within a
block, the shares are about right. Counting the draws before sample i takes ten halvings. All
arithmetic is on integers, so the order is the same on every platform.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Self

from megaspeed.data.token_file import TokenFile
from megaspeed.files.json_values import hash_of

_MASK_64 = (1 << 64) - 1
_SMALLEST_BLOCK = 1024


def count_sequences(tokens: int, sequence_length: int) -> int:
    """Count the sequences of ``sequence_length`` inputs and targets in ``tokens`` tokens."""
    return max(0, (tokens - 1) // sequence_length)


@dataclass(frozen=True)
class Component:
    """Token files from which samples are drawn together."""

    files: tuple[TokenFile, ...]  # in order, at least one
    weight: float  # share of the samples, relative to the weights of the other components
    name: str  # its sources, as the configuration names them
    # Whether files are read one after another, and samples shuffled within each file.
    in_order: bool = False

    def __post_init__(self) -> None:
        assert self.files and self.weight > 0, self

    @property
    def fingerprint(self) -> str:
        """The fingerprint of a single file; sha256 over the fingerprints of several, in order."""
        fingerprints = [file.index.corpus_fingerprint for file in self.files]
        return fingerprints[0] if len(fingerprints) == 1 else hash_of(fingerprints)

    @property
    def tokens(self) -> int:
        """Number of tokens in all files."""
        return sum(file.index.tokens for file in self.files)

    def first_sequences(self, sequence_length: int) -> list[int]:
        """Number the first sequence in each file; then comes the number of all sequences."""
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
        """The files of all components."""
        return tuple(file for component in self.components for file in component.files)

    @property
    def tokens(self) -> int:
        """Number of tokens in all components."""
        return sum(component.tokens for component in self.components)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of a single component; sha256 over (weight, fingerprint) of several."""
        entries = [(component.weight, component.fingerprint) for component in self.components]
        return entries[0][1] if len(entries) == 1 else hash_of(entries)

    def sequences(self, sequence_length: int) -> int:
        """Sequences of all components, each counted once."""
        return sum(component.sequences(sequence_length) for component in self.components)


@dataclass(frozen=True, slots=True)
class Mixing:
    """The order of components."""

    weights: tuple[int, ...]  # an integer for each component
    # Number of samples of a block, a power of two. Every component has at least one sample in a
    # block.
    block: int
    key: str  # determines the order within blocks

    @classmethod
    def of(cls, weights: Sequence[float], key: str) -> Self:
        """Convert decimal weights to integers: 0.1 is exactly one tenth, not a double."""
        fractions = [Fraction(repr(weight)) for weight in weights]
        common = math.lcm(*(fraction.denominator for fraction in fractions))
        whole = tuple(int(fraction * common) for fraction in fractions)
        rarest = -(-sum(whole) // min(whole))  # the rarest component has one in so many samples
        return cls(whole, max(_SMALLEST_BLOCK, 1 << (rarest - 1).bit_length()), key)

    def draw(self, sample: int) -> tuple[int, int]:
        """Return (component k, number of earlier samples of k)."""
        if len(self.weights) == 1:
            return 0, sample
        block, position = divmod(sample, self.block)
        # The draws of each component before the stretch with the sample, and in this stretch.
        before = self.counts_in_blocks(block)
        here = [
            end - start for start, end in zip(before, self.counts_in_blocks(block + 1), strict=True)
        ]
        digest = hashlib.sha256(f"{self.key}:{block}".encode()).digest()
        bits_of_block = int.from_bytes(digest[:8], "little")
        stretch, start = self.block, 0
        while stretch > 1:
            stretch //= 2
            # start is a multiple of twice the stretch, so start + stretch identifies the halving.
            left = _left_half(here, mix_64(bits_of_block ^ (start + stretch)))
            if position < start + stretch:
                here = left
            else:
                start += stretch
                before = [count + passed for count, passed in zip(before, left, strict=True)]
                here = [count - passed for count, passed in zip(here, left, strict=True)]
        component = here.index(1)
        return component, before[component]

    def counts_in_blocks(self, blocks: int) -> list[int]:
        """Count the draws of each component in the first ``blocks`` blocks.

        Cumulative shares are rounded down, so the counts add up. They never decrease from one block
        to the next, because every component has at least one sample in a block.
        """
        total, samples = sum(self.weights), blocks * self.block
        bounds = [cumulative * samples // total for cumulative in accumulate(self.weights)]
        return [end - start for start, end in zip([0, *bounds], bounds, strict=False)]


def _left_half(draws: Sequence[int], bits: int) -> list[int]:
    """Return the draws in the left half of a stretch of a block."""
    left = [count // 2 for count in draws]
    odd = [component for component, count in enumerate(draws) if count % 2]
    for pair, (one, other) in enumerate(zip(odd[::2], odd[1::2], strict=True)):
        left[one if bits >> (pair % 64) & 1 else other] += 1
    return left


def mix_64(value: int) -> int:
    """Hash 64 bits to 64 bits: SplitMix64's finalizer (Steele, Lea, Flood, OOPSLA 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)

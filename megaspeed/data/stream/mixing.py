"""Which component sample i is drawn from: shares kept exactly, in a shuffled order, with no table.

    weights 3 : 1, blocks of 1,024          samples  0 ... 1023 | 1024 ... 2047 | ...
                                            draws     768 : 256 |   768 : 256

A block is halved until one sample is left. A component with an even number of draws in a stretch
has half of them in each half of it; of those with an odd number, two at a time, one has its odd
draw on the left and the other on the right, as a bit that depends on the seed decides:

                    768 : 256
            384 : 128       384 : 128
               ...              3 : 1
                             2 : 0    1 : 1
                             A   A    B   A

So after any number of whole blocks every component has its share to within one sample, every
stretch of a block has about its share, and how many draws of each component came before sample i
takes ten halvings to say, whatever i is. Only integer arithmetic: every platform gives the same.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from megaspeed.data.stream.permutation import mix_64

_SMALLEST_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Mixing:
    """The order of components.

    Attributes:
        weights: of each component, whole numbers.
        block: samples of one block, a power of two; every component has at least one of them.
        key: decides the order within blocks.
    """

    weights: tuple[int, ...]
    block: int
    key: str

    @classmethod
    def of(cls, weights: Sequence[float], key: str) -> Mixing:
        """For weights as a person writes them: 0.1 is one tenth, not the double nearest to it."""
        fractions = [Fraction(repr(weight)) for weight in weights]
        common = math.lcm(*(fraction.denominator for fraction in fractions))
        whole = tuple(int(fraction * common) for fraction in fractions)
        rarest = -(-sum(whole) // min(whole))  # samples among which it is drawn once
        return cls(whole, max(_SMALLEST_BLOCK, 1 << (rarest - 1).bit_length()), key)

    def draw(self, sample: int) -> tuple[int, int]:
        """(component k, how many of the samples before this one are of k)."""
        if len(self.weights) == 1:
            return 0, sample
        before, here = self._descend(sample)
        component = here.index(1)
        return component, before[component]

    def counts_in_blocks(self, blocks: int) -> list[int]:
        """Draws of each component in the first `blocks` blocks: its share, rounded.

        Cumulative shares are rounded down, so the counts add up. They never fall from one block to
        the next, because every component has a share of at least one sample in a block.
        """
        total, samples = sum(self.weights), blocks * self.block
        bounds = [cumulative * samples // total for cumulative in accumulate(self.weights)]
        return [end - start for start, end in zip([0, *bounds], bounds, strict=False)]

    def _descend(self, sample: int) -> tuple[list[int], list[int]]:
        """(draws of each component before the sample, draws in it: one 1, else 0)."""
        block, position = divmod(sample, self.block)
        before = self.counts_in_blocks(block)
        here = [
            end - start for start, end in zip(before, self.counts_in_blocks(block + 1), strict=True)
        ]
        digest = hashlib.sha256(f"{self.key}:{block}".encode()).digest()
        bits_of_block = int.from_bytes(digest[:8], "little")
        stretch, start = self.block, 0
        while stretch > 1:
            stretch //= 2
            # (start, stretch) names the halving: start is a multiple of twice the stretch.
            left = _left_half(here, mix_64(bits_of_block ^ (start + stretch)))
            if position < start + stretch:
                here = left
            else:
                start += stretch
                before = [count + passed for count, passed in zip(before, left, strict=True)]
                here = [count - passed for count, passed in zip(here, left, strict=True)]
        return before, here


def _left_half(draws: Sequence[int], bits: int) -> list[int]:
    """What of a stretch's draws is in its left half; the draws are even in number."""
    left = [count // 2 for count in draws]
    odd = [component for component, count in enumerate(draws) if count % 2]
    for pair, (one, other) in enumerate(zip(odd[::2], odd[1::2], strict=True)):
        left[one if bits >> (pair % 64) & 1 else other] += 1
    return left

"""Dropout whose masks depend neither on the layout of ranks nor on the device.

An ordinary dropout mask depends on the state of a random generator: on the number of ranks, the
micro-batch size, recomputation and, on a GPU, on the number of its multiprocessors. Here a mask is
a counter-based hash (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). A sample
(..., C) has R rows of C elements. Row r of sample s has the number n = s R + r:

    key  = 64 bits of sha256(seed, name)                   once, on the host
    word = output n of a SplitMix64 generator seeded key   64 bits for each row
    hash = lowbias32 of (word, column)                     32 bits for each element
    an element is dropped if hash, as a signed integer, < p 2^32 - 2^31

So every layout and every device drops the same elements. A rank computes only the mask of its own
rows. The backward pass computes the mask again, so neither a mask nor a random state is stored.

All operations are tensor operations on integers, so ``torch.compile`` makes one kernel of them.
Words have 64 bits, because there can be more than 2^32 rows. Hashes have 32 bits, because CPUs
multiply vectors of 32-bit integers several times faster than those of 64 bits.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megaspeed.model.documents import places_in
from megaspeed.model.sequence_part import WHOLE, SequencePart

# Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", figure 16: the
# increment, then the two multipliers; as signed integers, which torch's int64 holds.
_SPLITMIX64 = (0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)

# The multipliers of Wellons' lowbias32 (github.com/skeeto/hash-prospector), as signed integers.
_LOWBIAS32 = (0x7FEB352D, 0x846CA68B - 2**32)


@dataclass(frozen=True, kw_only=True)
class MaskShard:
    """The part of the full mask that a rank applies.

    A rank first has the tokens of ``part``: rows of the attention probabilities (H, S, S) of each
    sample, or of the hidden states (B, S, D). Of these, it has part ``index`` of ``count`` equal
    parts. Attention probabilities are split by heads; with ``across_samples``, the tokens of all
    samples are split as one sequence.
    """

    index: int = 0
    count: int = 1
    across_samples: bool = False
    part: SequencePart = WHOLE


class SampleDropout(nn.Module):
    """Inverted dropout with one mask for each sample (see the module's docstring).

    Args:
        probability: of dropping an element, in [0, 1); rounded to a multiple of 2^-32.
        name: the dropout's full name in the model, part of the mask's seed.
        seed: the run's seed, part of the mask's seed.
    """

    key: Tensor | None
    """int64 scalar; None if nothing is ever dropped."""

    def __init__(self, probability: float, *, name: str, seed: int) -> None:
        super().__init__()
        self.probability = probability
        self.name = name
        self.shard = MaskShard()
        # A tensor, not an integer, because all blocks share one compiled block.
        key = random_key(f"dropout/{seed}/{name}") if probability > 0.0 else None
        self.register_buffer("key", key, persistent=False)

    @property
    def active(self) -> bool:
        """Whether a forward pass would drop elements now."""
        return self.training and self.probability > 0.0

    def forward(self, x: Tensor, samples: Tensor | None) -> Tensor:
        """Drop elements of ``x`` (B, ..., C), and divide the others by 1 - probability.

        Args:
            x: row b is this rank's part of sample ``samples[b]``; or all of ``x`` is this rank's
                part of all samples, if the mask is split across samples.
            samples: (B,) int64, on the device of ``x``; None if the dropout is not active.
        """
        if not self.active:
            return x
        assert samples is not None, f"{self.name} drops elements and needs the sample indices"
        dropped: Tensor = _Drop.apply(x, self.key, samples, self.shard, self.probability)
        return dropped


def random_key(name: str) -> Tensor:
    """Return the key of the random numbers that have this name, an int64 scalar."""
    digest = hashlib.sha256(name.encode()).digest()
    number = int.from_bytes(digest[:8], "little", signed=True)
    # On the CPU even while a model is being built on the meta device.
    return torch.tensor(number, dtype=torch.int64, device="cpu")


class _Drop(torch.autograd.Function):
    """Multiplies by the scaled mask. This is a diagonal map, so backward is the same map."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, key: Tensor, samples: Tensor, shard: MaskShard, probability: float
    ) -> Tensor:
        # Attributes, not save_for_backward: they are inputs without a gradient, and a recomputed
        # forward ends at the last tensor that was saved, so it can stop before the dropout.
        ctx.mask = (key, samples, shard, probability)
        # A view, because torch 2.11 compiles a result that was written in place as a constant: its
        # gradient would be zero.
        return _drop(x, *ctx.mask).view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _drop(gradient, *ctx.mask), None, None, None, None


def _drop(x: Tensor, key: Tensor, samples: Tensor, shard: MaskShard, probability: float) -> Tensor:
    sequence = x.shape[-2] * shard.part.size * (shard.count if shard.across_samples else 1)
    heads = math.prod(x.shape[1:-2])  # 1 for hidden states
    rows = places_in(shard.part.ranges(sequence), x.device)
    if shard.across_samples:
        words = row_words(key, samples, rows, full_rows=sequence)
        words = words.view(-1).chunk(shard.count)[shard.index]
    else:
        first = shard.index * heads
        head = torch.arange(first, first + heads, device=x.device)
        rows = (head.unsqueeze(1) * sequence + rows).view(-1)
        words = row_words(key, samples, rows, full_rows=shard.count * heads * sequence)
    threshold = min(round(probability * 2**32), 2**32 - 1)
    kept = element_hashes(words, x.shape[-1]).ge_(threshold - 2**31)  # 1 or 0, in place
    return kept.view(x.shape).to(x.dtype).mul_(x).mul_(1.0 / (1.0 - probability))


def row_words(key: Tensor, samples: Tensor, rows: Tensor, *, full_rows: int) -> Tensor:
    """A random word for each row of each sample: (B, len(rows)) int64.

    Args:
        key: int64 scalar.
        samples: (B,) int64.
        rows: the numbers of the rows, int64.
        full_rows: number of rows of a complete sample.
    """
    increment, first, second = _SPLITMIX64
    word = key + (samples.unsqueeze(-1) * full_rows + rows) * increment
    word = (word ^ _shifted(word, 30, 64)) * first
    word = (word ^ _shifted(word, 27, 64)) * second
    return word ^ _shifted(word, 31, 64)


def element_hashes(words: Tensor, columns: int) -> Tensor:
    """A hash (..., columns) int32 for each element; ``words`` (...) are those of the rows.

    This is lowbias32 with the upper half of the word as a second key. It omits the first xor-shift,
    because it would only map the random word to another one, and the last xor-shift, because it
    changes only the lower 16 bits.
    """
    lower = (((words << 32) >> 32).to(torch.int32)).unsqueeze(-1)  # in range, so the cast is exact
    upper = (words >> 32).to(torch.int32).unsqueeze(-1)
    column = torch.arange(columns, dtype=torch.int32, device=words.device)
    hashes = lower ^ column
    # In place: in eager mode on a CPU, memory for intermediate results costs more than arithmetic.
    hashes.mul_(_LOWBIAS32[0])
    hashes.bitwise_xor_(_shifted(hashes, 15, 32))
    return hashes.bitwise_xor_(upper).mul_(_LOWBIAS32[1])


def _shifted(x: Tensor, shift: int, bits: int) -> Tensor:
    """``x`` shifted right, filled with zeros. (torch's ``>>`` fills with the sign bit.)"""
    return (x >> shift).bitwise_and_((1 << (bits - shift)) - 1)

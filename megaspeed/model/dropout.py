"""Dropout whose masks do not depend on the layout of ranks.

An ordinary dropout mask depends on the state of a random generator, hence on the number of ranks,
on the micro-batch size and on whether the forward pass is run again for activation checkpointing.
Here the mask of one sample is a function of (seed, name of the dropout, sample index) and, because
CPUs and GPUs have different generators, of the kind of device:

    mask(sample) = Bernoulli(1 - p) drawn by a generator seeded with sha256(seed, name, sample)

So every layout drops the same elements, a recomputed forward drops them again, and no random state
has to be saved or switched between tensor ranks. Where an activation is replicated over the tensor
axis every rank draws the same mask; where it is split (heads, or the sequence under sequence
parallelism) each rank keeps its own part of the same full mask.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class MaskShard:
    """The part of the full mask that a rank keeps: chunk ``index`` of ``count`` along ``dim``.

    ``dim`` counts within one sample: for a hidden state (S, D) dim 0 is the sequence, for attention
    probabilities (H, S, S) dim 0 is the heads.
    """

    dim: int = 0
    index: int = 0
    count: int = 1


class SampleDropout(nn.Module):
    """Inverted dropout with one mask for each sample (see the module's docstring).

    Args:
        probability: of dropping an element, in [0, 1).
        name: the dropout's full name in the model, part of the mask's seed.
        seed: the run's seed, part of the mask's seed.
    """

    def __init__(self, probability: float, *, name: str, seed: int) -> None:
        super().__init__()
        self.probability = probability
        self.name = name
        self.seed = seed
        self.shard = MaskShard()

    @property
    def active(self) -> bool:
        """Whether a forward pass now would drop anything."""
        return self.training and self.probability > 0.0

    def forward(self, x: Tensor, samples: Sequence[int]) -> Tensor:
        """Drops elements of ``x`` (B, ...), whose row b is a part of sample ``samples[b]``."""
        if not self.active:
            return x
        full_shape = list(x.shape[1:])
        full_shape[self.shard.dim] *= self.shard.count
        masks = [self._mask(sample, full_shape, x.device) for sample in samples]
        return x * torch.stack(masks).to(x.dtype) / (1.0 - self.probability)

    def _mask(self, sample: int, full_shape: Sequence[int], device: torch.device) -> Tensor:
        key = hashlib.sha256(f"dropout/{self.seed}/{self.name}/{sample}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(key[:8], "little") >> 1)
        mask = torch.empty(*full_shape, device=device)
        mask.bernoulli_(1.0 - self.probability, generator=generator)
        return mask.chunk(self.shard.count, dim=self.shard.dim)[self.shard.index]

"""What a tensor-parallel layer knows of its surroundings."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch.distributed as dist

from megaspeed.topology.timeline import Timeline


@dataclass(frozen=True)
class TensorAxis:
    """The tensor axis as one rank sees it: its group and its place there.

    ``sequence_parallel`` says how activations travel between blocks: split along the sequence, or
    else whole on every rank.

    With ``size`` 1 no collective is ever called, and ``group`` may be None. ``timeline`` is told
    how long collectives take.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    sequence_parallel: bool = False
    timeline: Timeline | None = None

    def timed(self) -> AbstractContextManager[None]:
        """To be entered around each collective over this axis."""
        return nullcontext() if self.timeline is None else self.timeline.part("tensor")

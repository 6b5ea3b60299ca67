"""What a tensor-parallel layer knows of its surroundings."""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class TensorAxis:
    """The tensor axis as one rank sees it: its group and its place there.

    ``sequence_parallel`` says how activations travel between blocks: split along the sequence, or
    else whole on every rank.

    With ``size`` 1 no collective is ever called, and ``group`` may be None.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    sequence_parallel: bool = False

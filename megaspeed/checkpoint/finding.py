"""The newest checkpoint that is whole, by its checksums, which all ranks share the work of."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megaspeed.checkpoint.soundness import inspect_share
from megaspeed.checkpoint.together import from_rank_0, gathered


@dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes:
        checkpoint: the newest whole one; None where none is.
        passed_over: newer ones, each with what is wrong with it.
    """

    checkpoint: Path | None
    passed_over: tuple[tuple[Path, str], ...]


def newest_whole(candidates: Sequence[Path], group: dist.ProcessGroup) -> Found:
    """Looks through ``candidates``, newest first; rank 0's list counts. Collective over ``group``.

    Every file of a candidate is read by one rank, its index and its run state by all.
    """
    passed_over: list[tuple[Path, str]] = []
    for checkpoint in from_rank_0(group, lambda: list(candidates)):
        own = _problems_of_share(checkpoint, group.rank(), group.size())
        problem = next((told for told in gathered(group, own) if told is not None), None)
        if problem is None:
            return Found(checkpoint, tuple(passed_over))
        passed_over.append((checkpoint, problem))
    return Found(None, tuple(passed_over))


def _problems_of_share(checkpoint: Path, rank: int, ranks: int) -> str | None:
    """What is wrong with this rank's share of the files, and with the index."""
    return "; ".join(inspect_share(checkpoint, rank, ranks).problems) or None

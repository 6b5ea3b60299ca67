"""What all ranks of a group find out or do together, so that an error of one is told by all.

A rank that raised alone would leave the others waiting in their next collective.
"""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megaspeed.checkpoint.errors import CheckpointError

Result = TypeVar("Result")


def from_rank_0(group: dist.ProcessGroup, make: Callable[[], Result]) -> Result:
    """What ``make`` returns on rank 0 of the group, on every rank.

    Raises:
        CheckpointError: on every rank, where ``make`` raised.
    """
    answer: list[tuple[Result | None, str | None]] = [(None, None)]
    failure: Exception | None = None
    if group.rank() == 0:
        try:
            answer[0] = (make(), None)
        except Exception as error:
            failure = error
            answer[0] = (None, told(error))
    dist.broadcast_object_list(answer, group_src=0, group=group)
    result, problem = answer[0]
    if problem is not None:
        raise CheckpointError(problem) from failure
    return result  # type: ignore[return-value]  # None where make returns None


def gathered(group: dist.ProcessGroup, own: Result) -> list[Result]:
    """Every rank's value, in the order of ranks, on every rank."""
    everyones: list[Result] = [own] * group.size()
    dist.all_gather_object(everyones, own, group=group)
    return everyones


def first_failure(error: CheckpointException) -> str:
    """What went wrong on the lowest rank that failed."""
    rank, (failure, _) = min(error.failures.items(), key=lambda item: item[0])
    return f"rank {rank}: {told(failure)}"


def told(error: BaseException) -> str:
    """An error as a sentence; the operating system's with the file that it is about."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) or type(error).__name__

"""What all ranks of a group find out or do together, so that an error of one is told by all.

A rank that raised alone would leave the others waiting in their next collective.
"""

import errno
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megaspeed.checkpoint.errors import CheckpointError, StorageFailed

Result = TypeVar("Result")

_ERRORS_THAT_PASS = (
    *(errno.EIO, errno.ENOSPC, errno.EDQUOT),
    *(errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENETDOWN, errno.EHOSTDOWN),
)
"""Of disks and of network file systems."""


def from_rank_0(group: dist.ProcessGroup, make: Callable[[], Result]) -> Result:
    """What ``make`` returns on rank 0 of the group, on every rank.

    Raises:
        StorageFailed: on every rank, if the disk or the network of rank 0 failed.
        CheckpointError: on every rank, where ``make`` raised.
    """
    answer: list[tuple[Result | None, str | None, type[CheckpointError]]]
    answer = [(None, None, CheckpointError)]
    failure: Exception | None = None
    if group.rank() == 0:
        try:
            answer[0] = (make(), None, CheckpointError)
        except Exception as error:
            failure = error
            answer[0] = (None, told(error), StorageFailed if _may_pass(error) else CheckpointError)
    dist.broadcast_object_list(answer, group_src=0, group=group)
    result, problem, kind = answer[0]
    if problem is not None:
        raise kind(problem) from failure
    return result  # type: ignore[return-value]  # None where make returns None


def _may_pass(error: Exception) -> bool:
    """Whether the same call may succeed later."""
    if isinstance(error, OSError):
        return error.errno in _ERRORS_THAT_PASS
    return isinstance(error, StorageFailed | dist.DistError)


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

"""Errors of checkpoints, and collectives that raise the error of one rank on all ranks.

If only one rank raised, the others would wait for it in their next collective.
"""

import errno
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch.distributed as dist

Result = TypeVar("Result")

_TRANSIENT = (
    *(errno.EIO, errno.ENOSPC, errno.EDQUOT),
    *(errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENETDOWN, errno.EHOSTDOWN),
)
"""Errors of disks and of network file systems."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, found, read or loaded."""


class StorageFailed(CheckpointError):
    """The disk or the network failed, and not the input: another attempt may succeed."""


class _Answer(NamedTuple, Generic[Result]):
    """The result of a function on one rank, or its error as a sentence and a type to raise."""

    result: Result | None = None
    problem: str | None = None
    kind: type[CheckpointError] = CheckpointError


def broadcast(group: dist.ProcessGroup, make: Callable[[], Result]) -> Result:
    """Calls ``make`` on rank 0 and returns its result on every rank.

    Raises:
        StorageFailed: on every rank, if the disk or the network of rank 0 failed.
        CheckpointError: on every rank, if ``make`` raised another error.
    """
    _check_groups()
    answer, failure = _call(make) if group.rank() == 0 else (_Answer[Result](), None)
    answers = [answer]
    dist.broadcast_object_list(answers, group_src=0, group=group)
    return _result(answers[0], failure)


def gather(group: dist.ProcessGroup, make: Callable[[], Result]) -> list[Result]:
    """Calls ``make`` on every rank and returns all results on rank 0, and [] on other ranks.

    Raises StorageFailed or CheckpointError on every rank if ``make`` raised on some ranks: the
    error of the lowest such rank.
    """
    _check_groups()
    own, failure = _call(make)
    answers = [own] * group.size() if group.rank() == 0 else None
    dist.gather_object(own, answers, group_dst=0, group=group)
    failed = [_Answer[None]()]
    for rank, (_, problem, kind) in enumerate(answers or []):
        if problem is not None:
            failed = [_Answer(None, f"rank {rank}: {problem}", kind)]
            break
    dist.broadcast_object_list(failed, group_src=0, group=group)
    _result(failed[0], failure)
    return [answer.result for answer in answers or []]  # type: ignore[misc]


def describe(error: BaseException) -> str:
    """An error as a sentence; for an error of the operating system, with its file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def _check_groups() -> None:
    """Raises CheckpointError if an exception has closed the process groups during a save."""
    if not dist.is_initialized():
        raise CheckpointError("the process groups have ended")


def _call(make: Callable[[], Result]) -> tuple[_Answer[Result], BaseException | None]:
    try:
        return _Answer(make()), None
    except BaseException as error:
        kind = StorageFailed if _is_transient(error) else CheckpointError
        return _Answer(None, describe(error), kind), error


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _TRANSIENT
    return isinstance(error, StorageFailed | dist.DistError)


def _result(answer: _Answer[Result], failure: BaseException | None) -> Result:
    """The result of the answer, or its error. ``failure`` is what this rank itself caught."""
    if failure is not None and not isinstance(failure, Exception):
        raise failure  # Ctrl-C
    if answer.problem is not None:
        raise answer.kind(answer.problem) from failure
    return answer.result  # type: ignore[return-value]  # None if the function returned None

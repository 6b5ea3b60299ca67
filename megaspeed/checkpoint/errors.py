"""Errors of checkpoints, and collectives that raise the error of one rank on all ranks.

If only one rank raised, the others would wait for it in their next collective.
"""

import errno
from collections.abc import Callable
from typing import Any, TypeVar

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
    """The disk or the network failed, not the input. Another attempt may succeed."""


def broadcast(group: dist.ProcessGroup, make: Callable[[], Result]) -> Result:
    """Calls ``make`` on rank 0 and returns its result on every rank.

    Raises:
        StorageFailed: on every rank, if the disk or the network of rank 0 failed.
        CheckpointError: on every rank, if ``make`` raised another error.
    """
    _check_groups()
    result, error, cause = _call(make) if group.rank() == 0 else (None, None, None)
    answers: list[Any] = [result, error]
    dist.broadcast_object_list(answers, group_src=0, group=group)
    result, error = answers
    _raise(error, cause)
    return result  # None only if the function returned None


def gather(group: dist.ProcessGroup, make: Callable[[], Result]) -> list[Result]:
    """Calls ``make`` on every rank. Returns all results on rank 0, and [] on other ranks.

    If ``make`` raised on some ranks, raises the error of the lowest of them on every rank, as
    StorageFailed or CheckpointError.
    """
    _check_groups()
    result, error, cause = _call(make)
    answers: list[Any] = [None] * group.size()
    receiving = answers if group.rank() == 0 else None
    dist.gather_object((result, error), receiving, group=group, group_dst=0)
    failed: list[CheckpointError | None] = [None]
    if group.rank() == 0:
        errors = ((rank, error) for rank, (_, error) in enumerate(answers) if error is not None)
        failed = [next((type(error)(f"rank {rank}: {error}") for rank, error in errors), None)]
    dist.broadcast_object_list(failed, group_src=0, group=group)
    _raise(failed[0], cause)
    return [result for result, _ in answers] if group.rank() == 0 else []


def describe(error: BaseException) -> str:
    """An error as a sentence; for an error of the operating system, with its file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def _check_groups() -> None:
    """Raises CheckpointError if an exception has closed the process groups during a save."""
    if not dist.is_initialized():
        raise CheckpointError("the process groups have ended")


def _call(
    make: Callable[[], Result],
) -> tuple[Result | None, CheckpointError | None, BaseException | None]:
    """The result of the function, or the error for all ranks and its cause on this rank."""
    try:
        return make(), None, None
    except BaseException as cause:
        kind = StorageFailed if _is_transient(cause) else CheckpointError
        return None, kind(describe(cause)), cause


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _TRANSIENT
    return isinstance(error, StorageFailed | dist.DistError)


def _raise(error: CheckpointError | None, cause: BaseException | None) -> None:
    if cause is not None and not isinstance(cause, Exception):
        raise cause  # Ctrl-C
    if error is not None:
        raise error from cause

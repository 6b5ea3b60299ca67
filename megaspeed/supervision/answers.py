"""Collectives that give all ranks one answer, or raise one rank's error on all of them.

    rank 0    make() -> answer    all ranks return it        make() raises    all ranks raise it
    rank 1             waits                                          waits

If only one rank raised, the others would wait for it in their next collective.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

Answer = TypeVar("Answer")


class RankFailed(RuntimeError):
    """What one rank did for all of them has failed. All ranks raise this together."""

    @classmethod
    def of(cls, error: BaseException) -> "RankFailed":
        """Return the error that all ranks raise because of the error of one rank."""
        return cls(describe(error))


def broadcast(
    group: dist.ProcessGroup,
    make: Callable[[], Answer],
    kind: type[RankFailed] = RankFailed,
) -> Answer:
    """Call ``make`` on rank 0 and return its answer on every rank.

    Raises RankFailed on every rank, if ``make`` raised an error; ``kind`` decides about the type.
    """
    _check_groups(kind)
    answer, error, cause = _call(make, kind) if group.rank() == 0 else (None, None, None)
    answers: list[Any] = [answer, error]
    dist.broadcast_object_list(answers, group_src=0, group=group)
    answer, error = answers
    _raise(error, cause)
    return answer  # None only if the function returned None


def gather(
    group: dist.ProcessGroup,
    make: Callable[[], Answer],
    kind: type[RankFailed] = RankFailed,
) -> list[Answer]:
    """Call ``make`` on every rank. Return all answers on rank 0, and [] on other ranks.

    Raises, on every rank, the error of the lowest rank on which ``make`` raised one.
    """
    _check_groups(kind)
    answer, error, cause = _call(make, kind)
    answers: list[Any] = [None] * group.size()
    receiving = answers if group.rank() == 0 else None
    dist.gather_object((answer, error), receiving, group=group, group_dst=0)
    failed: list[RankFailed | None] = [None]
    if group.rank() == 0:
        errors = ((rank, error) for rank, (_, error) in enumerate(answers) if error is not None)
        failed = [next((type(error)(f"rank {rank}: {error}") for rank, error in errors), None)]
    dist.broadcast_object_list(failed, group_src=0, group=group)
    _raise(failed[0], cause)
    return [answer for answer, _ in answers] if group.rank() == 0 else []


def describe(error: BaseException) -> str:
    """Return an error as a sentence; an error of the operating system with its file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def _check_groups(kind: type[RankFailed]) -> None:
    """Raise an error if an exception has closed the process groups, for example during a save."""
    if not dist.is_initialized():
        raise kind("the process groups have ended")


def _call(
    make: Callable[[], Answer], kind: type[RankFailed]
) -> tuple[Answer | None, RankFailed | None, BaseException | None]:
    """Return the answer, or the error for all ranks and its cause on this rank."""
    try:
        return make(), None, None
    except BaseException as cause:  # also Ctrl-C, because other ranks wait for this answer
        return None, kind.of(cause), cause


def _raise(error: RankFailed | None, cause: BaseException | None) -> None:
    if cause is not None and not isinstance(cause, Exception):
        raise cause  # Ctrl-C
    if error is not None:
        raise error from cause

"""All ranks get rank 0's answer, or its error with the type that decides whether they restart."""

import errno
import os

import pytest

from megaspeed.checkpoint.errors import CheckpointError, StorageFailed
from megaspeed.job.pretrain import _exit_code
from megaspeed.supervision.answers import RankFailed, broadcast, gather
from megaspeed.supervision.process_end import EXIT_FAILED, EXIT_WRONG_INPUT
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from tests.support.machine import limit
from tests.support.rank_pool import RankPool

Got = tuple[type[Exception], str]


def read_with(
    launch: LaunchEnvironment, errors: list[Exception | None], kind: type[RankFailed]
) -> list[Got]:
    """Return what this rank gets from ``broadcast`` and from ``gather``: an answer, or an error."""

    def read() -> str:
        if (error := errors[launch.rank]) is not None:
            raise error
        return "well"

    got: list[Got] = []
    grid = Grid(pp=1, dp=2, tp=1)
    with ParallelContext.create(grid, launch, timeout_seconds=limit(30)) as context:
        for collective in (broadcast, gather):
            try:
                got.append((Exception, str(collective(context.checkpoint_group, read, kind))))
            except RankFailed as caught:
                got.append((type(caught), str(caught)))
    return got


def system_error(number: int) -> OSError:
    return OSError(number, os.strerror(number), "/shared/run")


@pytest.mark.parametrize(
    ("error", "asked", "kind", "code"),
    [
        (system_error(errno.ESTALE), CheckpointError, StorageFailed, EXIT_FAILED),
        (system_error(errno.ENOSPC), CheckpointError, StorageFailed, EXIT_FAILED),
        (system_error(errno.ENOENT), CheckpointError, CheckpointError, EXIT_WRONG_INPUT),
        (CheckpointError("it is cut short"), CheckpointError, CheckpointError, EXIT_WRONG_INPUT),
        (RuntimeError("the store is gone"), RankFailed, RankFailed, EXIT_FAILED),
        (system_error(errno.ENOENT), RankFailed, RankFailed, EXIT_FAILED),
    ],
)
def test_the_type_decides_whether_a_restart_may_help(
    pool: RankPool, error: Exception, asked: type[RankFailed], kind: type[Exception], code: int
) -> None:
    """A failed disk is no wrong input. Neither is a failed decision about a restart."""
    message = f"{error.strerror}: /shared/run" if isinstance(error, OSError) else str(error)
    expected = [(kind, message), (kind, f"rank 0: {message}")]
    assert pool.run(2, read_with, [error, None], asked) == [expected] * 2
    assert _exit_code(kind(message)) == code


def test_the_lowest_rank_that_failed_is_named(pool: RankPool) -> None:
    for _, gathered in pool.run(2, read_with, [None, ValueError("no")], RankFailed):
        assert gathered == (RankFailed, "rank 1: no")


def test_without_an_error_rank_0_gets_all_answers(pool: RankPool) -> None:
    first, second = pool.run(2, read_with, [None, None], RankFailed)
    assert first == [(Exception, "well"), (Exception, "['well', 'well']")]
    assert second == [(Exception, "well"), (Exception, "[]")]

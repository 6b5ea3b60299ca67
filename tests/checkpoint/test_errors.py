"""All ranks get rank 0's answer, or its error with the type that decides about a restart."""

import errno
import os

import pytest

from megaspeed.checkpoint.errors import CheckpointError, StorageFailed, broadcast
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from tests.support.rank_pool import RankPool


def read_with(launch: LaunchEnvironment, error: Exception | None) -> tuple[type[Exception], str]:
    """The answer that this rank of two gets, or the type and text of the error."""

    def read() -> str:
        if error is not None:
            raise error
        return "well"

    with ParallelContext.create(Grid(pp=1, dp=2, tp=1), launch, timeout_seconds=30) as context:
        try:
            return Exception, broadcast(context.checkpoint_group, read)
        except CheckpointError as caught:
            return type(caught), str(caught)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/shared/run"), StorageFailed),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/shared/run"), StorageFailed),
        (FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/run"), CheckpointError),
        (CheckpointError("run_state.json is cut short"), CheckpointError),
    ],
)
def test_a_disk_that_fails_is_no_wrong_input(
    pool: RankPool, error: Exception, kind: type[Exception]
) -> None:
    """Wrong input ends a job for good, and a failure of rank 0's network disk did, too."""
    message = error.strerror if isinstance(error, OSError) else str(error)
    assert message
    for own_kind, text in pool.run(2, read_with, error):
        assert own_kind is kind and text.startswith(message)


def test_without_an_error_all_ranks_get_the_answer(pool: RankPool) -> None:
    assert pool.run(2, read_with, None) == [(Exception, "well")] * 2

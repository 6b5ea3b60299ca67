"""Two runs in one folder: the second is told, and leaves it alone."""

import os
import socket
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.run_folder import LOCK, run_lock
from tests.rank_pool import RankFailure, RankPool


def use(launch: LaunchEnvironment, run_dir: Path, wait_seconds: float = 0.0) -> str | None:
    """What this rank of two is told."""
    with ParallelContext.create(Grid(pp=1, dp=2, tp=1), launch, timeout_seconds=30) as context:
        try:
            with run_lock(run_dir, context, wait_seconds=wait_seconds):
                return None
        except CheckpointError as error:
            return str(error)


def use_beside_itself(launch: LaunchEnvironment, run_dir: Path) -> tuple[str, str, str | None]:
    """What the file says in the meantime, what it should, and what a second run is told."""
    with (
        ParallelContext.create(Grid(pp=1, dp=1, tp=1), launch, timeout_seconds=30) as context,
        run_lock(run_dir, context),
    ):
        written = (run_dir / LOCK).read_text()
        try:
            with run_lock(run_dir, context):
                told = None
        except CheckpointError as error:
            told = str(error)
    return written, f"{socket.gethostname()} {os.getpid()}\n", told


def test_the_lock_names_the_process_to_signal(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("a host with a long name 4194304\n")
    ((written, expected, told),) = pool.run(1, use_beside_itself, tmp_path)
    host, process = expected.split()
    assert written == expected
    assert told is not None
    assert told.startswith(f"another run (its rank 0 is process {process} on {host}) is writing to")


def test_one_run_at_a_time(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, use, tmp_path) == [None, None]
    with FileLock(tmp_path / LOCK):
        told = pool.run(2, use, tmp_path)
    assert (
        told
        == [
            f"another run is writing to {tmp_path}; wait until it has ended, or set another "
            "training.run_dir"
        ]
        * 2
    )
    assert pool.run(2, use, tmp_path) == [None, None]


def test_a_restart_waits_for_the_lock_of_a_dead_host(pool: RankPool, tmp_path: Path) -> None:
    """A network file system releases it a minute later. The restart was refused as wrong input."""
    lock = FileLock(tmp_path / LOCK, thread_local=False)
    lock.acquire()
    later = threading.Timer(2.0, lock.release)
    later.start()
    assert pool.run(2, use, tmp_path, 30.0) == [None, None]
    later.join()


def die_with_it(launch: LaunchEnvironment, run_dir: Path) -> None:
    grid = Grid(pp=1, dp=1, tp=1)
    context = ParallelContext.create(grid, launch, timeout_seconds=30)
    with run_lock(run_dir, context):
        os._exit(9)


def test_the_lock_of_a_run_that_died_is_free(pool: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="exit code 9"):
        pool.run(1, die_with_it, tmp_path)
    assert pool.run(2, use, tmp_path) == [None, None]

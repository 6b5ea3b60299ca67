"""A lock, so only one run writes to a run folder. A second run would delete the first one's saves.

Rank 0 holds the lock. The kernel releases it even if the process is killed. The file contains the
process as "host pid", so one run can be signalled: `kill -USR1 $(cut -d' ' -f2 .lock)`.
"""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.together import from_rank_0
from megaspeed.topology.context import ParallelContext

LOCK = ".lock"
_PERIOD_SECONDS = 1.0


@contextmanager
def sole_use(
    run_dir: Path, context: ParallelContext, *, wait_seconds: float = 0.0
) -> Iterator[None]:
    """Holds the lock of an existing run folder; entered by all ranks together.

    Args:
        run_dir: the folder of the run.
        context: the ranks.
        wait_seconds: how long to wait for a run that holds the lock.

    Raises:
        CheckpointError: on every rank, if another run holds the lock, or it cannot be created.
    """
    held: list[int] = []
    from_rank_0(context.checkpoint_group, lambda: held.append(_take(run_dir, wait_seconds)))
    try:
        yield
    finally:
        for descriptor in held:
            os.ftruncate(descriptor, 0)  # its number may be reused by another process
            os.close(descriptor)


def _take(run_dir: Path, wait_seconds: float) -> int:
    """The open file that the lock is on."""
    descriptor = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    deadline = time.monotonic() + wait_seconds
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_PERIOD_SECONDS)
    except BlockingIOError as error:
        holder = _holder(descriptor)
        os.close(descriptor)
        raise CheckpointError(
            f"another run{holder} is writing to {run_dir}; wait until it has ended, or set another "
            "training.run_dir"
        ) from error
    except OSError:
        # Some network file systems do not support locks. Then the run continues without one.
        pass
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{socket.gethostname()} {os.getpid()}\n".encode(), 0)
    return descriptor


def _holder(descriptor: int) -> str:
    """The process that holds the lock, if the file names it."""
    host, _, process = os.pread(descriptor, 300, 0).decode(errors="replace").strip().partition(" ")
    return f" (process {process} of rank 0 on {host})" if process.isdigit() else ""

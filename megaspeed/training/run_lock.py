"""One run at a time writes to a run folder: a second would clear away the first one's saves.

The lock is held by rank 0; the kernel frees it however the process ends. The file names that
process, as "host pid", so that one run can be signalled: `kill -USR1 $(cut -d' ' -f2 .lock)`.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.together import from_rank_0
from megaspeed.topology.context import ParallelContext

LOCK = ".lock"


@contextmanager
def sole_use(run_dir: Path, context: ParallelContext) -> Iterator[None]:
    """Holds the lock of an existing run folder; entered by all ranks together.

    Raises:
        CheckpointError: on every rank, where another run holds it, or it cannot be made.
    """
    held: list[int] = []
    from_rank_0(context.checkpoint_group, lambda: held.append(_take(run_dir)))
    try:
        yield
    finally:
        for descriptor in held:
            os.ftruncate(descriptor, 0)  # nobody may signal a process that has taken the number
            os.close(descriptor)


def _take(run_dir: Path) -> int:
    """The open file that the lock is on."""
    descriptor = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = _holder(descriptor)
        os.close(descriptor)
        raise CheckpointError(
            f"another run{holder} writes to {run_dir}; wait until it has ended, or set another "
            "training.run_dir"
        ) from error
    except OSError:
        # Some network file systems know no locks. Then it is as if nobody else were there.
        pass
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{socket.gethostname()} {os.getpid()}\n".encode(), 0)
    return descriptor


def _holder(descriptor: int) -> str:
    """Which process has the lock, if the file says so."""
    host, _, process = os.pread(descriptor, 300, 0).decode(errors="replace").strip().partition(" ")
    return f" (process {process} of rank 0 on {host})" if process.isdigit() else ""

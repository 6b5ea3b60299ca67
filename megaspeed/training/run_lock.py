"""One run at a time writes to a run folder: a second would clear away the first one's saves.

The lock is rank 0's and the kernel's, who frees it when the process dies, of whatever.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.together import from_rank_0
from megaspeed.topology import ParallelContext

LOCK = ".lock"


@contextmanager
def sole_use(run_dir: Path, context: ParallelContext) -> Iterator[None]:
    """Holds the lock of an existing run folder; entered by all ranks together.

    Raises:
        CheckpointError: on every rank, where another run holds it.
    """
    lock = FileLock(run_dir / LOCK)
    from_rank_0(context.checkpoint_group, lambda: _take(lock, run_dir))
    try:
        yield
    finally:
        lock.release()


def _take(lock: FileLock, run_dir: Path) -> None:
    try:
        # Some network file systems know no locks. Then it is as if nobody else were there.
        with suppress(NotImplementedError):
            lock.acquire(timeout=0)
    except Timeout as error:
        raise CheckpointError(
            f"another run writes to {run_dir}; wait until it has ended, or set another "
            "training.run_dir"
        ) from error

"""One run at a time writes to a run folder: a second would clear away the first one's saves.

The lock is held by rank 0; the kernel frees it however the process ends.
"""

import fcntl
import os
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
            os.close(descriptor)


def _take(run_dir: Path) -> int:
    """The open file that the lock is on."""
    descriptor = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise CheckpointError(
            f"another run writes to {run_dir}; wait until it has ended, or set another "
            "training.run_dir"
        ) from error
    except OSError:
        # Some network file systems know no locks. Then it is as if nobody else were there.
        pass
    return descriptor

"""Checks that all ranks see rank 0's run folder, where each writes its part of a checkpoint.

    rank 0   writes .seen-by-all-ranks-<random>      removes it
    all                                         look

If each node had a local folder of the same name, each folder would have only a part of every
checkpoint.
"""

import secrets
import time
from contextlib import suppress
from pathlib import Path

from megaspeed.checkpoint.together import from_rank_0, gathered
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.meeting import RanksDisagree

# A network file system may show a new file to other nodes a little later.
_SECONDS_TO_BE_SEEN = 10.0
_POLL_SECONDS = 0.1


def check_shared_folder(run_dir: Path, context: ParallelContext) -> None:
    """Makes the folder and lets all ranks look for a file of rank 0's in it; a collective.

    Raises:
        RanksDisagree: on every rank; names the ranks that do not see the file.
        CheckpointError: on every rank, if rank 0 cannot create the folder or write to it.
    """
    group = context.checkpoint_group
    name = from_rank_0(group, lambda: _leave_a_mark(run_dir))
    sees = gathered(group, _appears(run_dir / name))
    if context.rank == 0:
        with suppress(OSError):
            (run_dir / name).unlink(missing_ok=True)
    blind = [rank for rank, seen in enumerate(sees) if not seen]
    if blind:
        raise RanksDisagree(
            f"All ranks write their parts of a checkpoint to one folder, but ranks {blind} do not "
            f"see what rank 0 writes to {run_dir}. training.run_dir must be on a file "
            "system that all nodes share."
        )


def _leave_a_mark(run_dir: Path) -> str:
    """Creates the file and returns its name."""
    name = f".seen-by-all-ranks-{secrets.token_hex(8)}"
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / name).touch()
    return name


def _appears(file: Path) -> bool:
    deadline = time.monotonic() + _SECONDS_TO_BE_SEEN
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True

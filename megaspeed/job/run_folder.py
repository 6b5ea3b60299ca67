"""The folder that a run writes to. A start checks it first, and never deletes results.

    .lock                                                  held by rank 0
    config.json  metrics.jsonl  loss.png  checkpoints/     of this run
    parts.jsonl                                            the times of the parts of a step
    loads.json                                             the tokens of each expert in a step
    starts.jsonl                                           when it was started and resumed
    profile/                                               if training.profile states steps
    logs/                                                  one file for each rank
    tensorboard/ wandb/                                    if training.report_to names them
    earlier-1/   earlier-2/  ...                           earlier files, with the same names

A new run moves all earlier files to ``earlier-N/``. A run that resumes after a step moves the
checkpoints of later steps there. It also copies the metrics there, then removes the later steps
from its own.

Only one run may write to the folder, because a second run would delete the checkpoints of the
first. If the folder is removed or renamed, a second run can lock a new one at its path, so the
first run ends before it writes again. All ranks must see the same folder, because each writes its
part of a checkpoint to it.
"""

import itertools
import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.folders import CHECKPOINTS, METRICS, CheckpointFolder, step_named
from megaspeed.config.errors import ConfigError
from megaspeed.config.resolve import Run
from megaspeed.files.durable import Locked, flush_folder, identity, lock, write_bytes
from megaspeed.files.json_values import picked
from megaspeed.files.paths import folder_problem
from megaspeed.supervision.answers import broadcast, gather
from megaspeed.supervision.meeting import RanksDisagree
from megaspeed.topology.context import ParallelContext
from megaspeed.training.metrics import records_up_to
from megaspeed.training.profile import PROFILE

CONFIG, LOSS_CURVE = "config.json", "loss.png"
PARTS, STARTS = "parts.jsonl", "starts.jsonl"
LOADS = "loads.json"
TENSORBOARD, WANDB = "tensorboard", "wandb"

LOCK = ".lock"
"""Contains the host and the process id of rank 0 as "host pid". A user can signal the run with
``kill -USR1 $(cut -d' ' -f2 .lock)``."""

# A network file system may show a new file to other nodes a little later.
_SECONDS_TO_BE_SEEN = 10.0
_POLL_SECONDS = 0.1


class RunFolderLost(RuntimeError):
    """The run folder was removed, renamed or replaced while the run wrote to it."""


def check_run_folder(run: Run) -> None:
    """Raise ConfigError if ``training.run_dir`` is not a folder or cannot be written to."""
    problem = folder_problem("training.run_dir", run.run_dir)
    if problem is not None:
        raise ConfigError([problem], where=run.name)


def check_shared_folder(run_dir: Path, context: ParallelContext) -> None:
    """Make the folder, and check that all ranks see a file that rank 0 creates; a collective.

    If each node had a local folder of the same name, each folder would have only a part of every
    checkpoint.

    Raises:
        RanksDisagree: on every rank; names the ranks that do not see the file.
        CheckpointError: on every rank, if rank 0 cannot create the folder or write to it.
    """
    group = context.checkpoint_group

    def create_file() -> str:
        name = f".seen-by-all-ranks-{secrets.token_hex(8)}"  # no other run uses it
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / name).touch()
        return name

    mark = broadcast(group, create_file, CheckpointError)
    seen = gather(group, lambda: appears(run_dir / mark), CheckpointError)
    if context.rank == 0:
        with suppress(OSError):
            (run_dir / mark).unlink(missing_ok=True)
    blind = broadcast(group, lambda: [rank for rank, sees in enumerate(seen) if not sees])
    if blind:
        raise RanksDisagree(
            f"All ranks write their parts of a checkpoint to one folder, but ranks {blind} do not "
            f"see what rank 0 writes to {run_dir}. training.run_dir must be on a file "
            "system that all nodes share."
        )


@contextmanager
def run_lock(
    run_dir: Path, context: ParallelContext, *, wait_seconds: float = 0.0
) -> Iterator[Callable[[], object]]:
    """Hold the lock of an existing run folder. All ranks enter this context together.

    On a network file system without locks, the run continues without one. Raises CheckpointError on
    every rank if another run holds the lock or the lock cannot be created.

    Yields a function to call before each write to the folder. On rank 0, it raises RunFolderLost if
    the file of the lock is no longer at its path. This costs one ``os.stat``.
    """
    with ExitStack() as stack:
        check: Callable[[], object] = bool  # does nothing

        def take() -> None:
            nonlocal check
            file = run_dir / LOCK
            try:
                stack.enter_context(lock(file, wait_seconds=wait_seconds, required=False))
            except Locked as error:
                other = "" if error.holder is None else f" (its rank 0 is {error.holder})"
                raise CheckpointError(
                    f"another run{other} is writing to {run_dir}; wait until it has ended, or set "
                    "another training.run_dir"
                ) from error
            check = partial(_check_lock, run_dir, identity(file))

        broadcast(context.checkpoint_group, take, CheckpointError)
        yield check


def _check_lock(run_dir: Path, held: tuple[int, int] | None) -> None:
    """Raise RunFolderLost if the lock in ``run_dir`` is not ``held``."""
    try:
        if identity(run_dir / LOCK) == held:
            return
    except OSError:  # the disk or the network failed; the write reports it
        return
    raise RunFolderLost(
        f"training stopped: the run folder {run_dir} was removed or renamed, or has lost its file "
        f"{LOCK}. Another run can use {run_dir} now, so this run writes nothing more"
    )


def checkpoint_folder(run: Run) -> CheckpointFolder:
    """Return the folder of the run's checkpoints."""
    return CheckpointFolder(run.run_dir / CHECKPOINTS)


def start_run_folder(run: Run, device: str) -> Path | None:
    """Make the folder and write the resolved configuration. Only rank 0 calls this.

    ``device`` is the ``metrics.device_name`` of rank 0, which is recorded.

    Returns:
        Where an earlier run's files were moved, a folder inside this one; None if there were none.
    """
    run.run_dir.mkdir(parents=True, exist_ok=True)
    earlier = _next_earlier(run.run_dir)
    # Checkpoints first: if this is interrupted, nobody can resume from a half-moved run.
    files = (METRICS, PARTS, LOADS, STARTS, CONFIG, LOSS_CURVE, TENSORBOARD, WANDB, PROFILE)
    for name in (CHECKPOINTS, *files):
        _move(run.run_dir / name, run.run_dir, earlier)
    _record_start(run, 0, device)
    return earlier if earlier.exists() else None


def continue_run_folder(run: Run, step: int, device: str) -> Path | None:
    """Restore the folder to its state after ``step``. Only rank 0 calls this.

    Checkpoints of later steps are moved away, so that a later start does not resume from them.
    Records of later steps are removed from the metrics. The configuration is written again.

    Returns:
        The folder with the moved checkpoints and the old metrics; None if there were none of later
        steps.
    """
    earlier = _next_earlier(run.run_dir)
    folder = checkpoint_folder(run)
    later = [path for path in folder.newest_first() if (step_named(path.name) or 0) > step]
    for checkpoint in later:
        _move(checkpoint, run.run_dir, earlier)
    if later:
        flush_folder(folder.root)
    for name in (METRICS, PARTS):
        _cut_records(run.run_dir / name, step, earlier / name)
    _record_start(run, step, device)
    return earlier if earlier.exists() else None


def appears(file: Path, seconds: float = _SECONDS_TO_BE_SEEN) -> bool:
    """Wait until a file that another node has written is seen here. Returns whether it is."""
    deadline = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _next_earlier(folder: Path) -> Path:
    """Return the first unused ``earlier-N``, without creating it."""
    names = (f"earlier-{number}" for number in itertools.count(1))
    return next(folder / name for name in names if not (folder / name).exists())


def _move(path: Path, folder: Path, target: Path) -> None:
    """Move ``path``, if it exists, to the same relative path in ``target`` as in ``folder``."""
    if path.exists():
        destination = target / path.relative_to(folder)
        destination.parent.mkdir(parents=True, exist_ok=True)
        path.rename(destination)


def _cut_records(file: Path, step: int, copy: Path) -> None:
    if not file.exists():
        return
    lines = file.read_bytes()
    kept = records_up_to(step, lines)
    if kept != lines:
        copy.parent.mkdir(exist_ok=True)
        write_bytes(copy, lines)
        write_bytes(file, kept)


def _record_start(run: Run, step: int, device: str) -> None:
    """Write the configuration, and a line for this start: metrics.jsonl shows no interruptions."""
    text = json.dumps(run.as_json(), indent=2, allow_nan=False) + "\n"
    write_bytes(run.run_dir / CONFIG, text.encode())
    start = {
        "step": step,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **picked(run.grid, "pp", "dp", "tp", "replicate", "cp", "ep"),
        "zero_stage": run.zero_stage,
        "device": device,
    }
    with (run.run_dir / STARTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(start) + "\n")

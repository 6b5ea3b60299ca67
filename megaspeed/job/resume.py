"""Where a run starts: at step 0, at a checkpoint, or after a restart of the ranks.

    --resume auto     the newest complete checkpoint in training.run_dir; step 0 if it has none
    --resume never    step 0; refused if training.run_dir has checkpoints
    --resume DIR      DIR, or the newest complete checkpoint in it
    --fresh           earlier files in training.run_dir are moved away, so nothing is refused

Before the checkpoint is loaded, nothing is removed except the remains of failed saves.

Ranks that were restarted after a failure continue from the newest checkpoint, whatever the command
line states, if an earlier attempt of the same launch has opened the run folder.
"""

import contextlib
import os
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.folders import locate
from megaspeed.checkpoint.run_state import RunState
from megaspeed.config.errors import shortened
from megaspeed.config.resolve import Run
from megaspeed.files.paths import expand_home, path_argument
from megaspeed.job.run_folder import checkpoint_folder
from megaspeed.job.supervisor import FINAL_CODE, SMALLER_SIZE
from megaspeed.supervision.answers import broadcast
from megaspeed.supervision.meeting import Meeting
from megaspeed.supervision.process_end import SUPERVISOR
from megaspeed.topology.context import ParallelContext
from megaspeed.training.resumed_run import (
    config_changes,
    dropped_state,
    rate_change,
    training_changes,
)

AUTO, NEVER = "auto", "never"

_OPENED = "opened by attempt"
"""A key of the store that outlives an attempt."""

MOST_CHANGES = 12
"""How many changes of the configuration are listed."""


def restart_number() -> int:
    """How many times the launcher or a supervisor has restarted the ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class Restarts:
    """What an attempt knows about earlier attempts of the same launch.

    torchrun or ``supervisor`` starts the attempts.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._store = meeting.between_attempts
        self.number = restart_number()

    @property
    def opened(self) -> bool:
        """Whether an earlier attempt has opened the run folder, so this one continues in it."""
        return self.number > 0 and (self._store is None or self._store.check([_OPENED]))

    @property
    def final_code(self) -> int | None:
        """The exit code of an earlier attempt, if restarts do not help after it; otherwise None."""
        if self.number > 0 and self._store is not None and self._store.check([FINAL_CODE]):
            return int(self._store.get(FINAL_CODE))
        return None

    @property
    def is_left(self) -> bool:
        """Whether the ranks restart if this attempt fails."""
        return self.number < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))

    def give_up(self, code: int) -> None:
        """Make all later attempts end at once with this exit code. torchrun still starts them."""
        with contextlib.suppress(RuntimeError):  # the store is gone
            if self._store is not None:
                self._store.set(FINAL_CODE, str(code))

    @property
    def smaller_size(self) -> int | None:
        """The largest micro-batch to try, if an earlier attempt ran out of memory."""
        if self._store is None or not self._store.check([SMALLER_SIZE]):
            return None
        return int(self._store.get(SMALLER_SIZE))

    def back_off(self, size: int) -> str:
        """Store the size for the next attempt, once. Return a note for the user."""
        is_left = self.is_left or SUPERVISOR in os.environ
        # Another rank of this attempt may have stored the same size.
        if self._store is None or not is_left or self.smaller_size not in (None, size):
            return f"to try the next smaller size, set train_micro_batch_size_per_gpu to {size}"
        self._store.set(SMALLER_SIZE, str(size))
        return f"all ranks start again, with micro-batches of {size:,}"

    def note_opened(self) -> None:
        """Store that this launch has opened the run folder."""
        if self._store is not None:
            self._store.set(_OPENED, str(self.number))

    def describe(self, step: int) -> list[str]:
        """A line with the step after which this attempt continues; none in the first attempt."""
        most = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
        line = f"restart {self.number} of {most}: the run continues after step {step}"
        return [line] if self.number else []


@dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """The options of the command line."""

    source: str = AUTO  # auto, never, or a path
    fresh: bool = False  # whether earlier files in the run folder are moved away first
    allow_data_change: bool = False  # whether the data may differ from the checkpoint's
    allow_optimizer_change: bool = False  # whether optimizer state may be dropped

    @staticmethod
    def add_to(parser: ArgumentParser) -> None:
        """``--resume``, ``--fresh``, ``--allow-data-change`` and ``--allow-optimizer-change``."""
        parser.add_argument(
            "--resume",
            default=AUTO,
            type=lambda text: str(path_argument(text)),
            metavar="auto|never|DIR",
            help="auto: from the newest complete checkpoint in training.run_dir, if there is one; "
            "never: at step 0; DIR: from this checkpoint, or the newest complete one in DIR",
        )
        parser.add_argument(
            "--fresh",
            action="store_true",
            help="first move the files in training.run_dir to earlier-N/ in it; start at step 0, "
            "unless --resume DIR names a checkpoint",
        )
        parser.add_argument(
            "--allow-data-change",
            action="store_true",
            help="resume even if corpus, tokenizer, sequence length or data.seed has changed",
        )
        parser.add_argument(
            "--allow-optimizer-change",
            action="store_true",
            help="resume with Muon after AdamW, or with AdamW after Muon: optimizer state of the "
            "matrices of blocks starts at zero",
        )

    @classmethod
    def of(cls, options: Namespace) -> Self:
        return cls(
            source=options.resume,
            fresh=options.fresh,
            allow_data_change=options.allow_data_change,
            allow_optimizer_change=options.allow_optimizer_change,
        )

    @property
    def path(self) -> Path | None:
        """The path in ``--resume``; None if it is ``auto`` or ``never``."""
        return None if self.source in (AUTO, NEVER) else expand_home(self.source)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts."""

    checkpoint: Path | None = None  # the checkpoint to load; None for the initial weights
    step: int = 0  # the step of the checkpoint; 0 without one
    tokens: int = 0  # trained before it
    last_step: int = 0  # of the run that continues from the checkpoint; 0 without one
    # whether the run continues in its own run folder; otherwise earlier files in the folder are
    # moved away
    in_place: bool = False
    # newer checkpoints that are not complete, each with the reason
    skipped: tuple[tuple[Path, str], ...] = ()
    # changes of the configuration since the save, as "key: before -> now"
    changes: tuple[str, ...] = ()
    # a warning if the next step's learning rate differs from the saved schedule
    rate_change: str | None = None
    # optimizer state that the user allows to drop, because the optimizer has changed
    dropped: str | None = None

    def is_end_of(self, run: Run) -> bool:
        """Whether nothing is left to train."""
        return self.step >= run.steps


def check_resume(options: ResumeOptions, run: Run) -> None:
    """Check the options, as far as possible before the ranks connect.

    Raises CheckpointError if the run folder already has checkpoints, or ``--resume`` names none.
    """
    named = None if options.path is None else _named(options.path)
    if named == []:
        raise CheckpointError(f"--resume {options.path} has no checkpoint; name another folder")
    resumes = options.source == AUTO or (named is not None and _is_of(run, named[0]))
    present = checkpoint_folder(run).newest_first()
    if present and not resumes and not options.fresh:
        raise CheckpointError(
            f"--resume {options.source} would start over a run that has {len(present)} "
            f"checkpoints, the newest {present[0]}. Resume from it with --resume {AUTO}, start at "
            "step 0 with --fresh (which moves its files to earlier-N/ and deletes nothing), or set "
            "another training.run_dir."
        )


def find_start(options: ResumeOptions, run: Run, context: ParallelContext) -> Start:
    """Find the checkpoint to start from, the same on every rank; a collective.

    Raises CheckpointError on every rank if there are checkpoints but none is complete, or if a run
    with a different configuration has already taken all steps.
    """
    group = context.checkpoint_group
    candidates = broadcast(group, lambda: _candidates(options, run), CheckpointError)
    if not candidates:
        return Start()
    from megaspeed.checkpoint.inspection import newest_complete  # takes a second, see reading.py

    checkpoint, skipped = newest_complete(candidates, group)
    if checkpoint is None:
        listed = "".join(f"\n  {path}: {why}" for path, why in skipped)
        raise CheckpointError(
            f"There are checkpoints to resume from, but none is complete:{listed}\nName another "
            "with --resume DIR, or start at step 0 with --fresh, which moves them to earlier-N/ "
            "and deletes nothing."
        )
    saved = broadcast(group, lambda: RunState.read(checkpoint), CheckpointError)
    run = replace(run, steps=saved.progress.last_step(run.as_json()))
    start = Start(
        checkpoint=checkpoint,
        step=saved.progress.step,
        tokens=saved.progress.tokens,
        last_step=run.steps,
        in_place=not options.fresh and _is_of(run, checkpoint),
        skipped=skipped,
        changes=tuple(config_changes(saved, run)),
        rate_change=rate_change(saved, run),
        dropped=dropped_state(saved, run) if options.allow_optimizer_change else None,
    )
    if start.is_end_of(run) and (others := training_changes(saved, run)):
        changes = "".join(f"\n  {change}" for change in shortened(others, MOST_CHANGES))
        raise CheckpointError(
            f"{checkpoint} is from a finished run, which took {start.step} steps with other "
            f"settings, so this configuration would train no step:{changes}\nSet another "
            "training.run_dir, or start at step 0 with --fresh (it moves the earlier files to "
            f"earlier-N/ and deletes nothing), or continue after step {start.step} with a larger "
            f"{run.config.length(run.steps).split()[0]}."
        )
    return start


def _candidates(options: ResumeOptions, run: Run) -> list[Path]:
    """Remove the remains of failed saves. Return the checkpoints to try, newest first."""
    own = checkpoint_folder(run)
    own.clear_leftovers()
    if options.path is not None:
        return locate(options.path)
    if options.source == NEVER or options.fresh:
        return []
    candidates = own.newest_first()
    if not candidates and own.remains():
        raise CheckpointError(
            f"{own.root} has {', '.join(own.remains())}, but no checkpoint; bring the checkpoints "
            "back, name one with --resume DIR, or start at step 0 with --fresh"
        )
    return candidates


def _named(path: Path) -> list[Path]:
    """The checkpoints at a path of the command line."""
    if not path.name or not path.exists():
        raise CheckpointError(
            f"--resume takes {AUTO}, {NEVER}, or the folder of a checkpoint or of a run, but "
            f"{str(path)!r} is none of them"
        )
    return locate(path)


def _is_of(run: Run, checkpoint: Path) -> bool:
    """Whether the checkpoint is in this run's checkpoint folder. Follows links."""
    return checkpoint.resolve().parent == checkpoint_folder(run).root.resolve()

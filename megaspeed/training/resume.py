"""Where a run starts: at step 0, or at a checkpoint.

    --resume auto     the newest complete checkpoint in training.run_dir; step 0 if it has none
    --resume never    step 0; refused if training.run_dir has checkpoints
    --resume DIR      DIR, or the newest complete checkpoint in it
    --fresh           earlier files in training.run_dir are moved away, so nothing is refused

Before the checkpoint is loaded, nothing is removed except the remains of failed saves.

A resumed run also keeps the rule that selected its validation data. With another rule, it would
train on different text, and resuming would be refused.
"""

import os
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from megaspeed.checkpoint.errors import CheckpointError, broadcast
from megaspeed.checkpoint.folders import is_leftover, locate
from megaspeed.checkpoint.inspection import Found, newest_complete
from megaspeed.checkpoint.run_state import RunState
from megaspeed.config.resolve import Run
from megaspeed.files.paths import expand_home, path_argument
from megaspeed.topology.context import ParallelContext
from megaspeed.training.restarts import restart_number
from megaspeed.training.resumed_run import (
    config_changes,
    mask_changes,
    rate_change,
    saved_config,
    training_changes,
)
from megaspeed.training.run_folder import checkpoint_folder

AUTO, NEVER = "auto", "never"

_RULE = "hold_out_by"

_NO_COMMON_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""If this variable is 1, nodes can join, but torchrun keeps no information between attempts."""

MOST_CHANGES = 12
"""How many changes of the configuration are listed."""


@dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """The options of the command line.

    Attributes:
        source: ``auto``, ``never``, or a path.
        fresh: whether earlier files in the run folder are moved away first.
        allow_data_change: whether the data may differ from the checkpoint's.
    """

    source: str = AUTO
    fresh: bool = False
    allow_data_change: bool = False

    @staticmethod
    def add_to(parser: ArgumentParser) -> None:
        """``--resume``, ``--fresh`` and ``--allow-data-change``."""
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

    @classmethod
    def of(cls, options: Namespace) -> Self:
        """Reads the options from a parsed command line."""
        return cls(
            source=options.resume,
            fresh=options.fresh,
            allow_data_change=options.allow_data_change,
        )

    @property
    def path(self) -> Path | None:
        """The path in ``--resume``; None if it is ``auto`` or ``never``."""
        return None if self.source in (AUTO, NEVER) else expand_home(self.source)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts.

    Attributes:
        checkpoint: the checkpoint to load; None for the initial weights.
        step: the step of the checkpoint; 0 without one.
        in_place: whether the run continues in its own run folder; otherwise earlier files in the
            folder are moved away.
        skipped: newer checkpoints that are not complete, each with the reason.
        changes: changes of dropout masks and configuration since the checkpoint was saved, as
            "key: before -> now".
        rate_change: a warning if the next step's learning rate differs from the saved schedule.
    """

    checkpoint: Path | None = None
    step: int = 0
    in_place: bool = False
    skipped: tuple[tuple[Path, str], ...] = ()
    changes: tuple[str, ...] = ()
    rate_change: str | None = None

    def is_end_of(self, run: Run) -> bool:
        """Whether nothing is left to train."""
        return self.step >= run.config.training.steps


def check_resume(options: ResumeOptions, run: Run) -> None:
    """Checks the options, as far as possible before the ranks connect.

    Raises:
        CheckpointError: the run folder already has checkpoints, ``--resume`` names none, or the
            options would be repeated when a node joins.
    """
    if os.environ.get(_NO_COMMON_STORE) == "1" and (options.fresh or options.source != AUTO):
        stated = "--fresh" if options.fresh else f"--resume {options.source}"
        raise CheckpointError(
            f"with {_NO_COMMON_STORE}=1, ranks that torchrun starts again do not know what was "
            f"done before, so {stated} would discard the steps of this launch when a node joins. "
            "Set a new training.run_dir to start at step 0, or unset the variable if no node joins"
        )
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
    """Finds the checkpoint to start from, the same on every rank; a collective.

    Raises:
        CheckpointError: on every rank, if there are checkpoints but none is complete, or if a run
            with a different configuration has already taken all steps.
    """
    group = context.checkpoint_group
    candidates = broadcast(group, lambda: _candidates(options, run))
    if not candidates:
        return Start()
    found = newest_complete(candidates, group)
    if found.checkpoint is None:
        raise CheckpointError(_none_is_complete(found))
    checkpoint = found.checkpoint
    saved = broadcast(group, lambda: RunState.read(checkpoint))
    start = Start(
        checkpoint=checkpoint,
        step=saved.progress.step,
        in_place=not options.fresh and _is_of(run, checkpoint),
        skipped=found.skipped,
        changes=(*mask_changes(saved, run), *config_changes(saved, run)),
        rate_change=rate_change(saved, run),
    )
    if start.is_end_of(run) and (others := training_changes(saved, run)):
        raise CheckpointError(_finished_otherwise(checkpoint, start.step, others))
    return start


def keep_split(options: ResumeOptions, run: Run) -> tuple[Run, str | None]:
    """Uses the saved run's rule to select validation data, unless the JSON states a rule.

    The corpus is prepared before the ranks communicate, so each rank reads the checkpoint itself.

    Returns:
        The run, and a line for the console if the rule differs from that of a new run.
    """
    data = run.config.data
    rule = None if _RULE in data.model_fields_set else _saved_rule(options, run)
    if rule in (None, data.hold_out_by):
        return run, None
    kept = data.model_copy(update={_RULE: rule})
    run = replace(run, config=run.config.model_copy(update={"data": kept}))
    if data.validation is not None or data.validation_fraction == 0:
        return run, None
    return run, f'validation data is held out as in the saved run (data.{_RULE} "{rule}")'


def _candidates(options: ResumeOptions, run: Run) -> list[Path]:
    """Removes the remains of failed saves. Returns the checkpoints to try, newest first."""
    own = checkpoint_folder(run)
    own.clear_leftovers()
    if options.path is not None:
        return locate(options.path)
    if options.source == NEVER or options.fresh:
        return []
    candidates = own.newest_first()
    if not candidates and own.remains():
        raise CheckpointError(
            f"{own.root} has {', '.join(own.remains())} and no checkpoint; bring the checkpoints "
            "back, name one with --resume DIR, or start at step 0 with --fresh"
        )
    return candidates


def _named(path: Path) -> list[Path]:
    """The checkpoints at a path of the command line."""
    if not path.name or not path.exists():
        raise CheckpointError(
            f"--resume takes {AUTO}, {NEVER}, or the folder of a checkpoint or of a run, and "
            f"{str(path)!r} is none of them"
        )
    if is_leftover(path.resolve().name):
        raise CheckpointError(
            f"--resume {path} is an incomplete save; name a checkpoint, or the folder "
            f"{path.parent} to resume from its newest complete checkpoint"
        )
    return locate(path)


def _is_of(run: Run, checkpoint: Path) -> bool:
    """Whether the checkpoint is in this run's checkpoint folder. Follows links."""
    return checkpoint.resolve().parent == checkpoint_folder(run).root.resolve()


def _finished_otherwise(checkpoint: Path, step: int, changes: list[str]) -> str:
    shown = [f"  {change}" for change in changes[:MOST_CHANGES]]
    if len(changes) > MOST_CHANGES:
        shown.append(f"  and {len(changes) - MOST_CHANGES} more")
    return "\n".join(
        [
            f"{checkpoint} is from a finished run, which took {step} steps with other settings, "
            "so nothing would be trained with this one:",
            *shown,
            "Set another training.run_dir, or start at step 0 with --fresh (it moves the earlier "
            f"files to earlier-N/ and deletes nothing), or continue after step {step} with a "
            "larger training.steps.",
        ]
    )


def _none_is_complete(found: Found) -> str:
    lines = [f"  {checkpoint}: {why}" for checkpoint, why in found.skipped]
    return "\n".join(
        [
            "There are checkpoints to resume from, but none is complete:",
            *lines,
            "Name another with --resume DIR, or start at step 0 with --fresh, which moves them to "
            "earlier-N/ and deletes nothing.",
        ]
    )


def _saved_rule(options: ResumeOptions, run: Run) -> Any:
    """The rule in the newest checkpoint that the run would resume from; None if there is none."""
    own = checkpoint_folder(run).newest_first()
    if options.path is not None:
        # A restart continues from its own checkpoints. Then DIR may have been pruned or moved.
        gone = restart_number() > 0 and not options.path.exists()
        candidates = own if gone and own else locate(options.path)
    elif options.source == AUTO and not options.fresh:
        candidates = own
    else:
        candidates = []
    for checkpoint in candidates:
        try:
            saved = RunState.read(checkpoint)
        except CheckpointError:  # reported later, with the reason
            continue
        return saved_config(saved).get("data", {}).get(_RULE)
    return None

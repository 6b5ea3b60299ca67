"""What all ranks of a run do together, from their meeting to the last figures.

    same inputs? one folder? -> where to start -> model and its state -> run folder -> training

The run folder is touched only once this run has all that it needs to go on.
"""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.run_state import Progress
from megaspeed.checkpoint.together import from_rank_0
from megaspeed.config.resolve import Run
from megaspeed.data.prepared import PreparedCorpus
from megaspeed.topology.activity import START_UP_PATIENCE
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.meeting import RanksDisagree
from megaspeed.topology.rank_log import RankLog
from megaspeed.topology.stop_signal import StopSignal
from megaspeed.topology.watch import Watch
from megaspeed.training.agreement import check_agreement
from megaspeed.training.banner import BANNER_WIDTH, banner
from megaspeed.training.checkpointing import Checkpointing
from megaspeed.training.console import (
    ConsoleObserver,
    NullObserver,
    summary_table,
)
from megaspeed.training.console_lines import describe_start
from megaspeed.training.loss_curve import draw_loss_curve
from megaspeed.training.metrics import MetricsFile
from megaspeed.training.predictions import Predictions
from megaspeed.training.replicas import ReplicasDiffer
from megaspeed.training.reporting import Reporting
from megaspeed.training.restarts import NoProgress, Restarts
from megaspeed.training.resume import ResumeOptions, Start, find_start
from megaspeed.training.run_folder import (
    LOSS_CURVE,
    METRICS,
    PARTS,
    continue_run_folder,
    start_run_folder,
)
from megaspeed.training.run_lock import sole_use
from megaspeed.training.shared_folder import check_shared_folder
from megaspeed.training.trainer import (
    SAVE_PATIENCE,
    Trainer,
    TrainingDiverged,
    TrainingSummary,
)
from megaspeed.training.worker import Worker

STOPPED = (RanksDisagree, TrainingDiverged, ReplicasDiffer, NoProgress)
"""Exceptions that end training on every rank alike, with a message for the user."""

EXPECTED = (*STOPPED, CheckpointError, OSError)
"""Exceptions with a message for the user. Any other is reported here, with its traceback."""


_OUT_OF_MEMORY = re.compile("out of memory|can't allocate memory|ALLOC_FAILED")


def run_job(
    run: Run,
    corpus: PreparedCorpus,
    stated: ResumeOptions,
    restarts: Restarts,
    context: ParallelContext,
    stop: StopSignal,
    watch: Watch,
    log: RankLog,
    console: Console,
    predictions: Predictions,
) -> TrainingSummary | None:
    """Trains the run from where it starts; a collective over all ranks.

    Returns:
        How it ended; None where nothing was left to train, and nothing was changed.

    Raises:
        RanksDisagree: the ranks were given different inputs, or folders.
        CheckpointError: what is to be resumed from cannot be.
        TrainingDiverged: loss or gradient norm stay non-finite.
        ReplicasDiffer: ranks hold different copies of something.
        NoProgress: restarts do not help.
        OSError: a file or folder cannot be read or written.

    Any other exception is reported before it propagates.
    """
    during, group = context.activity.during, context.checkpoint_group
    with watch.failures_reported(expected=EXPECTED):
        with during("comparing the ranks", patience=START_UP_PATIENCE):
            check_agreement(corpus, context)
            check_shared_folder(run.run_dir, context)
        log.open()
        with sole_use(run.run_dir, context):
            no_progress = from_rank_0(group, lambda: restarts.problem(run))
            if no_progress is not None:
                raise NoProgress(no_progress)
            options = from_rank_0(group, lambda: restarts.options(stated, run))
            start = find_start(options, run, context)
            for line in (*restarts.describe(start.step), *describe_start(start, run)):
                console.print(line, highlight=False, soft_wrap=True)
            if start.is_end_of(run):
                return None
            for part in banner(run, context.device, predictions.peaks):
                width = None if console.is_terminal else BANNER_WIDTH
                console.print(part, width=width, soft_wrap=isinstance(part, Text))
            with (
                during("building the model", patience=START_UP_PATIENCE),
                _explained(lambda: predictions.out_of_memory(run, context, None)),
            ):
                worker = Worker(run, context)
            with (
                Checkpointing(worker, corpus) as checkpointing,
                # Once more, because the line above waits for a save that is under way.
                watch.failures_reported(expected=EXPECTED),
                _explained(lambda: predictions.out_of_memory(run, context, worker.engine)),
            ):
                begin = _begin(start, options, run, checkpointing, context, console)
                restarts.note_opened()
                return _train(worker, corpus, checkpointing, stop, console, begin)


@contextmanager
def _explained(explanation: Callable[[], str]) -> Iterator[None]:
    """Adds an explanation to the report of an exception that says that memory ran out."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error)):
            with suppress(Exception):  # there may be no memory for an explanation either
                error.add_note(explanation())
        raise


def _begin(
    start: Start,
    options: ResumeOptions,
    run: Run,
    checkpointing: Checkpointing,
    context: ParallelContext,
    console: Console,
) -> Progress:
    """Loads the checkpoint, if there is one, and opens the run folder."""
    begin = Progress()
    if start.checkpoint is not None:
        with context.activity.during(f"loading {start.checkpoint}", patience=SAVE_PATIENCE):
            allowed = options.allow_data_change
            begin = checkpointing.load(start.checkpoint, allow_data_change=allowed)
    from_rank_0(context.checkpoint_group, lambda: _open_run_folder(run, start, console))
    if start.checkpoint is not None and not start.in_place:
        # Else a run that died before its first save would start at step 0 the next time.
        checkpointing.save(begin)
    return begin


def _train(
    worker: Worker,
    corpus: PreparedCorpus,
    checkpointing: Checkpointing,
    stop: StopSignal,
    console: Console,
    begin: Progress,
) -> TrainingSummary:
    run = worker.run
    if worker.context.rank != 0:
        return Trainer(worker, corpus, checkpointing, stop, NullObserver()).train(begin)
    with (
        Reporting(run, begin.step, functools.partial(_warn, console)) as reporting,
        MetricsFile(run.run_dir / METRICS) as metrics_file,
        MetricsFile(run.run_dir / PARTS) as parts_file,
        ConsoleObserver(run, console, (metrics_file, reporting), parts_file, begin) as observer,
    ):
        return Trainer(worker, corpus, checkpointing, stop, observer).train(begin)


def _warn(console: Console, text: str) -> None:
    console.print("[yellow]warning:[/yellow]", escape(text), highlight=False, soft_wrap=True)


def tell_ending(run: Run, summary: TrainingSummary, console: Console) -> None:
    """Draws the loss curve and prints the last figures; for rank 0."""
    picture = run.run_dir / LOSS_CURVE
    draw_loss_curve(run.run_dir / METRICS, picture, title=run.name)
    console.print(summary_table(run, summary))
    files = f"metrics: {run.run_dir / METRICS}   loss curve: {picture}"
    console.print(files, highlight=False, markup=False, soft_wrap=True)


def _open_run_folder(run: Run, start: Start, console: Console) -> None:
    if start.in_place:
        moved, what = continue_run_folder(run, start.step), f"what came after step {start.step}"
    else:
        moved, what = start_run_folder(run), "an earlier run's files"
    if moved is not None:
        line = f"{what} {'is' if start.in_place else 'are'} now in {moved}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)

"""What all ranks of a run do together, from the comparison of their inputs to the summary.

    same inputs? one folder? -> where to start -> model and its state -> run folder -> training

Earlier files in the run folder are moved only after the checkpoint, if any, has been loaded.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.run_state import Progress
from megaspeed.checkpoint.together import from_rank_0
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.topology.activity import SAVE_PATIENCE, START_UP_PATIENCE, Activity
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.meeting import Meeting, RanksDisagree
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
    Trainer,
    TrainingDiverged,
    TrainingSummary,
)
from megaspeed.training.worker import Worker
from megaspeed.zero.engine import ZeroEngine

STOPPED = (RanksDisagree, TrainingDiverged, ReplicasDiffer, NoProgress)
"""Exceptions that end training on every rank alike, with a message for the user."""

EXPECTED = (*STOPPED, CheckpointError, OSError)
"""Exceptions with a message for the user. Any other is reported here, with its traceback."""


_SECONDS_OF_A_DEAD_LOCK = 120.0
"""A network file system keeps the lock of a dead host for up to 90 s. A restart waits for it."""

_OUT_OF_MEMORY = re.compile("out of memory|can't allocate memory|ALLOC_FAILED")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one rank brings to a run.

    Attributes:
        run: the resolved configuration.
        stated: what the command line says to resume from.
        meeting: the ranks of this run.
        activity: what this rank is doing, for the watch.
        stop: the stop signals that this process has received.
        watch: watches the other ranks.
        log: this rank's log file.
        console: quiet on all ranks but rank 0.
        predictions: asked for the banner, and if memory runs out.
    """

    run: Run
    stated: ResumeOptions
    meeting: Meeting
    activity: Activity
    stop: StopSignal
    watch: Watch
    log: RankLog
    console: Console
    predictions: Predictions

    def train(self, corpus: PreparedCorpus, context: ParallelContext) -> TrainingSummary | None:
        """Trains the run from where it starts; a collective over all ranks.

        Returns:
            How it ended; None if nothing was left to train. Then no file has changed.

        Raises:
            RanksDisagree: the ranks were given different inputs, or folders.
            CheckpointError: the run cannot resume from the checkpoint.
            TrainingDiverged: loss or gradient norm stay non-finite.
            ReplicasDiffer: ranks hold different copies of something.
            NoProgress: restarts do not help.
            OSError: a file or folder cannot be read or written.

        Any other exception is reported before it propagates.
        """
        run, during, group = self.run, self.activity.during, context.checkpoint_group
        restarts = Restarts(self.meeting)
        with self.watch.failures_reported(expected=EXPECTED):
            with during("comparing the ranks", patience=START_UP_PATIENCE):
                check_agreement(corpus, context)
                check_shared_folder(run.run_dir, context)
            self.log.open()
            waited = _SECONDS_OF_A_DEAD_LOCK if restarts.number else 0.0
            with sole_use(run.run_dir, context, wait_seconds=waited):
                no_progress = from_rank_0(group, lambda: restarts.problem(run))
                if no_progress is not None:
                    raise NoProgress(no_progress)
                options = from_rank_0(group, lambda: restarts.options(self.stated, run))
                with during("checking checkpoints", patience=SAVE_PATIENCE):
                    start = find_start(options, run, context)
                for line in (*restarts.describe(start.step), *describe_start(start, run)):
                    self.console.print(line, highlight=False, soft_wrap=True)
                if start.is_end_of(run):
                    return None
                self._print_banner(context)
                with (
                    during("building the model", patience=START_UP_PATIENCE),
                    self._out_of_memory_explained(context, None),
                ):
                    worker = Worker(run, context)
                with (
                    Checkpointing(worker, corpus) as checkpointing,
                    # Again, because `Checkpointing` waits for a pending save when it closes.
                    self.watch.failures_reported(expected=EXPECTED),
                    self._out_of_memory_explained(context, worker.engine),
                ):
                    begin = self._begin(start, options, checkpointing, context)
                    restarts.note_opened()
                    return self._train(worker, corpus, checkpointing, begin)

    def _print_banner(self, context: ParallelContext) -> None:
        for part in banner(self.run, context.device, self.predictions.peaks):
            width = None if self.console.is_terminal else BANNER_WIDTH
            self.console.print(part, width=width, soft_wrap=isinstance(part, Text))

    @contextmanager
    def _out_of_memory_explained(
        self, context: ParallelContext, engine: ZeroEngine | None
    ) -> Iterator[None]:
        """Adds an explanation to an exception if its cause is that memory ran out."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error)):
                with suppress(Exception):  # there may be no memory for an explanation either
                    error.add_note(self.predictions.out_of_memory(self.run, context, engine))
            raise

    def _begin(
        self,
        start: Start,
        options: ResumeOptions,
        checkpointing: Checkpointing,
        context: ParallelContext,
    ) -> Progress:
        """Loads the checkpoint, if there is one, and opens the run folder."""
        begin = Progress()
        if start.checkpoint is not None:
            with self.activity.during(f"loading {start.checkpoint}", patience=SAVE_PATIENCE):
                allowed = options.allow_data_change
                begin = checkpointing.load(start.checkpoint, allow_data_change=allowed)
        from_rank_0(context.checkpoint_group, lambda: self._open_run_folder(start))
        if start.checkpoint is not None and not start.in_place:
            # Otherwise a run that fails before its first save would restart at step 0.
            with self.activity.during("saving the first checkpoint", patience=SAVE_PATIENCE):
                checkpointing.save(begin)
        return begin

    def _open_run_folder(self, start: Start) -> None:
        if start.in_place:
            moved = continue_run_folder(self.run, start.step)
            what = f"the records after step {start.step}"
        else:
            moved, what = start_run_folder(self.run), "an earlier run's files"
        if moved is not None:
            line = f"{what} are now in {moved}"
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _train(
        self,
        worker: Worker,
        corpus: PreparedCorpus,
        checkpointing: Checkpointing,
        begin: Progress,
    ) -> TrainingSummary:
        run, console, stop = self.run, self.console, self.stop
        if worker.context.rank != 0:
            return Trainer(worker, corpus, checkpointing, stop, NullObserver()).train(begin)
        with (
            Reporting(run, begin.step, self._warn) as reporting,
            MetricsFile(run.run_dir / METRICS) as metrics_file,
            MetricsFile(run.run_dir / PARTS) as parts_file,
            ConsoleObserver(run, console, (metrics_file, reporting), parts_file, begin) as observer,
        ):
            return Trainer(worker, corpus, checkpointing, stop, observer).train(begin)

    def _warn(self, text: str) -> None:
        line = ("[yellow]warning:[/yellow]", escape(text))
        self.console.print(*line, highlight=False, soft_wrap=True)

    def print_summary(self, summary: TrainingSummary) -> None:
        """Draws the loss curve and prints the last figures; for rank 0."""
        metrics, picture = self.run.run_dir / METRICS, self.run.run_dir / LOSS_CURVE
        files = f"metrics: {metrics}   loss curve: {picture}"
        try:
            draw_loss_curve(metrics, picture, title=self.run.name)
        except Exception as error:  # the run has succeeded, whatever the picture does
            self._warn(f"the loss curve could not be drawn: {type(error).__name__}: {error}")
            files = f"metrics: {metrics}"
        self.console.print(summary_table(self.run, summary))
        self.console.print(files, highlight=False, markup=False, soft_wrap=True)

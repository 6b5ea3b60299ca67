"""What rank 0 prints during a run and at its end: a line for each log interval, a summary.

On a terminal, a progress bar with the remaining time is shown below the lines. A file or a pipe
gets only the lines, without control characters.
"""

import math
import os
import signal
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as ProgressBar
from rich.table import Table

from megaspeed.checkpoint.run_state import Progress
from megaspeed.checkpoint.writing import SaveReport
from megaspeed.config.resolve import Run
from megaspeed.training.console_lines import (
    SLOW,
    describe_late_save,
    describe_resumed,
    describe_save,
    describe_slow_rank,
    describe_step,
)
from megaspeed.training.metrics import PartMetrics, StepMetrics, ValidationMetrics
from megaspeed.training.trainer import TrainingSummary

_SPEED_SECONDS = 3600.0
"""The remaining time is estimated from this period; rich's 30 s may have less than two steps."""


class NullObserver:
    """The observer on all ranks but rank 0, which does nothing."""

    def step(self, metrics: StepMetrics) -> None:
        """Ignored."""

    def parts(self, metrics: PartMetrics) -> None:
        """Ignored."""

    def validation(self, metrics: ValidationMetrics) -> None:
        """Ignored."""

    def stopping(self, told_by: signal.Signals, step: int, save_seconds: float | None) -> None:
        """Ignored."""

    def saved(self, report: SaveReport) -> None:
        """Ignored."""


class Record(Protocol):
    """A destination of records: ``metrics.jsonl``, or other services."""

    def write(self, metrics: StepMetrics | PartMetrics | ValidationMetrics) -> None:
        """Writes one record."""


class ConsoleObserver:
    """Writes every step to the records and every ``log_interval``-th to the console.

    Args:
        run: the resolved run.
        console: the console to print to.
        records: destinations of every step and every evaluation.
        parts: destination of the times of the parts of a step.
        begin: where the run starts or resumes.
    """

    def __init__(
        self,
        run: Run,
        console: Console,
        records: Sequence[Record],
        parts: Record | None,
        begin: Progress,
    ) -> None:
        self._run = run
        self._parts = parts
        self._log_interval = run.config.training.log_interval
        self._steps = run.config.training.steps
        self._begin = begin
        self._console = console
        self._records = records
        self._progress = ProgressBar(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            redirect_stderr=sys.stderr.isatty(),  # otherwise a log file would lack the errors
            refresh_per_second=2,  # drawing takes processor time from training
            speed_estimate_period=_SPEED_SECONDS,
        )
        self._task = self._progress.add_task("training", total=self._steps, completed=begin.step)

    def __enter__(self) -> Self:
        self._progress.start()
        self._console.show_cursor(True)  # the bar hides it, and a process may be killed
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def step(self, metrics: StepMetrics) -> None:
        """Records the step and moves the bar."""
        self._write(metrics)
        self._progress.update(self._task, completed=metrics.step)
        is_first = metrics.step == self._begin.step + 1
        if metrics.skipped or is_first or metrics.step % self._log_interval == 0:
            self._say(describe_step(metrics))
        if is_first and self._begin.step > 0:
            self._say(describe_resumed(self._begin, metrics))

    def parts(self, metrics: PartMetrics) -> None:
        """Records the parts, and prints a line if one rank is much slower than the median rank."""
        if self._parts is not None:
            self._parts.write(metrics)
        if metrics.slowest_rank_seconds > SLOW * metrics.median_rank_seconds:
            self._say(describe_slow_rank(metrics, self._run.grid))

    def validation(self, metrics: ValidationMetrics) -> None:
        """Records and prints an evaluation."""
        self._write(metrics)
        self._say(
            f"step {metrics.step:>6}  validation loss {metrics.validation_loss:.4f}  "
            f"perplexity {metrics.validation_perplexity:.2f}"
        )

    def stopping(self, told_by: signal.Signals, step: int, save_seconds: float | None) -> None:
        """Prints why the run ends early, and a warning if its last save may end too late."""
        self._say(f"step {step:>6}  stopped by {told_by.name} after {step} of {self._steps} steps")
        warning = describe_late_save(save_seconds, self._run, os.environ)
        if told_by is not signal.SIGUSR1 and warning is not None:  # no launcher sends SIGUSR1
            self._say(warning)

    def saved(self, report: SaveReport) -> None:
        """Prints that a checkpoint was saved, or why it was not."""
        self._say(describe_save(report))

    def _write(self, metrics: StepMetrics | PartMetrics | ValidationMetrics) -> None:
        for record in self._records:
            record.write(metrics)

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)


def summary_table(run: Run, summary: TrainingSummary) -> Table:
    """The run's last figures."""
    last = summary.last_step
    title = f"{escape(run.name)}: {last.step} steps"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_row("training loss (last step)", f"{last.loss:.4f}")
    if summary.last_validation is not None:
        table.add_row("validation loss", f"{summary.last_validation.validation_loss:.4f}")
        perplexity = summary.last_validation.validation_perplexity
        table.add_row("validation perplexity", f"{perplexity:.2f}")
        vocabulary = run.config.model.vocab_size
        table.add_row(
            "perplexity of guessing evenly", f"{vocabulary:,} (loss {math.log(vocabulary):.4f})"
        )
    table.add_row("tokens", f"{last.tokens:,}")
    table.add_row("time", f"{summary.seconds:.1f} s")
    table.add_row("tokens/s", f"{summary.tokens / summary.seconds:,.0f}")
    table.add_row("skipped steps", str(summary.skipped_steps))
    peaks = ", ".join(f"{peak / 2**20:,.0f}" for peak in last.peak_memory_bytes)
    table.add_row("peak memory by pipeline stage", f"{peaks} MiB")
    return table

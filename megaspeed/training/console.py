"""What rank 0 prints: where the run starts, its plan, a line a log interval, a summary."""

import math
import signal
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as ProgressBar
from rich.table import Table

from megaspeed.checkpoint.run_state import Progress
from megaspeed.checkpoint.saving import SaveReport
from megaspeed.config.resolve import Run
from megaspeed.model.parameters import layer_count
from megaspeed.training.console_lines import (
    SLOW,
    describe_resumed,
    describe_save,
    describe_slow_rank,
    describe_step,
)
from megaspeed.training.metrics import MetricsFile, PartMetrics, StepMetrics, ValidationMetrics
from megaspeed.training.trainer import TrainingSummary


class NullObserver:
    """Listens to nothing: every rank but 0."""

    def step(self, metrics: StepMetrics) -> None:
        """Ignored."""

    def parts(self, metrics: PartMetrics) -> None:
        """Ignored."""

    def validation(self, metrics: ValidationMetrics) -> None:
        """Ignored."""

    def stopping(self, told_by: signal.Signals, step: int) -> None:
        """Ignored."""

    def saved(self, report: SaveReport) -> None:
        """Ignored."""


class ConsoleObserver:
    """Writes every step to ``metrics.jsonl`` and every ``log_interval``-th to the console.

    Args:
        run: the resolved run.
        console: to print to.
        metrics_file: to write to.
        begin: where the run starts or goes on.
    """

    def __init__(
        self, run: Run, console: Console, metrics_file: MetricsFile, begin: Progress
    ) -> None:
        self._run = run
        self._log_interval = run.config.training.log_interval
        self._steps = run.config.training.steps
        self._begin = begin
        self._console = console
        self._metrics_file = metrics_file
        self._progress = ProgressBar(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("training", total=self._steps, completed=begin.step)

    def __enter__(self) -> Self:
        self._progress.start()
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
        self._metrics_file.write(metrics)
        self._progress.update(self._task, completed=metrics.step)
        is_first = metrics.step == self._begin.step + 1
        if metrics.skipped or is_first or metrics.step % self._log_interval == 0:
            self._say(describe_step(metrics))
        if is_first and self._begin.step > 0:
            self._say(describe_resumed(self._begin, metrics))

    def parts(self, metrics: PartMetrics) -> None:
        """Records them, and prints a line if one rank keeps the others waiting."""
        self._metrics_file.write(metrics)
        if metrics.slowest_rank_seconds > SLOW * metrics.median_rank_seconds:
            self._say(describe_slow_rank(metrics, self._run.grid))

    def validation(self, metrics: ValidationMetrics) -> None:
        """Records and prints an evaluation."""
        self._metrics_file.write(metrics)
        self._say(
            f"step {metrics.step:>6}  validation loss {metrics.validation_loss:.4f}  "
            f"perplexity {metrics.validation_perplexity:.2f}"
        )

    def stopping(self, told_by: signal.Signals, step: int) -> None:
        """Says why the run ends early."""
        self._say(
            f"step {step:>6}  told to stop by {told_by.name}, after {step} of {self._steps} steps"
        )

    def saved(self, report: SaveReport) -> None:
        """Prints where a checkpoint is, or why it is not."""
        self._say(describe_save(report))

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)


def plan_table(run: Run, stages: Sequence[range], parameters: Sequence[int]) -> Table:
    """Layers and parameters of each pipeline stage, under a line that names the layout.

    Args:
        run: the resolved run.
        stages: flat layers of each pipeline stage.
        parameters: logical parameters of each pipeline stage.
    """
    grid, batch = run.grid, run.batch
    table = Table(
        title=f"{run.name}: pp {grid.pp} x dp {grid.dp} x tp {grid.tp} = "
        f"{grid.world_size} ranks, ZeRO-{run.zero_stage}, {run.precision}, "
        f"{batch.train_batch_size} samples a step in {batch.gradient_accumulation_steps} "
        f"micro-batches of {batch.micro_batch_size}",
        title_justify="left",
    )
    for heading in ("pipeline stage", "layers", "parameters"):
        table.add_column(heading, justify="right")
    for index, (layers, count) in enumerate(zip(stages, parameters, strict=True)):
        table.add_row(
            str(index), _describe_layers(layers, layer_count(run.config.model)), f"{count:,}"
        )
    return table


def summary_table(run: Run, summary: TrainingSummary) -> Table:
    """The run's last figures."""
    last = summary.last_step
    table = Table(title=f"{run.name}: {last.step} steps", title_justify="left", show_header=False)
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


def _describe_layers(layers: range, count: int) -> str:
    names = []
    if 0 in layers:
        names.append("embedding")
    blocks = [index - 1 for index in layers if 0 < index < count - 1]
    if blocks:
        names.append(
            f"blocks {blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else f"block {blocks[0]}"
        )
    if count - 1 in layers:
        names.append("head")
    return ", ".join(names)

"""Training on one rank, with a record of all that the trainer reports."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from megaspeed.checkpoint.run_state import Progress
from megaspeed.checkpoint.writing import SaveReport
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.supervision.process_end import StopSignal
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.checkpointing import Checkpointing
from megaspeed.training.metrics import PartMetrics, StepMetrics, ValidationMetrics
from megaspeed.training.trainer import Observer, Trainer, TrainingDiverged, TrainingSummary
from megaspeed.training.worker import StepResult, Worker
from tests.support.machine import limit


@dataclass
class Record(Observer):
    """The record of one rank's run."""

    steps: list[StepMetrics] = field(default_factory=list)
    validations: list[ValidationMetrics] = field(default_factory=list)
    parts_of_steps: list[PartMetrics] = field(default_factory=list)
    saves: list[SaveReport] = field(default_factory=list)
    events: list[tuple[str, int]] = field(default_factory=list)  # (event, step), in order
    summary: TrainingSummary | None = None
    diverged: str | None = None
    weights: list[dict[str, Tensor]] = field(default_factory=list)  # before each step, if watched
    timeouts: list[float] = field(default_factory=list)  # in each step, if watched

    def step(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)
        self.events.append(("step", metrics.step))

    def parts(self, metrics: PartMetrics) -> None:
        self.parts_of_steps.append(metrics)
        self.events.append(("parts", metrics.step))

    def validation(self, metrics: ValidationMetrics) -> None:
        self.validations.append(metrics)
        self.events.append(("validation", metrics.step))

    def stopping(self, stopped_by: str, step: int) -> None:
        self.events.append((stopped_by, step))

    def saved(self, report: SaveReport) -> None:
        self.saves.append(report)
        self.events.append(("checkpoint", report.step))


Prepare = Callable[[Trainer, Record], None]


def train(
    launch: LaunchEnvironment,
    run: Run,
    corpus: PreparedCorpus,
    prepare: Prepare | None = None,
    checkpoint: Path | None = None,
) -> Record:
    """Train one rank from the start or from a checkpoint.

    ``prepare`` may change the trainer before it starts.
    """
    record = Record()
    grid = run.grid
    with (
        StopSignal() as stop,
        ParallelContext.create(grid, launch, timeout_seconds=limit(30)) as context,
    ):
        worker = Worker(run, context)
        checkpointing = Checkpointing(worker, corpus)
        begin = Progress() if checkpoint is None else checkpointing.load(checkpoint)
        trainer = Trainer(worker, corpus, checkpointing, stop, record)
        if prepare is not None:
            prepare(trainer, record)
        try:
            record.summary = trainer.train(begin)
        except TrainingDiverged as error:
            record.diverged = str(error)
    return record


def before_updates(trainer: Trainer, look: Callable[[], object]) -> None:
    """Call ``look`` in each step when the gradients are reduced."""
    update = trainer.worker.update_weights

    def watched(*arguments: Any, **options: Any) -> StepResult:
        look()
        return update(*arguments, **options)

    trainer.worker.update_weights = watched  # type: ignore[method-assign]


def receive(trainer: Trainer, record: Record, *, number: signal.Signals, rank: int) -> None:
    """Send one rank a signal in the middle of its third step."""

    def look() -> None:
        if len(record.steps) == 2 and trainer.worker.context.rank == rank:
            os.kill(os.getpid(), number)

    before_updates(trainer, look)

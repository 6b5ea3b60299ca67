"""The training loop.

    for each step:  learning rate(steps taken), micro-batches(samples) -> worker -> metrics
                    now and then: validation
                    now and then, at the end, when told to stop: checkpoint

Every rank runs the same loop. The worker returns what they must agree on (loss, norm, whether the
step was skipped, whether to stop), the same on every rank. Rank 0's observer reports.
"""

import math
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn, Protocol

from megaspeed.checkpoint.run_state import Progress
from megaspeed.checkpoint.saving import SaveReport
from megaspeed.data.prepared import PreparedCorpus
from megaspeed.data.stream.loader import ValidationLoader
from megaspeed.model.flops import training_flops_per_token
from megaspeed.topology.failure import during
from megaspeed.training.checkpointing import Checkpointing
from megaspeed.training.device_peak import peak_flops_per_second
from megaspeed.training.metrics import StepMetrics, ValidationMetrics
from megaspeed.training.step_inputs import StepInputs
from megaspeed.training.stop_signal import StopSignal
from megaspeed.training.worker import StepResult, Worker


class TrainingDiverged(RuntimeError):
    """Too many steps in a row had a loss or a gradient norm that is not finite."""


class Observer(Protocol):
    """Who is told what happens; on every rank but 0 nobody listens."""

    def step(self, metrics: StepMetrics) -> None:
        """An optimizer step is over."""

    def validation(self, metrics: ValidationMetrics) -> None:
        """An evaluation is over."""

    def stopping(self, told_by: signal.Signals, step: int) -> None:
        """The run ends with this step, before its time."""

    def saved(self, report: SaveReport) -> None:
        """A checkpoint is written, or could not be."""


@dataclass(frozen=True)
class TrainingSummary:
    """How the run ended.

    Attributes:
        last_step: that was trained.
        last_validation: of this process; None where it evaluated nothing.
        skipped_steps: of the whole run, those before it was resumed included.
        tokens: that this process predicted.
        seconds: that this process trained.
        stopped_by: the signal that ended it; None where it went to its end.
        last_save: of the last step.
    """

    last_step: StepMetrics
    last_validation: ValidationMetrics | None
    skipped_steps: int
    tokens: int
    seconds: float
    stopped_by: signal.Signals | None
    last_save: SaveReport


class Trainer:
    """Trains a run to its last step, or until it is told to stop.

    Args:
        worker: this rank of the run.
        corpus: the prepared data.
        checkpointing: saves the run.
        stop: what this process was told.
        observer: told of each step, evaluation and checkpoint.
    """

    def __init__(
        self,
        worker: Worker,
        corpus: PreparedCorpus,
        checkpointing: Checkpointing,
        stop: StopSignal,
        observer: Observer,
    ) -> None:
        run, context = worker.run, worker.context
        self._run = run
        self._checkpointing = checkpointing
        self._stop = stop
        self._observer = observer
        self.worker = worker
        self._inputs = StepInputs(run, corpus, context)
        self._validation = ValidationLoader(
            corpus,
            self._inputs.shape,
            eval_batches=run.config.training.eval_batches,
            device=context.device,
        )
        self._flops_per_token = training_flops_per_token(
            run.config.model, run.config.data.sequence_length
        )
        self._peak = peak_flops_per_second(context.device, run.precision)
        self._last_save: SaveReport | None = None

    def train(self, begin: Progress) -> TrainingSummary:
        """Runs the steps that follow ``begin``, which is before the run's end.

        Raises:
            TrainingDiverged: loss or gradient norm stay non-finite. Nothing is saved then.
        """
        assert begin.step < self._run.config.training.steps, "nothing is left to train"
        start = time.perf_counter()
        validation: ValidationMetrics | None = None
        stopped_by: signal.Signals | None = None
        progress = begin
        while progress.step < self._run.config.training.steps and stopped_by is None:
            with during(f"step {progress.step + 1}"):
                progress, metrics, stopped_by = self._train_step(progress)
            if self._is_time_to_validate(progress.step):
                with during(f"validation after step {progress.step}"):
                    validation = self._validate(progress.step)
            with during(f"saving after step {progress.step}"):
                self._save(progress, stopped_by)
        self._inputs.close()
        self._report(self._checkpointing.close())
        assert self._last_save is not None, "the last step is always saved"
        return TrainingSummary(
            last_step=metrics,
            last_validation=validation,
            skipped_steps=progress.step - progress.steps_taken,
            tokens=progress.tokens - begin.tokens,
            seconds=time.perf_counter() - start,
            stopped_by=stopped_by,
            last_save=self._last_save,
        )

    def _train_step(self, before: Progress) -> tuple[Progress, StepMetrics, signal.Signals | None]:
        start = time.perf_counter()
        rate = self._inputs.learning_rate(before.steps_taken)
        result = self.worker.train_step(
            self._inputs.load(before.samples), rate, lambda: self._stop.received or 0
        )
        progress = self._after(before, result)
        metrics = self._measure(progress, result, rate, time.perf_counter() - start)
        self._observer.step(metrics)
        if progress.skipped_in_a_row >= self._run.config.training.max_skipped_steps:
            self._give_up(metrics, progress.skipped_in_a_row)
        return progress, metrics, signal.Signals(result.stop_signal) if result.stop_signal else None

    def _after(self, before: Progress, result: StepResult) -> Progress:
        return Progress(
            step=before.step + 1,
            steps_taken=before.steps_taken + (not result.skipped),
            skipped_in_a_row=before.skipped_in_a_row + 1 if result.skipped else 0,
            samples=before.samples + self._run.batch.train_batch_size,
            tokens=before.tokens + self._run.tokens_per_step,
            loss=result.loss if math.isfinite(result.loss) else None,
        )

    def _measure(
        self, progress: Progress, result: StepResult, rate: float, seconds: float
    ) -> StepMetrics:
        tokens = self._run.tokens_per_step
        flops_per_rank = self._flops_per_token * tokens / seconds / self._run.grid.world_size
        return StepMetrics(
            step=progress.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=rate,
            tokens=progress.tokens,
            step_time_seconds=seconds,
            tokens_per_second=tokens / seconds,
            tflops_per_rank=flops_per_rank / 1e12,
            mfu=None if self._peak is None else flops_per_rank / self._peak,
            peak_memory_bytes=list(result.peak_memory_bytes),
            skipped=result.skipped,
        )

    def _give_up(self, metrics: StepMetrics, skipped: int) -> NoReturn:
        culprit = self.worker.first_non_finite_parameter()
        # A save under way is of an earlier step.
        self._report(self._checkpointing.close())
        raise TrainingDiverged(
            f"{skipped} steps in a row (up to step {metrics.step}) were skipped because the loss "
            f"({metrics.loss}) or the gradient norm ({metrics.grad_norm}) is not finite. First "
            f"non-finite gradient: {culprit or 'none, the loss itself is not finite'}. Lower the "
            "learning rate, lengthen its warmup, or set gradient_clipping; "
            f"training.max_skipped_steps ({self._run.config.training.max_skipped_steps}) says how "
            "many are borne."
        )

    def _save(self, progress: Progress, stopped_by: signal.Signals | None) -> None:
        training = self._run.config.training
        if stopped_by is not None:
            self._observer.stopping(stopped_by, progress.step)
        regular = training.save_interval > 0 and progress.step % training.save_interval == 0
        if regular or stopped_by is not None or progress.step == training.steps:
            self._checkpointing.save(progress)
        self._report(self._checkpointing.finished())

    def _report(self, reports: Iterable[SaveReport]) -> None:
        for report in reports:
            self._observer.saved(report)
            self._last_save = report

    def _is_time_to_validate(self, step: int) -> bool:
        if len(self._validation) == 0:
            return False
        training = self._run.config.training
        regular = training.eval_interval > 0 and step % training.eval_interval == 0
        return regular or step == training.steps

    def _validate(self, step: int) -> ValidationMetrics:
        loss = self.worker.evaluate(
            self._validation.micro_batch, len(self._validation), self._validation.predicted_tokens
        )
        metrics = ValidationMetrics.of(step, loss)
        self._observer.validation(metrics)
        return metrics

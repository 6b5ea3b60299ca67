"""The training loop.

    for each step:  learning rate(steps taken), micro-batches(step) -> worker -> metrics
                    now and then: validation

Every rank runs the same loop; what they must agree on (loss, norm, whether the step was skipped)
the worker returns alike on all of them. Rank 0's observer reports.
"""

import time
from dataclasses import dataclass
from typing import Protocol

from megaspeed.config import Run
from megaspeed.data import PreparedCorpus, ValidationLoader
from megaspeed.model import training_flops_per_token
from megaspeed.topology import ParallelContext
from megaspeed.training.device_peak import peak_flops_per_second
from megaspeed.training.memory import peak_memory_by_pipeline_stage
from megaspeed.training.metrics import StepMetrics, ValidationMetrics
from megaspeed.training.step_inputs import StepInputs
from megaspeed.training.worker import StepResult, Worker


class TrainingDiverged(RuntimeError):
    """Too many steps in a row had a loss or a gradient norm that is not finite."""


class Observer(Protocol):
    """Who is told what happens; on every rank but 0 nobody listens."""

    def step(self, metrics: StepMetrics) -> None:
        """An optimizer step is over."""

    def validation(self, metrics: ValidationMetrics) -> None:
        """An evaluation is over."""


@dataclass(frozen=True)
class TrainingSummary:
    """How the run ended."""

    last_step: StepMetrics
    last_validation: ValidationMetrics | None
    skipped_steps: int
    seconds: float


class Trainer:
    """Trains a run from its first step to its last.

    Args:
        run: the resolved run.
        context: this rank's groups.
        corpus: the prepared data.
        observer: told of each step and evaluation.
    """

    def __init__(
        self, run: Run, context: ParallelContext, corpus: PreparedCorpus, observer: Observer
    ) -> None:
        self._run = run
        self._context = context
        self._observer = observer
        self.worker = Worker(run, context)
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
        self._skipped_in_a_row = 0

    def train(self) -> TrainingSummary:
        """Runs all steps; raises ``TrainingDiverged`` where the loss or norm stays non-finite."""
        training = self._run.config.training
        steps_taken = 0
        validation: ValidationMetrics | None = None
        start = time.perf_counter()
        for step in range(1, training.steps + 1):
            step_start = time.perf_counter()
            rate = self._inputs.learning_rate(steps_taken)
            result = self.worker.train_step(self._inputs.load(step - 1), rate)
            steps_taken += not result.skipped
            metrics = self._measure(step, result, rate, time.perf_counter() - step_start)
            self._observer.step(metrics)
            self._watch_skipped_steps(metrics)
            if self._is_time_to_validate(step):
                validation = self._validate(step)
        self._inputs.close()
        return TrainingSummary(
            metrics, validation, training.steps - steps_taken, time.perf_counter() - start
        )

    def _measure(self, step: int, result: StepResult, rate: float, seconds: float) -> StepMetrics:
        tokens = self._run.tokens_per_step
        flops_per_rank = self._flops_per_token * tokens / seconds / self._run.degrees.world_size
        return StepMetrics(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=rate,
            tokens=step * tokens,
            step_time_seconds=seconds,
            tokens_per_second=tokens / seconds,
            tflops_per_rank=flops_per_rank / 1e12,
            mfu=None if self._peak is None else flops_per_rank / self._peak,
            peak_memory_bytes=peak_memory_by_pipeline_stage(self._context),
            skipped=result.skipped,
        )

    def _watch_skipped_steps(self, metrics: StepMetrics) -> None:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if metrics.skipped else 0
        limit = self._run.config.training.max_skipped_steps
        if self._skipped_in_a_row < limit:
            return
        culprit = self.worker.first_non_finite_parameter()
        raise TrainingDiverged(
            f"{limit} steps in a row (up to step {metrics.step}) were skipped because the loss "
            f"({metrics.loss}) or the gradient norm ({metrics.grad_norm}) is not finite. First "
            f"non-finite gradient: {culprit or 'none, the loss itself is not finite'}. Lower the "
            "learning rate, lengthen its warmup, or set gradient_clipping; "
            f"training.max_skipped_steps ({limit}) says how many are borne."
        )

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

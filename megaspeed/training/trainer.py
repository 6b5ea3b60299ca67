"""The training loop.

    for each step:  learning rate(steps taken), micro-batches(samples) -> worker -> metrics
                    at intervals and at the end: validation, samples
                    at intervals, at the end, before an early stop: checkpoint

Every rank runs the same loop. The worker returns the same loss, gradient norm and stop signal on
every rank, so all ranks make the same decisions. Rank 0's observer reports.
"""

import dataclasses
import math
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from megaspeed.checkpoint.run_state import Progress
from megaspeed.checkpoint.writing import SaveReport
from megaspeed.config.errors import shortened
from megaspeed.config.run import SpikeConfig
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data.loader import ValidationLoader
from megaspeed.data.prompts import read_prompts
from megaspeed.model.parameters import training_flops_per_token
from megaspeed.supervision.process_end import StopSignal
from megaspeed.topology.activity import SAVE_TIMEOUTS, START_UP_TIMEOUTS
from megaspeed.training.checkpointing import Checkpointing
from megaspeed.training.metrics import (
    LoadMetrics,
    MixtureMetrics,
    PartMetrics,
    SampleMetrics,
    StepMetrics,
    ValidationMetrics,
    peak_flops_per_second,
)
from megaspeed.training.profile import Profile
from megaspeed.training.replicas import Replicas
from megaspeed.training.samples import write_samples
from megaspeed.training.spikes import deviations_of_spike, is_refused, with_step
from megaspeed.training.worker import StepInputs, StepResult, StopReason, Worker

_MOST_RANKS_NAMED = 4
_MOST_SAMPLES_NAMED = 16


class TrainingDiverged(RuntimeError):
    """Too many steps in a row had a loss or a gradient norm that is not finite, or is a spike."""


class Observer:
    """Receives the events of training. This class ignores them; rank 0's subclass reports them."""

    def step(self, metrics: StepMetrics) -> None:
        """Called after each optimizer step."""

    def compiled(self, seconds: float) -> None:
        """Called after the first step of a run that compiles: how long compilation has taken."""

    def parts(self, metrics: PartMetrics) -> None:
        """Called when the times of the parts of an earlier step are known."""

    def loads(self, metrics: LoadMetrics) -> None:
        """Called after each timed step of a model with experts."""

    def profiled(self, step: int, trace: str) -> None:
        """Called after the last profiled step, with a line about the trace."""

    def validation(self, metrics: ValidationMetrics) -> None:
        """Called after each evaluation."""

    def sampled(self, metrics: SampleMetrics) -> None:
        """Called after the model has continued ``training.sample_prompts``."""

    def stopping(self, stopped_by: str, step: int) -> None:
        """Called if the run stops early, after this step, by a signal or by missing tokens."""

    def saving(self) -> None:
        """Called before each save. An exception ends the run."""

    def saved(self, report: SaveReport) -> None:
        """Called after each save, whether it succeeded or failed."""


@dataclass(frozen=True)
class TrainingSummary:
    """How the run ended."""

    last_step: StepMetrics  # metrics of the last step
    last_validation: ValidationMetrics | None  # since this start
    skipped_steps: int  # number of skipped steps of the run, including steps before it was resumed
    tokens: int  # predicted tokens since this start
    seconds: float  # training time since this start
    last_save: SaveReport  # the report of the last save
    failure: Exception | None = None  # why a stream has no tokens for the next step
    # rank 0's: where the time of the profiled steps went; None if this start has profiled none
    profile: str | None = None


class Trainer:
    """Trains a run to its last step, or until a stop signal or until tokens are missing.

    ``tokens_failed`` returns why a stream gets no more shards; None if it gets them.
    """

    def __init__(
        self,
        worker: Worker,
        corpus: PreparedCorpus,
        checkpointing: Checkpointing,
        stop: StopSignal,
        observer: Observer,
        tokens_failed: Callable[[], Exception | None] = lambda: None,
    ) -> None:
        run, context = worker.run, worker.context
        self._run = run
        self._checkpointing = checkpointing
        self._stop = stop
        self._observer = observer
        self._tokens_failed = tokens_failed
        self.worker = worker
        self._inputs = StepInputs(run, corpus, context)
        self._validation = ValidationLoader(
            corpus,
            self._inputs.shape,
            eval_batches=run.config.training.eval_batches,
            device=context.device,
        )
        training, length = run.config.training, corpus.sequence_length
        self._corpus, self._prompts = corpus, read_prompts(training, corpus.tokenizer, length)
        self._flops_per_token = training_flops_per_token(
            run.config.model, run.config.data.sequence_length
        )
        self._peak = peak_flops_per_second(context.device, run.precision)
        self._spikes = training.skip_spikes or SpikeConfig()
        self._last_save: SaveReport | None = None
        self._profile = Profile(run, context, worker.engine.finish_gathers)

    def train(self, begin: Progress) -> TrainingSummary:
        """Run the steps after ``begin``, which must be before the last step.

        Raises:
            TrainingDiverged: too many steps in a row were skipped. The run saves nothing.
            ReplicasDiffer: copies that must be equal differ. The run saves nothing.
            StreamEnded, RankFailed: a stream has no tokens for the first step. If it has none for
                a later step, the run saves, and the summary has the error.
        """
        config, activity = self._run.config.training, self.worker.context.activity
        assert begin.step < self._run.steps, "nothing is left to train"
        start = time.perf_counter()
        validation: ValidationMetrics | None = None
        stopped_by: StopReason | None = None
        progress, replicas = begin, Replicas(self.worker, begin.step)
        batch = self._run.schedule.batch(begin.step, begin.tokens)
        failure = self._inputs.wait_for_tokens(begin.samples, batch, self._tokens_failed)
        if isinstance(failure, Exception):
            raise failure
        self._stop.can_save = True  # before this, a signal ends the run: nothing is trained yet
        while progress.step < self._run.steps and stopped_by is None:
            # The first step also opens connections, and loads kernels.
            timeouts = START_UP_TIMEOUTS if progress is begin else 1.0
            step = progress.step + 1
            with activity.during(f"step {step}", timeouts=timeouts), self._profile.step(step):
                progress, metrics, stopped_by = self._train_step(progress)
            activity.steps = step
            if self._profile.ends_with(step, stops=stopped_by is not None):
                with activity.during(f"writing the profile of step {step}", timeouts=SAVE_TIMEOUTS):
                    self._observer.profiled(step, self._profile.write(step, self.worker.pipeline))
            if step == begin.step + 1 and self.worker.compilation is not None:
                self._observer.compiled(self.worker.compilation.seconds)
            saves = stopped_by is not None or self._is_due(config.save_interval, step)
            interval = config.check_replicas_interval
            # Copies are also compared before each save, so every checkpoint has equal copies.
            if interval > 0 and (saves or step % interval == 0):
                with activity.during(f"comparing copies after step {step}"):
                    replicas.check(step)
            validates = len(self._validation) > 0 and self._is_due(config.eval_interval, step)
            if (saves or validates) and self._is_timed(step):  # so that its times are shown first
                with activity.during(f"exchanging the times of step {step}"):
                    self._observe(self.worker.timelines_of_last_step())
            if validates:
                with activity.during(f"validation after step {step}"):
                    validation = self._validate(step)
            if self._prompts is not None and self._is_due(config.eval_interval, step):
                with activity.during(f"samples after step {step}"):
                    shape = self._inputs.shape
                    samples = write_samples(self.worker, self._corpus, shape, self._prompts, step)
                    self._observer.sampled(SampleMetrics(step=step, samples=samples))
            with activity.during(f"saving after step {step}", timeouts=SAVE_TIMEOUTS):
                if stopped_by is not None:
                    name = "missing tokens"
                    if isinstance(stopped_by, signal.Signals):
                        name = stopped_by.name
                    self._observer.stopping(name, step)
                if saves:
                    self._observer.saving()
                    self._checkpointing.save(progress)
                self._report(self._checkpointing.finished())
        self._inputs.close()
        with activity.during("waiting for the last save", timeouts=SAVE_TIMEOUTS):
            self._report(self._checkpointing.close())
        assert self._last_save is not None, "the last step is always saved"
        return TrainingSummary(
            last_step=metrics,
            last_validation=validation,
            skipped_steps=progress.step - progress.steps_taken,
            tokens=progress.tokens - begin.tokens,
            seconds=time.perf_counter() - start,
            last_save=self._last_save,
            failure=stopped_by if isinstance(stopped_by, Exception) else None,
            profile=self._profile.table(),
        )

    def _train_step(self, before: Progress) -> tuple[Progress, StepMetrics, StopReason | None]:
        start = time.perf_counter()
        rate = self._inputs.learning_rate(before.steps_taken)
        timeline = self.worker.context.timeline
        if self._is_timed(before.step + 1):
            timeline.begin(before.step + 1)
        refuses = partial(is_refused, self._run.config.training.skip_spikes, before.recent)
        batch = self._run.schedule.batch(before.step, before.tokens)
        self.worker.use_batch(batch)
        load = self._inputs.load(before.samples, batch)
        result = self.worker.train_step(load, rate, self._stop, refuses)
        progress = Progress(
            step=before.step + 1,
            steps_taken=before.steps_taken + (not result.skipped),
            skipped_in_a_row=before.skipped_in_a_row + 1 if result.skipped else 0,
            samples=before.samples + batch,
            tokens=before.tokens + self.worker.phase.tokens_per_step,
            loss=result.loss if math.isfinite(result.loss) else None,
            recent=with_step(self._spikes, before.recent, result.loss, result.grad_norm),
        )
        stopped_by: StopReason | None = None
        if result.stop_signal:
            stopped_by = signal.Signals(result.stop_signal)
        elif progress.step < self._run.steps:
            stopped_by = self._inputs.wait_for_tokens(
                progress.samples,
                self._run.schedule.batch(progress.step, progress.tokens),
                lambda: self._tokens_failed() or self._stop.received,
            )
        timeline.end()
        spike = deviations_of_spike(self._spikes, before.recent, result.loss, result.grad_norm)
        metrics = self._measure(progress, result, rate, time.perf_counter() - start, spike)
        self._observe(result.timelines)  # of an earlier step
        self._observer.step(metrics)
        if result.loads and self._is_timed(progress.step):
            self._observer.loads(LoadMetrics(step=progress.step, loads=list(result.loads)))
        if progress.skipped_in_a_row >= self._run.config.training.max_skipped_steps:
            self._give_up(metrics, progress)
        return progress, metrics, stopped_by

    def _observe(self, timelines: Sequence[Sequence[float]]) -> None:
        parts = PartMetrics.of(timelines)
        if parts is not None:
            self._profile.add_times(timelines)
            self._observer.parts(parts)

    def _measure(
        self,
        progress: Progress,
        result: StepResult,
        rate: float,
        seconds: float,
        spike: float | None,
    ) -> StepMetrics:
        tokens = self.worker.phase.tokens_per_step
        flops_per_rank = self._flops_per_token * tokens / seconds / self._run.grid.world_size
        metrics = StepMetrics(
            step=progress.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=rate,
            tokens=progress.tokens,
            train_batch_size=self.worker.phase.batch.train_batch_size,
            step_time_seconds=seconds,
            tokens_per_second=tokens / seconds,
            tflops_per_rank=flops_per_rank / 1e12,
            mfu=None if self._peak is None else flops_per_rank / self._peak,
            peak_memory_bytes=list(result.peak_memory_bytes),
            skipped=result.skipped,
            spike=spike,
            z_loss=result.z_loss,
        )
        if not result.loads:
            return metrics
        return MixtureMetrics(
            **vars(metrics),
            auxiliary_loss=result.auxiliary_loss,
            load_factors=[max(loads) * len(loads) / max(1, sum(loads)) for loads in result.loads],
        )

    def _give_up(self, metrics: StepMetrics, progress: Progress) -> NoReturn:
        why, where = "is a spike", ""
        if not math.isfinite(metrics.loss + metrics.grad_norm):
            why = "is not finite"
            where = f" In the last of them {self._describe_non_finite(progress)}."
        # A save in progress saves an earlier step, so wait for it.
        self._report(self._checkpointing.close())
        raise TrainingDiverged(
            f"{progress.skipped_in_a_row} steps in a row (up to step {metrics.step}) were skipped "
            f"because the loss ({metrics.loss}) or the gradient norm ({metrics.grad_norm}) {why}."
            f"{where} The likely cause is a learning rate that is too high: lower it, lengthen its "
            "warmup, or set gradient_clipping; the limit is training.max_skipped_steps "
            f"({self._run.config.training.max_skipped_steps})."
        )

    def _describe_non_finite(self, progress: Progress) -> str:
        """The ranks, micro-batches and samples whose loss is not finite.

        If every loss is finite, names the first gradient that is not finite.
        """
        ranks = self.worker.non_finite()
        before = progress.samples - self.worker.phase.batch.train_batch_size
        named = []
        for rank, found in enumerate(ranks):
            at = self._run.grid.coordinates_of(rank)
            if not found.micro_batches or at.tp > 0:  # tensor ranks have copies of one loss
                continue
            shape = dataclasses.replace(self._inputs.shape, dp_rank=at.dp)
            samples = [before + row for m in found.micro_batches for row in shape.rows(m)]
            more = ", ..." if len(samples) > _MOST_SAMPLES_NAMED else ""
            named.append(
                f"{self._run.grid.name_of(rank)} in micro-batch "
                f"{', '.join(map(str, found.micro_batches))} (samples "
                f"{', '.join(map(str, samples[:_MOST_SAMPLES_NAMED]))}{more})"
            )
        if named:
            return f"the loss is not finite on {'; '.join(shortened(named, _MOST_RANKS_NAMED))}"
        for rank, found in enumerate(ranks):
            if found.parameter is not None:
                return (
                    "every loss is finite; the first gradient that is not finite is "
                    f"{found.parameter} on rank {rank}"
                )
        return "every loss and every gradient is finite, but a sum of them is not"

    def _is_due(self, interval: int, step: int) -> bool:
        """True every ``interval`` steps, unless it is 0, and after the last step of the run."""
        is_last = step == self._run.steps
        return is_last or (interval > 0 and step % interval == 0)

    def _is_timed(self, step: int) -> bool:
        """True for every ``log_interval``-th step and for profiled ones. So timing costs little."""
        return step % self._run.config.training.log_interval == 0 or self._profile.covers(step)

    def _report(self, reports: Iterable[SaveReport]) -> None:
        for report in reports:
            self._observer.saved(report)
            self._last_save = report

    def _validate(self, step: int) -> ValidationMetrics:
        loss = self.worker.evaluate(
            self._validation.micro_batch, len(self._validation), self._validation.predicted_tokens
        )
        metrics = ValidationMetrics.of(step, loss)
        self._observer.validation(metrics)
        return metrics

"""Throughput, utilization, days and cost, computed from a predicted step time.

Run, Cluster --> StepTime --> tokens a second, MFU, warnings
tokens of the training, price --> days, GPU-hours, dollars
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megaspeed.config.resolve import Run
from megaspeed.files.json_values import picked
from megaspeed.model.parameters import training_flops_per_token
from megaspeed.planning.cluster import ClusterConfig
from megaspeed.planning.costs.step_time import GROUPED_PRODUCTS, StepTime, predict_step_time
from megaspeed.planning.costs.workload import Cluster, attended_tokens, workload_of

TYPICAL_FACTOR = 1.24
"""Fitted to 34 published runs that determine no other constant: nine of ten take between 1 / this
and this many times the predicted time, whether runs or sources have equal weight
(``scripts/benchmark_plan.py``)."""

LARGE_FACTOR = TYPICAL_FACTOR**2
"""The same for runs with more than ``MUCH_COMMUNICATION``, or with steps below ``SHORT_STEP``. This
is an assumption, because most such published runs are of nanotron. It holds for 21 of 22 of
them."""

MUCH_COMMUNICATION = 0.3
"""Fraction of a step that collectives and sends take."""

SHORT_STEP = 0.5
"""Seconds."""

_WITHOUT_BF16 = ("v100", "t4")


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The predicted step of a run on a cluster."""

    run: Run
    cluster: Cluster
    step: StepTime

    @property
    def seconds(self) -> float:
        return self.step.total

    @property
    def factor(self) -> float:
        """The factor between prediction and measurement that nine of ten runs do not exceed."""
        return LARGE_FACTOR if self._is_short or self._waits_much else TYPICAL_FACTOR

    @property
    def _is_short(self) -> bool:
        return self.seconds < SHORT_STEP and self.cluster.measured is None

    @property
    def _waits_much(self) -> bool:
        return self.step.communication > MUCH_COMMUNICATION

    @property
    def interval_seconds(self) -> tuple[float, float]:
        """Seconds between which the step is, if it is one of these nine."""
        return self.seconds / self.factor, self.seconds * self.factor

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all data ranks a second."""
        return self.run.tokens_per_step / self.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization (Chowdhery et al. 2022, PaLM, section 4.1).

        Useful operations a second as a fraction of the devices' dense peak. Operations that are
        computed again do not count. Attention counts as the full square. None if the table has no
        peak of the run's precision.
        """
        return self._utilization(self.run.config.data.sequence_length)

    @property
    def mfu_causal(self) -> float | None:
        """The same, but attention counts as what the causal mask and the window leave."""
        config = self.run.config
        # The FLOPs of attention are proportional to the number of tokens that each attends to.
        return self._utilization(round(attended_tokens(config.model, config.data.sequence_length)))

    def _utilization(self, attended: int) -> float | None:
        device = self.cluster.device
        peak = device.peak_fp32 if self.run.precision == "fp32" else device.peak_16
        if peak == 0:
            return None
        flops = training_flops_per_token(self.run.config.model, attended)
        return flops * self.tokens_per_second / (self.run.grid.world_size * peak * 1e12)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What slows the step or makes the prediction less certain."""
        return tuple(self._warnings())

    def _warnings(self) -> Iterator[str]:
        if self._waits_much:
            yield (
                f"communication takes {self.step.communication:.0%} of the step; above "
                f"{MUCH_COMMUNICATION:.0%} the prediction is less certain"
            )
        if self._is_short:
            yield (
                f"the step is shorter than {SHORT_STEP} s; the time that the host needs to start "
                "kernels is not predicted"
            )
        device = self.cluster.device.name
        if self.run.precision == "bf16" and device.startswith(_WITHOUT_BF16):
            yield f"{device} does not compute in bf16; the time is that of fp16"
        if self.run.config.model.num_experts is not None and self.cluster.measured is None:
            yield (
                f"grouped products of experts are assumed to have {GROUPED_PRODUCTS:.0%} of the "
                "rate of other products; this is not measured on a GPU"
            )
        zero = self.run.config.zero_optimization
        if zero.offloads_optimizer or zero.offloads_parameters:
            yield "the time of offloading (copies, the host's optimizer) is not predicted"
        if self.run.precision == "fp32" and self.run.config.training.allow_tf32:
            yield "training.allow_tf32 is not predicted: the time is that of fp32"

    def as_json(self) -> dict[str, Any]:
        return {
            **picked(self, "seconds", "interval_seconds", "tokens_per_second", "mfu", "mfu_causal"),
            "communication_fraction": self.step.communication,
            **picked(self, "warnings"),
            "terms_seconds": self.step.terms,
        }


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """The time of the steps of a training that have the same batch, one after the other."""

    first_step: int  # from 1
    steps: int
    train_batch_size: int
    step_seconds: float
    days: float


@dataclass(frozen=True, kw_only=True)
class TrainingTime:
    """The time of all steps of a training, and what it costs.

    Validations, saves and failures are not included. Llama 3 trained for more than 90 % of the
    wall-clock time on 16,384 GPUs (Dubey et al. 2024, section 3.3.4).
    """

    tokens: int
    steps: int  # optimizer steps
    days: float
    gpus: int  # GPUs that are paid for, including spare ones
    gpu_hours: float  # of all these GPUs together
    dollars: float | None  # None if no price is stated
    phases: tuple[PhaseTime, ...]  # in order; one if the batch does not change


def complete_training(
    predicted: Forecast, stated: ClusterConfig, tokens: int | None = None
) -> TrainingTime:
    """Return the complete training on ``tokens``; by default, the length of the run."""
    run, price = predicted.run, stated.dollars_per_gpu_hour
    length = run.config.data.sequence_length
    tokens = tokens or run.config.training.tokens or run.tokens_left()
    phases = []
    for each in run.schedule.stretches(length, all_tokens=tokens):
        seconds = predicted.seconds
        if each.batch != run.batch.train_batch_size:
            seconds = forecast(run.phases[each.batch], predicted.cluster, simulates=True).seconds
        phases.append(
            PhaseTime(
                first_step=each.step + 1,
                steps=each.steps,
                train_batch_size=each.batch,
                step_seconds=seconds,
                days=each.steps * seconds / 86_400,
            )
        )
    hours = sum(phase.days for phase in phases) * 24
    gpus = stated.gpus or run.grid.world_size + run.spare_ranks
    return TrainingTime(
        tokens=tokens,
        steps=sum(phase.steps for phase in phases),
        days=hours / 24,
        gpus=gpus,
        gpu_hours=hours * gpus,
        dollars=None if price is None else price * hours * gpus,
        phases=tuple(phases),
    )


def forecast(run: Run, cluster: Cluster, *, simulates: bool = False) -> Forecast:
    """Predict the step of a run, as ``predict_step_time`` does."""
    work = workload_of(run, cluster.device_type)
    step = predict_step_time(work, cluster, simulates=simulates)
    return Forecast(run=run, cluster=cluster, step=step.scaled(cluster.calibration))

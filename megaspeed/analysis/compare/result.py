"""What a comparison found: the figures of each row, predicted beside measured.

    row (ZeRO-2) -> pipeline stage 0: states, peak, traffic     of the rank that has most
                    pipeline stage 1: ...
                    step time, tokens/s, loss

A row that failed or that the configuration refuses has no figures and says why.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megaspeed.analysis.compare.rank_record import RankRecord
from megaspeed.analysis.compare.variants import Variant
from megaspeed.analysis.costs.memory import MemoryBytes
from megaspeed.analysis.costs.stage_memory import predict_memory
from megaspeed.analysis.costs.traffic import Traffic, predict_traffic
from megaspeed.analysis.verification.comparison import TOLERANCES
from megaspeed.config.resolve import Run

Status = Literal["done", "failed", "refused"]


@dataclass(frozen=True, kw_only=True)
class StagePrediction:
    """What the formulas say of one pipeline stage's ranks."""

    states: MemoryBytes
    peak: MemoryBytes
    traffic: Traffic


@dataclass(frozen=True, kw_only=True)
class StageFigures:
    """One pipeline stage.

    Attributes:
        states, peak: of its rank with the highest peak, in bytes.
        allocator_peak_bytes: the most that the CUDA allocator of one of its ranks had handed out;
            None on a CPU.
        traffic: of its rank that sent most in one step.
        predicted: None for torch's own engines, for which there are no formulas here.
    """

    pipeline_stage: int
    states: MemoryBytes
    peak: MemoryBytes
    allocator_peak_bytes: int | None
    traffic: Traffic
    predicted: StagePrediction | None

    @property
    def peak_bytes(self) -> int:
        """The allocator's on a GPU; on a CPU, where torch has none that counts, the tensors'."""
        return self.peak.total if self.allocator_peak_bytes is None else self.allocator_peak_bytes

    @property
    def traffic_bytes(self) -> int:
        """Over all axes."""
        return sum(self.traffic.values())


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant, and how it went.

    Attributes:
        variant: what was trained.
        reason: why there are no figures; None where there are.
        stages: by pipeline stage.
        step_time_seconds: median, without the first step and the watched one.
        loss: of the last step, in nats per token.
        grad_norm: of the last step, before clipping.
        skipped_steps: that were not taken.
        ranks: what each rank found.
    """

    variant: Variant
    reason: str | None = None
    stages: Sequence[StageFigures] = ()
    step_time_seconds: float = math.nan
    loss: float = math.nan
    grad_norm: float = math.nan
    skipped_steps: int = 0
    ranks: Sequence[RankRecord] = ()

    @property
    def status(self) -> Status:
        """Whether it has figures, failed, or was not allowed to begin with."""
        if self.variant.run is None:
            return "refused"
        return "done" if self.reason is None else "failed"

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks."""
        assert self.variant.run is not None
        return self.variant.run.tokens_per_step / self.step_time_seconds

    @property
    def highest(self) -> StageFigures:
        """The pipeline stage that needs most memory."""
        return max(self.stages, key=lambda stage: stage.peak_bytes)

    @property
    def busiest(self) -> StageFigures:
        """The pipeline stage that sends most."""
        return max(self.stages, key=lambda stage: stage.traffic_bytes)


@dataclass(frozen=True, kw_only=True)
class ComparisonResult:
    """All rows of one run.

    Attributes:
        run: the layout, model, data and batch that the rows share.
        device: on what it ran, in words.
        steps: whose time was taken; one more was watched.
        rows: in the order in which they ran.
    """

    run: Run
    device: str
    steps: int
    rows: Sequence[Row]

    @property
    def done(self) -> list[Row]:
        """The rows that have figures."""
        return [row for row in self.rows if row.status == "done"]

    @property
    def disagreements(self) -> list[str]:
        """Rows whose last loss is not the first row's, each with both numbers.

        A first row that diverged is told alone: its loss is no number to agree with.
        """
        if not self.done:
            return []
        first = self.done[0]
        allowed = allowed_loss_difference(self.run)
        if not math.isfinite(first.loss):
            return [
                f"{first.variant.label} has the loss {first.loss:.9g}, with which none can agree; "
                "lower the learning rate or lengthen its warmup"
            ]
        # Written so that a loss that is not a number never agrees.
        return [
            f"{row.variant.label}: loss {row.loss:.9g}, but {first.variant.label} has "
            f"{first.loss:.9g}; relative difference {_relative(row.loss, first.loss):.1e}, "
            f"{allowed:.0e} allowed in {self.run.precision}"
            for row in self.done
            if not _relative(row.loss, first.loss) <= allowed
        ]

    @property
    def succeeded(self) -> bool:
        """Whether no row failed and all that trained, trained the same model."""
        return not self.disagreements and all(row.status != "failed" for row in self.rows)


def predict_stages(variant: Variant, device_type: str) -> list[StagePrediction] | None:
    """By pipeline stage; None for a variant that is not ZeRO's or not allowed."""
    run = variant.run
    if run is None or variant.engine != "zero":
        return None
    return [_predict(run, stage, device_type) for stage in range(run.grid.pp)]


def finished_row(
    variant: Variant, records: Sequence[RankRecord], predicted: Sequence[StagePrediction] | None
) -> Row:
    """The row of a variant whose ranks have all come to the end."""
    by_stage: dict[int, list[RankRecord]] = {}
    for record in records:
        by_stage.setdefault(record.pipeline_stage, []).append(record)
    return Row(
        variant=variant,
        stages=[
            _stage_figures(stage, by_stage[stage], None if predicted is None else predicted[stage])
            for stage in sorted(by_stage)
        ],
        # Ranks wait for each other, so they differ by little; the slowest counts.
        step_time_seconds=max(statistics.median(r.step_times_seconds[1:]) for r in records),
        loss=records[0].losses[-1],
        grad_norm=records[0].grad_norm,
        skipped_steps=records[0].skipped_steps,
        ranks=tuple(records),
    )


def allowed_loss_difference(run: Run) -> float:
    """Largest relative difference between two rows' losses that is rounding."""
    return TOLERANCES["fp32" if run.precision == "fp32" else "bf16"].loss


def ratio(predicted: int, measured: int) -> float | None:
    """Predicted over measured; None where nothing was measured."""
    return predicted / measured if measured else None


def _predict(run: Run, pipeline_stage: int, device_type: str) -> StagePrediction:
    memory = predict_memory(run, pipeline_stage, device_type=device_type)
    return StagePrediction(
        states=memory.states, peak=memory.peak, traffic=predict_traffic(run, pipeline_stage)
    )


def _stage_figures(
    stage: int, records: Sequence[RankRecord], predicted: StagePrediction | None
) -> StageFigures:
    fullest = max(records, key=lambda record: record.peak.total)
    busiest = max(records, key=lambda record: sum(record.traffic.values()))
    allocators = [r.allocator_peak_bytes for r in records if r.allocator_peak_bytes is not None]
    return StageFigures(
        pipeline_stage=stage,
        states=fullest.states,
        peak=fullest.peak,
        allocator_peak_bytes=max(allocators, default=None),
        traffic=busiest.traffic,
        predicted=predicted,
    )


def _relative(a: float, b: float) -> float:
    return abs(a - b) / abs(b) if b else abs(a)

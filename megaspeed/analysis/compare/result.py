"""The figures of a comparison: for each row, predictions beside measurements; and the verdict.

    row (ZeRO-2) -> pipeline stage 0: states, peak, traffic     of the rank with the most
                    pipeline stage 1: ...
                    step time with its spread, tokens/s, loss

A row that failed or that the configuration does not allow has a reason instead of figures.

The verdict is the row to use here:

1. The candidates are the rows of megaspeed's ZeRO that trained and fit into the memory of a rank.
2. The fastest candidate has the shortest median step. A candidate counts as equally fast if the
   quartiles of its step time overlap with those of the fastest.
3. Of the candidates that are equally fast, the row with the lowest peak is recommended. If several
   peaks are within 5 % of the lowest one, the row among these that sends the fewest bytes is
   recommended.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megaspeed.analysis.costs.memory import MemoryBytes
from megaspeed.analysis.costs.traffic import Traffic
from megaspeed.analysis.units import Spread, readable_memory, three_digits
from megaspeed.analysis.verification.comparison import TOLERANCES, relative_difference
from megaspeed.analysis.watched_step import RankMeasurement
from megaspeed.config.resolve import Run
from megaspeed.model.parameters import parameters_of

Baseline = Literal["ddp", "fsdp"]
Engine = Literal["zero", "ddp", "fsdp"]

_SIMILAR = 1.05


@dataclass(frozen=True, kw_only=True)
class RankRecord(RankMeasurement):
    """What one rank measured. The last step is the one that was watched."""

    losses: Sequence[float]  # of each step, mean over its tokens, in nats
    grad_norm: float  # of the last step, before clipping
    skipped_steps: int  # skipped because the loss or the norm was not finite
    step_times_seconds: Sequence[float]  # of each step but the last
    device: str  # the GPU's name, or "CPU"
    device_memory_bytes: int  # on a CPU, this rank's share of the machine's memory


@dataclass(frozen=True, kw_only=True)
class StageBytes:
    """Memory and traffic of one pipeline stage, as measured or as predicted."""

    states: MemoryBytes  # of the rank whose tensors have the highest peak
    peak: MemoryBytes  # of the same rank
    traffic: Traffic  # what the busiest rank sends in one step
    allocator_peak_bytes: int | None = None  # of the CUDA allocator, the highest of all ranks

    @property
    def peak_bytes(self) -> int:
        """The allocator's peak; if it is unknown, the peak of the tensors."""
        return self.peak.total if self.allocator_peak_bytes is None else self.allocator_peak_bytes

    @property
    def sent_bytes(self) -> int:
        """Sum over all axes and collectives."""
        return sum(self.traffic.values())


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The figures of one pipeline stage."""

    pipeline_stage: int
    measured: StageBytes
    predicted: StageBytes | None  # None for torch's engines, for which there are no formulas here


@dataclass(frozen=True, kw_only=True)
class StepTime(Spread):
    """The time of a step, in seconds."""

    @property
    def median_ms(self) -> str:
        """The median in milliseconds, without the unit."""
        return three_digits(1e3 * self.median)

    @property
    def quartiles_ms(self) -> str:
        """The quartiles in milliseconds, without the unit."""
        return f"{three_digits(1e3 * self.lower)}-{three_digits(1e3 * self.upper)}"

    def __str__(self) -> str:
        return f"{self.median_ms} ms (quartiles {self.quartiles_ms})"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to train the run, and its figures once it has been trained."""

    label: str  # different for every row
    engine: Engine
    run: Run | None  # None if the configuration does not allow it
    reason: str | None = None  # why it is not allowed, or why the training failed
    predicted: Sequence[StageBytes] | None = None  # by pipeline stage; None for torch's engines
    ranks: Sequence[RankRecord] = ()  # empty if the row has no figures

    @property
    def status(self) -> Literal["done", "failed", "refused"]:
        """Whether the row has figures, failed, or is refused by the configuration."""
        if self.run is None:
            return "refused"
        return "done" if self.reason is None else "failed"

    @property
    def stages(self) -> list[Stage]:
        """The figures by pipeline stage."""
        return [
            Stage(
                pipeline_stage=stage,
                measured=_measured([rank for rank in self.ranks if rank.pipeline_stage == stage]),
                predicted=None if self.predicted is None else self.predicted[stage],
            )
            for stage in sorted({rank.pipeline_stage for rank in self.ranks})
        ]

    @property
    def highest(self) -> Stage:
        """The pipeline stage with the highest peak."""
        return max(self.stages, key=lambda stage: stage.measured.peak_bytes)

    @property
    def busiest(self) -> Stage:
        """The pipeline stage that sends the most bytes."""
        return max(self.stages, key=lambda stage: stage.measured.sent_bytes)

    @property
    def peak_bytes(self) -> int:
        """The peak of the fullest rank."""
        return self.highest.measured.peak_bytes

    @property
    def sent_bytes(self) -> int:
        """What the busiest rank sends in one step."""
        return self.busiest.measured.sent_bytes

    @property
    def step_time(self) -> StepTime:
        """The time of a step on the slowest rank, without the first and the last step."""
        times = (StepTime.of(rank.step_times_seconds[1:]) for rank in self.ranks)
        return max(times, key=lambda time: time.median)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together, at the median step time."""
        assert self.run is not None
        return self.run.tokens_per_step / self.step_time.median

    @property
    def loss(self) -> float:
        """The loss of the last step."""
        return self.ranks[0].losses[-1]


def _measured(ranks: Sequence[RankRecord]) -> StageBytes:
    fullest = max(ranks, key=lambda rank: rank.peak.total)
    busiest = max(ranks, key=lambda rank: sum(rank.traffic.values()))
    allocators = [r.allocator_peak_bytes for r in ranks if r.allocator_peak_bytes is not None]
    return StageBytes(
        states=fullest.states,
        peak=fullest.peak,
        traffic=busiest.traffic,
        allocator_peak_bytes=max(allocators, default=None),
    )


@dataclass(frozen=True, kw_only=True)
class ComparisonResult:
    """All rows of one run."""

    run: Run  # the layout, model, data and batch that the rows share
    steps: int  # timed steps, including the first; one more step was watched
    rows: Sequence[Row]  # in the order in which they ran

    @property
    def done(self) -> list[Row]:
        """The rows that have figures."""
        return [row for row in self.rows if row.status == "done"]

    @property
    def device(self) -> str | None:
        """The GPU's name, or "CPU"; None if no row has figures."""
        return self.done[0].ranks[0].device if self.done else None

    @property
    def device_memory_bytes(self) -> int | None:
        """The memory that one rank has; None if no row has figures."""
        return self.done[0].ranks[0].device_memory_bytes if self.done else None

    @property
    def heading(self) -> tuple[str, str, str]:
        """Three lines: layout, batch and model."""
        return describe_run(self.run, self.device)

    @property
    def disagreements(self) -> list[str]:
        """Each row whose last loss differs from the first row's, with both numbers.

        If the first row's loss is not finite, only this is reported. If gradients are compressed,
        losses agree only approximately, so each must just be finite.
        """
        if not self.done:
            return []
        first = self.done[0]
        if not math.isfinite(first.loss):
            return [
                f"{first.label} has loss {first.loss:.9g}, so no row can agree with it; lower the "
                "learning rate or lengthen the warmup"
            ]
        allowed = TOLERANCES["fp32" if self.run.precision == "fp32" else "bf16"].loss
        if self.run.config.parallel.gradient_compression != "none":
            allowed = math.inf
        return [
            f"{row.label}: loss {row.loss:.9g}, but {first.label} has {first.loss:.9g}; the "
            f"relative difference is {difference:.1e}, but only {allowed:.0e} is allowed in "
            f"{self.run.precision}"
            for row in self.done
            # "not <=" instead of ">", because NaN must not agree.
            if not (difference := relative_difference(row.loss, first.loss)) <= allowed
        ]

    @property
    def succeeded(self) -> bool:
        """Whether no row failed and all rows that trained have the same loss."""
        return not self.disagreements and all(row.status != "failed" for row in self.rows)


def describe_run(run: Run, device: str | None) -> tuple[str, str, str]:
    """Three lines: layout, batch and model. The device is omitted if it is None."""
    grid, batch, model = run.grid, run.batch, run.config.model
    elements = sum(parameter.elements for parameter in parameters_of(model).values())
    on_device = f" ({device})" if device else ""
    return (
        f"{run.name}: pp {grid.pp} x dp {grid.dp} x tp {grid.tp} = {grid.world_size} "
        f"ranks{on_device}, {run.precision}",
        f"{batch.train_batch_size} samples of {run.config.data.sequence_length:,} tokens a "
        f"step in {batch.gradient_accumulation_steps} micro-batches of "
        f"{batch.micro_batch_size}",
        f"{model.architecture}: {elements:,} parameters, {model.num_hidden_layers} blocks x "
        f"{model.hidden_size:,}, {model.num_attention_heads} heads, vocabulary "
        f"{model.vocab_size:,} ({'tied' if model.tie_word_embeddings else 'untied'})",
    )


def verdict(result: ComparisonResult) -> str:
    """One sentence with figures: the recommended row, or why no row can be recommended."""
    if result.disagreements:
        return "no row is recommended, because the losses disagree."
    trained = [row for row in result.done if row.engine == "zero"]
    if not trained:
        return "no row is recommended, because no ZeRO row was measured."
    memory = result.device_memory_bytes or 0
    candidates = [row for row in trained if row.peak_bytes <= memory]
    if not candidates:
        lowest = min(trained, key=lambda row: row.peak_bytes)
        return (
            f"no row is recommended, because none fits into the {readable_memory(memory)} of a "
            f"rank; {lowest.label} has the lowest peak, {readable_memory(lowest.peak_bytes)}."
        )
    fastest = min(candidates, key=lambda row: row.step_time.median)
    equal = [row for row in candidates if row.step_time.lower <= fastest.step_time.upper]
    lowest = min(equal, key=lambda row: row.peak_bytes)
    similar = [row for row in equal if row.peak_bytes <= _SIMILAR * lowest.peak_bytes]
    best = min(similar, key=lambda row: row.sent_bytes)
    reasons = [_why(best, fastest, lowest, equal)]
    too_large = [row.label for row in trained if row not in candidates]
    if too_large:
        reasons.append(
            f"the peak of {', '.join(too_large)} exceeds the {readable_memory(memory)} of a rank"
        )
    reasons += [
        f"torch's {row.label} is faster, {row.step_time}"
        for row in result.done
        if row.engine != "zero" and row.step_time.upper < best.step_time.lower
    ]
    if result.steps == 2:
        reasons.append("only one step was measured after the first, so the spread is unknown")
    return f"use {best.label} here (--set {_settings(best)}): {'; '.join(reasons)}."


def _why(best: Row, fastest: Row, lowest: Row, equal: Sequence[Row]) -> str:
    if len(equal) == 1:
        return f"it is the fastest row, with a median step of {best.step_time}"
    *labels, last = [row.label for row in equal]
    others = "" if best is fastest else f", {best.label} {best.step_time}"
    text = (
        f"{', '.join(labels)} and {last} are equally fast within their spread ({fastest.label} "
        f"takes {fastest.step_time}{others}), and of these {best.label}"
    )
    peak = readable_memory(best.peak_bytes)
    if best is lowest:
        return f"{text} has the lowest peak, {peak}"
    return (
        f"{text} sends the fewest bytes, {readable_memory(best.sent_bytes)} a step, at a peak of "
        f"{peak}, close to the lowest, {readable_memory(lowest.peak_bytes)}"
    )


def _settings(row: Row) -> str:
    """The settings for ``--set`` that select this row."""
    assert row.run is not None
    settings = f"zero_optimization.stage={row.run.zero_stage}"
    if row.label != f"ZeRO-{row.run.zero_stage}":
        settings += f" parallel.gradient_reduction={row.run.gradient_reduction}"
    return settings

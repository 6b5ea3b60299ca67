"""The figures of a comparison: for each row, predictions beside measurements; and the verdict.

    row (ZeRO-2) -> pipeline stage 0: states, peak, traffic     of the rank with the most
                    pipeline stage 1: ...
                    the step of each turn, tokens/s, loss

A row that failed has a reason instead of figures. If only its memory and traffic could not be
counted, it has times alone.

    step of a turn   the median on the slowest rank, without the first step
    step of a row    the geometric mean of its turns
    tied             slower than the fastest row by less than the noise (``measurement/turns.py``)

The verdict is the row to use here:

1. The candidates are the rows of megaspeed's ZeRO that trained and fit into the memory of a rank.
2. Those that are tied with the fastest candidate remain; if the noise is not known, all remain.
3. Of these, the row with the lowest peak is recommended. If several peaks are within 5 % of the
   lowest one, the row among these that sends the fewest bytes is recommended, and of several, the
   one with the lowest stage.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megaspeed.config.resolve import Run
from megaspeed.measurement.turns import noise_of
from megaspeed.measurement.verification.comparison import TOLERANCES, relative_difference
from megaspeed.measurement.watched_step import RankMeasurement
from megaspeed.model.parameters import parameters_of
from megaspeed.planning.costs.memory import MemoryBytes
from megaspeed.planning.costs.traffic import Traffic
from megaspeed.units import readable_memory, three_digits

Baseline = Literal["ddp", "fsdp"]
Engine = Literal["zero", "ddp", "fsdp"]

_SIMILAR = 1.05


@dataclass(frozen=True, kw_only=True)
class TimedRank:
    """What one rank measured in one turn."""

    pipeline_stage: int
    losses: Sequence[float]  # of each step, mean over its tokens, in nats
    grad_norm: float  # of the last step, before clipping
    skipped_steps: int  # skipped because the loss or the norm was not finite
    step_seconds: Sequence[float]  # of each step; the first one warms up
    allocator_peak_bytes: int | None  # of torch's CUDA allocator; None on a CPU
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
class Row:
    """One way to train the run, and its figures once it has been trained."""

    label: str  # different for every row
    engine: Engine
    run: Run
    reason: str | None = None  # why the training failed
    predicted: Sequence[StageBytes] | None = None  # by pipeline stage; None for torch's engines
    turns: Sequence[Sequence[TimedRank]] = ()  # turn -> rank; empty if the row has no figures
    watched: Sequence[RankMeasurement] = ()  # by rank; empty if memory and traffic are not known
    unwatched: str | None = None  # why they are not known although the row trained

    @property
    def status(self) -> Literal["done", "failed"]:
        """Whether the row has figures or failed."""
        return "done" if self.reason is None else "failed"

    @property
    def stages(self) -> list[Stage]:
        """Memory and traffic by pipeline stage; empty if they are not known."""
        return [
            Stage(
                pipeline_stage=stage,
                measured=self._measured(stage),
                predicted=None if self.predicted is None else self.predicted[stage],
            )
            for stage in sorted({rank.pipeline_stage for rank in self.watched})
        ]

    def _measured(self, stage: int) -> StageBytes:
        ranks = [rank for rank in self.watched if rank.pipeline_stage == stage]
        fullest = max(ranks, key=lambda rank: rank.peak.total)
        busiest = max(ranks, key=lambda rank: sum(rank.traffic.values()))
        return StageBytes(
            states=fullest.states,
            peak=fullest.peak,
            traffic=busiest.traffic,
            allocator_peak_bytes=self._allocator_peak(stage),
        )

    def _allocator_peak(self, *stages: int) -> int | None:
        """Of these pipeline stages; None on a CPU."""
        ranks = [rank for turn in self.turns for rank in turn if rank.pipeline_stage in stages]
        return max((rank.allocator_peak_bytes or 0 for rank in ranks), default=0) or None

    @property
    def highest(self) -> Stage:
        """The pipeline stage with the highest peak."""
        return max(self.stages, key=lambda stage: stage.measured.peak_bytes)

    @property
    def busiest(self) -> Stage:
        """The pipeline stage that sends the most bytes."""
        return max(self.stages, key=lambda stage: stage.measured.sent_bytes)

    @property
    def peak_bytes(self) -> int | None:
        """The peak of the fullest rank; None if it is not known."""
        if self.watched:
            return self.highest.measured.peak_bytes
        return self._allocator_peak(*(rank.pipeline_stage for rank in self.turns[0]))

    @property
    def sent_bytes(self) -> int | None:
        """What the busiest rank sends in one step; None if it is not known."""
        return self.busiest.measured.sent_bytes if self.watched else None

    @property
    def turn_seconds(self) -> list[float]:
        """The step of each turn."""
        return [
            max(statistics.median(rank.step_seconds[1:]) for rank in turn) for turn in self.turns
        ]

    @property
    def step_seconds(self) -> float:
        """The step of the row."""
        return statistics.geometric_mean(self.turn_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together."""
        return self.run.tokens_per_step / self.step_seconds

    @property
    def loss(self) -> float:
        """The loss of the last step."""
        return self.turns[0][0].losses[-1]


@dataclass(frozen=True, kw_only=True)
class ComparisonResult:
    """All rows of one run."""

    run: Run  # the layout, model, data and batch that the rows share
    turns: int  # of each row
    steps: int  # timed steps of a turn, after one that warms up
    rows: Sequence[Row]  # in the order in which they take turns
    share_of_others: float = 0.0  # of the processors, see ``measurement/turns.py``

    @property
    def done(self) -> list[Row]:
        """The rows that have figures."""
        return [row for row in self.rows if row.status == "done"]

    @property
    def watched(self) -> list[Row]:
        """Those whose memory and traffic are known."""
        return [row for row in self.done if row.watched]

    @property
    def device(self) -> str | None:
        """The GPU's name, or "CPU"; None if no row has figures."""
        return self.done[0].turns[0][0].device if self.done else None

    @property
    def device_memory_bytes(self) -> int | None:
        """The memory that one rank has; None if no row has figures."""
        return self.done[0].turns[0][0].device_memory_bytes if self.done else None

    @property
    def heading(self) -> tuple[str, str, str]:
        """Three lines: layout, batch and model."""
        return describe_run(self.run, self.device)

    @property
    def disagreements(self) -> list[str]:
        """Each row whose last loss differs from the first row's, with both numbers.

        If the first row's loss is not finite, only this is reported. With compressed gradients,
        losses agree only approximately, so they must only be finite.
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
        """Whether no row failed, all figures are known, and all losses are the same."""
        complete = all(row.status != "failed" and row.unwatched is None for row in self.rows)
        return complete and not self.disagreements

    @property
    def noise(self) -> float | None:
        """The relative difference of two rows' steps that chance explains; None if not known."""
        return noise_of([row.turn_seconds for row in self.done])

    def slower(self, row: Row, than: Row) -> float:
        """How much longer a row's step takes than another's in the same turns, as a fraction."""
        pairs = zip(row.turn_seconds, than.turn_seconds, strict=False)
        return statistics.geometric_mean(a / b for a, b in pairs) - 1

    def is_tied(self, row: Row, fastest: Row) -> bool:
        """Whether the noise explains by how much a row is slower."""
        return self.noise is None or self.slower(row, fastest) <= self.noise


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
    peaks = {row.label: row.peak_bytes for row in trained if row.peak_bytes is not None}
    if not peaks:
        return "no row is recommended, because no row's memory was measured."
    memory = result.device_memory_bytes or 0
    candidates = [row for row in trained if peaks.get(row.label, math.inf) <= memory]
    if not candidates:
        lowest = min(peaks, key=peaks.__getitem__)
        return (
            f"no row is recommended, because none fits into the {readable_memory(memory)} of a "
            f"rank; {lowest} has the lowest peak, {readable_memory(peaks[lowest])}."
        )
    fastest = min(candidates, key=lambda row: row.step_seconds)
    tied = [row for row in candidates if result.is_tied(row, fastest)]
    lowest_peak = min(peaks[row.label] for row in tied)
    similar = [row for row in tied if peaks[row.label] <= _SIMILAR * lowest_peak]
    best = min(similar, key=lambda row: math.inf if row.sent_bytes is None else row.sent_bytes)
    reasons = [_why(best, tied, peaks[best.label], lowest_peak)]
    too_large = [label for label, peak in peaks.items() if peak > memory]
    if too_large:
        reasons.append(
            f"the peak of {', '.join(too_large)} exceeds the {readable_memory(memory)} of a rank"
        )
    reasons += [
        f"torch's {row.label} is faster, {three_digits(1e3 * row.step_seconds)} ms"
        for row in result.done
        if row.engine != "zero" and not result.is_tied(best, row)
    ]
    return f"use {best.label} here (--set {_settings(best)}): {'; '.join(reasons)}."


def _why(best: Row, tied: Sequence[Row], peak: int, lowest_peak: int) -> str:
    if len(tied) == 1:
        return f"it is the fastest row, {three_digits(1e3 * best.step_seconds)} ms a step"
    *labels, last = [row.label for row in tied]
    text = f"{', '.join(labels)} and {last} are tied, and of these {best.label}"
    if peak == lowest_peak:
        return f"{text} has the lowest peak, {readable_memory(peak)}"
    if best.sent_bytes is not None:
        text += f" sends the fewest bytes, {readable_memory(best.sent_bytes)} a step, and"
    return f"{text} has a peak of {readable_memory(peak)} (lowest: {readable_memory(lowest_peak)})"


def _settings(row: Row) -> str:
    """The settings for ``--set`` that select this row."""
    settings = f"zero_optimization.stage={row.run.zero_stage}"
    if row.label != f"ZeRO-{row.run.zero_stage}":
        settings += f" parallel.gradient_reduction={row.run.gradient_reduction}"
    return settings

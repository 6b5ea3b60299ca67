"""``megaspeed compare``: one run, trained at each ZeRO stage and with torch's own DDP and FSDP2.

    ZeRO-0, ZeRO-1    one row: gradients are reduced once a step
    ZeRO-2, ZeRO-3    two rows if a step has several micro-batches: reducing after each of them
                      takes less memory, reducing once sends less; with several chunks also a row
                      that reduces once a visit
    DDP, FSDP2        DDP reduces once a step; FSDP2 has the same two rows as ZeRO-3

    row (ZeRO-2) -> pipeline stage 0: states, peak, traffic     of the rank with the most
                    pipeline stage 1: ...
                    the step of each turn, tokens/s, loss

    step of a turn   the median on the slowest rank, without the first step
    step of a row    the geometric mean of its turns
    tied             slower than the fastest row by less than the noise (``turns``)

In the first turn, one more step, which is not compiled, counts memory and traffic. The verdict is
the row to use here:

1. The candidates are the rows of megaspeed's ZeRO that trained and fit into the memory of a rank.
2. Those that are tied with the fastest candidate remain; if the noise is not known, all remain.
3. Of these, the row with the lowest peak is recommended. If several peaks are within 5 % of the
   lowest one, the row among these that sends the fewest bytes is recommended, and of several, the
   one with the lowest stage.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import World
from megaspeed.config.resolve import GradientReduction, Run, resolve_run
from megaspeed.measurement.local_ranks import DeviceType
from megaspeed.measurement.report import Bar, Column, Report, ReportPart, Table
from megaspeed.measurement.torch_trainers import Ddp, Fsdp2, refusal
from megaspeed.measurement.turns import MeasuredRow, Result, noise_of
from megaspeed.measurement.verification.comparison import TOLERANCES, relative_difference
from megaspeed.measurement.watched_step import RankMeasurement
from megaspeed.planning.costs.memory import MemoryBytes
from megaspeed.planning.costs.stage_memory import StageMemory
from megaspeed.planning.costs.traffic import Traffic, by_axis, predict_traffic
from megaspeed.training.worker import Worker
from megaspeed.units import Unit, counted, in_ms, memory_unit, readable_memory, three_digits

_SIMILAR = 1.05


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
class ComparedRow(MeasuredRow):
    """A ZeRO stage of megaspeed, or an engine of torch."""

    predicted: Sequence[StageBytes] | None = None  # by pipeline stage; None for torch's engines

    @property
    def measured(self) -> list[StageBytes]:
        """By pipeline stage; empty if memory and traffic are not known."""
        stages: dict[int, list[RankMeasurement]] = {}
        for rank in self.extras:
            stages.setdefault(rank.pipeline_stage, []).append(rank)
        return [self._of_stage(stages[stage]) for stage in sorted(stages)]

    def _of_stage(self, ranks: Sequence[RankMeasurement]) -> StageBytes:
        fullest = max(ranks, key=lambda rank: rank.peak.total)
        busiest = max(ranks, key=lambda rank: sum(rank.traffic.values()))
        return StageBytes(
            states=fullest.states,
            peak=fullest.peak,
            traffic=busiest.traffic,
            allocator_peak_bytes=self._allocator_peak([rank.rank for rank in ranks]),
        )

    def _allocator_peak(self, ranks: Sequence[int]) -> int | None:
        """Of these ranks in any turn; None on a CPU."""
        timed = [turn[rank] for turn in self.turns for rank in ranks]
        return max((rank.peak_bytes for rank in timed if rank.device.name != "CPU"), default=None)

    @property
    def peak_bytes(self) -> int | None:
        """The peak of the fullest rank; None if it is not known."""
        if self.extras:
            return max(stage.peak_bytes for stage in self.measured)
        return self._allocator_peak(range(len(self.turns[0])))

    @property
    def sent_bytes(self) -> int | None:
        """What the busiest rank sends in one step; None if it is not known."""
        return max((stage.sent_bytes for stage in self.measured), default=None)

    @property
    def turn_seconds(self) -> list[float]:
        """The step of each turn."""
        return [max(statistics.median(rank.step_seconds) for rank in turn) for turn in self.turns]

    @property
    def step_seconds(self) -> float:
        return statistics.geometric_mean(self.turn_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together."""
        return self.run.tokens_per_step / self.step_seconds


def zero_rows(run: Run, zero_stages: Sequence[int], device_type: DeviceType) -> list[ComparedRow]:
    """Return a row for each ZeRO stage, or more if ``gradient_reduction`` makes a difference."""
    return [
        _row(run, f"ZeRO-{stage}", Worker, stage, reduction, device_type)
        for stage in sorted(set(zero_stages))
        for reduction in _reductions(run, stage)
    ]


def baseline_rows(run: Run, baselines: Sequence[str], device_type: DeviceType) -> list[ComparedRow]:
    """Return the rows of torch's own data parallelism: "ddp", then "fsdp", if they are named.

    Raises ConfigError if DDP and FSDP2 cannot train this run.
    """
    reason = refusal(run, autocasts="ddp" in baselines) if baselines else None
    if reason is not None:
        problem = f"--baselines {' '.join(baselines)}: {reason}, or omit --baselines"
        raise ConfigError([problem], where=run.name)
    # DDP keeps complete gradients, so it would gain nothing by reducing more than once.
    reductions = {"ddp": (None,), "fsdp": _reductions(run, 3)}
    return [
        _row(run, name, partial(make, watched=True), run.zero_stage, reduction, device_type)
        for baseline, name, make in (("ddp", "DDP", Ddp), ("fsdp", "FSDP2", Fsdp2))
        if baseline in baselines
        for reduction in reductions[baseline]
    ]


def _reductions(run: Run, zero_stage: int) -> tuple[GradientReduction | None, ...]:
    """The reductions that make a difference at this ZeRO stage; (None,) if none does."""
    if run.compression is not None:
        return (None,)
    shards = run.grid.dp_cp // run.config.parallel.replicate
    several = run.batch.gradient_accumulation_steps > 1 and shards > 1
    if zero_stage < 2 or not several:
        return (None,)
    if run.config.parallel.virtual_stages > 1:
        return "per_micro_batch", "per_visit", "per_step"
    return "per_micro_batch", "per_step"


def _row(
    run: Run,
    name: str,
    make: Callable[..., Any],
    zero_stage: int,
    reduction: GradientReduction | None,
    device_type: DeviceType,
) -> ComparedRow:
    """A row that trains ``run`` at this ZeRO stage.

    If ``reduction`` is None, gradients are reduced once a step. PowerSGD starts at step 1, because
    the first steps are measured.
    """
    keys: dict[str, Any] = {
        "zero_optimization.stage": zero_stage,
        "parallel.gradient_reduction": reduction or "per_step",
    }
    if zero_stage == 0 or name == "DDP":  # all ranks are replicas
        keys["parallel.replicate"] = 1
        if run.compression is not None and run.config.parallel.replicate > 1:
            keys["zero_optimization.overlap_comm"] = None  # refused without replicas
    resolved = resolve_run(
        run.config.compressed_from_step_1().changed(keys),
        World(run.grid.world_size, "--world-size", device_type),
        name=run.name,
    )
    return ComparedRow(
        label=name if reduction is None else f"{name} {reduction}",
        run=resolved,
        make=make,
        predicted=_predict(resolved, device_type) if make is Worker else None,
    )


def _predict(run: Run, device_type: DeviceType) -> list[StageBytes]:
    """By pipeline stage, the figures of the step that is measured."""
    if device_type == "cpu":  # on a GPU, the peak is the allocator's in the timed steps
        run = replace(run, config=run.config.changed({"training.compile": False}))
    predicted = []
    for stage in range(run.grid.pp):
        memory = StageMemory(run, stage, device_type=device_type)
        traffic = predict_traffic(run, stage, device_type)
        predicted.append(StageBytes(states=memory.states, peak=memory.peak, traffic=traffic))
    return predicted


@dataclass(frozen=True, kw_only=True)
class ComparisonResult(Result[ComparedRow]):
    """All rows of one run."""

    run: Run  # the layout, model, data and batch that the rows share

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
        """Whether every row took all its turns, and all losses agree."""
        return super().succeeded and not self.disagreements

    @property
    def noise(self) -> float | None:
        """The relative difference of two rows' steps that chance explains; None if not known."""
        return noise_of([row.turn_seconds for row in self.done])

    def slower(self, row: ComparedRow, than: ComparedRow) -> float:
        """Return how much longer a row's step takes in the same turns, as a fraction."""
        pairs = zip(row.turn_seconds, than.turn_seconds, strict=False)
        return statistics.geometric_mean(a / b for a, b in pairs) - 1

    def is_tied(self, row: ComparedRow, fastest: ComparedRow) -> bool:
        """Return whether the noise explains by how much a row is slower."""
        return self.noise is None or self.slower(row, fastest) <= self.noise

    @property
    def notes(self) -> Iterator[str]:
        """Yield what went wrong, and what limits the figures."""
        for text in self.disagreements:
            yield f"THE LOSSES DISAGREE: {text}"
        yield from super().notes
        if self.run.config.parallel.gradient_compression != "none":
            yield "gradients are compressed, so the losses agree only approximately"


def verdict(result: ComparisonResult) -> str:
    """Return one sentence with figures: the recommended row, or why no row can be recommended."""
    if result.disagreements:
        return "no row is recommended, because the losses disagree."
    trained = [row for row in result.done if row.predicted is not None]
    if not trained:
        return "no row is recommended, because no ZeRO row was measured."
    memory = result.device.memory_bytes if result.device is not None else 0
    peaks = {row.label: row.peak_bytes or 0 for row in trained}
    candidates = [row for row in trained if peaks[row.label] <= memory]
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
    best = min(similar, key=lambda row: row.sent_bytes or 0)
    reasons = [_why(best, tied, peaks[best.label], lowest_peak)]
    too_large = [label for label, peak in peaks.items() if peak > memory]
    if too_large:
        reasons.append(
            f"the peak of {', '.join(too_large)} exceeds the {readable_memory(memory)} of a rank"
        )
    reasons += [
        f"torch's {row.label} is faster, {in_ms(row.step_seconds)} ms"
        for row in result.done
        if row.predicted is None and not result.is_tied(best, row)
    ]
    return f"use {best.label} here (--set {_settings(best)}): {'; '.join(reasons)}."


def _why(best: ComparedRow, tied: Sequence[ComparedRow], peak: int, lowest_peak: int) -> str:
    if len(tied) == 1:
        return f"it is the fastest row, {in_ms(best.step_seconds)} ms a step"
    *labels, last = [row.label for row in tied]
    text = f"{', '.join(labels)} and {last} are tied, and of these {best.label}"
    if peak == lowest_peak:
        return f"{text} has the lowest peak, {readable_memory(peak)}"
    sent = readable_memory(best.sent_bytes or 0)
    return (
        f"{text} sends the fewest bytes, {sent} a step, and has a peak of {readable_memory(peak)} "
        f"(lowest: {readable_memory(lowest_peak)})"
    )


def _settings(row: ComparedRow) -> str:
    """The settings for ``--set`` that select this row."""
    settings = f"zero_optimization.stage={row.run.zero_stage}"
    if row.label != f"ZeRO-{row.run.zero_stage}":
        settings += f" parallel.gradient_reduction={row.run.gradient_reduction}"
    return settings


def report(result: ComparisonResult) -> Report:
    """Return the report: memory and traffic by pipeline stage, a line for each row, the verdict."""
    memory = memory_unit(row.peak_bytes or 0 for row in result.timed)
    traffic = memory_unit(row.sent_bytes or 0 for row in result.timed)
    parts: list[ReportPart] = [
        "By pipeline stage, with predicted / measured in brackets. States: of the model, between "
        "micro-batches. Peak: of the fullest rank. Sent: by the busiest rank in one step. They are "
        "those of a step without compilation.",
        _stage_table(result, memory, traffic),
        _describe_noise(result),
        _row_table(result, memory, traffic),
        f"verdict: {verdict(result)}",
    ]
    return Report(
        title=f"{result.run.name}: ZeRO stages compared",
        run=result.run,
        result=result,
        parts=parts,
        facts={"noise": result.noise, "verdict": verdict(result)},
        unit=f"peak of the fullest rank ({memory.name})",
        bars=[_bar(row, memory) for row in result.timed if row.extras],
    )


def _row_table(result: ComparisonResult, memory: Unit, traffic: Unit) -> Table:
    fastest = min(result.done, key=lambda row: row.step_seconds, default=None)

    def slower(row: ComparedRow) -> str | None:
        if fastest is None or row is fastest:
            return None if fastest is None else "fastest"
        return "tied" if result.is_tied(row, fastest) else f"+{result.slower(row, fastest):.1%}"

    columns = [
        Column("label", lambda row: row.label, "row"),
        Column("step_time_seconds", lambda row: row.step_seconds, "step ms", in_ms),
        Column("slower", slower, "slower"),
        Column(
            "tokens_per_second", lambda row: row.tokens_per_second, "tokens/s", "{:,.0f}".format
        ),
        Column("peak_bytes", lambda row: row.peak_bytes, f"peak {memory.name}", memory.of),
        Column("sent_bytes", lambda row: row.sent_bytes, f"sent {traffic.name}", traffic.of),
        Column("zero_stage", lambda row: row.run.zero_stage if row.predicted else None),
        Column("gradient_reduction", lambda row: row.run.gradient_reduction),
        Column("turn_seconds", lambda row: row.turn_seconds),
        Column("losses", lambda row: row.losses),
        Column("grad_norm", lambda row: row.turns[0][0].grad_norm),
    ]
    return Table("rows", columns, result.timed)


def _stage_table(result: ComparisonResult, memory: Unit, traffic: Unit) -> Table:
    """A line for each row and pipeline stage."""

    def column(
        key: str, name: str, unit: Unit, figures: Callable[[StageBytes], dict[str, Any]]
    ) -> Column:
        def value(row: tuple[ComparedRow, int]) -> dict[str, Any]:
            each, stage = row
            predicted = None if each.predicted is None else figures(each.predicted[stage])
            return {"measured": figures(each.measured[stage]), "predicted": predicted}

        def text(value: dict[str, Any]) -> str:
            measured, predicted = value["measured"]["total"], value["predicted"]
            known = predicted is not None and measured
            return unit.of(measured) + (f" ({predicted['total'] / measured:.2f})" if known else "")

        return Column(key, value, f"{name} {unit.name}", text)

    def sent(stage: StageBytes) -> dict[str, Any]:
        return {**by_axis(stage.traffic), "total": stage.sent_bytes}

    columns = [
        Column("label", lambda row: row[0].label, "row"),
        Column("pipeline_stage", lambda row: row[1], "stage"),
        column("states_bytes", "states", memory, lambda stage: _memory(stage.states)),
        column("peak_bytes", "peak", memory, lambda stage: _memory(stage.peak, stage.peak_bytes)),
        column("traffic_bytes", "sent", traffic, sent),
    ]
    rows = [(row, stage) for row in result.timed for stage in range(len(row.measured))]
    return Table("pipeline_stages", columns, rows)


def _memory(memory: MemoryBytes, total: int | None = None) -> dict[str, int]:
    """Category -> bytes, and the total. The allocator's peak exceeds the sum of the categories."""
    return {**asdict(memory), "total": memory.total if total is None else total}


def _describe_noise(result: ComparisonResult) -> str:
    text = f"{counted(result.turns, 'turn')} of {counted(result.steps, 'timed step')} each. "
    if result.noise is None:
        return text + "The noise is not known, so all rows count as tied: raise --turns."
    noise = f"{result.noise:.1%}" if result.noise < 1 else "over 100%"
    return text + (
        f"The noise is {noise}: equally fast rows differ by less in 99 of 100 comparisons. Rows "
        "that are slower than the fastest by less are tied. More --turns lower the noise."
    )


def _bar(row: ComparedRow, unit: Unit) -> Bar:
    """The peak of the row's fullest stage by category, predicted beside measured."""
    measured = row.measured
    stage = max(range(len(measured)), key=lambda stage: measured[stage].peak_bytes)

    def in_unit(memory: MemoryBytes) -> dict[str, float]:
        return {name.replace("_", " "): size / unit.size for name, size in asdict(memory).items()}

    return Bar(
        label=row.label,
        parts=in_unit(measured[stage].peak),
        predicted=None if row.predicted is None else in_unit(row.predicted[stage].peak),
        text=three_digits(measured[stage].peak_bytes / unit.size),
    )

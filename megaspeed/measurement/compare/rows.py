"""The rows of a comparison, and the figures of each: predictions beside measurements.

    ZeRO-0, ZeRO-1    one row: gradients are reduced once a step
    ZeRO-2, ZeRO-3    two rows if a step has several micro-batches: reducing after each of them
                      takes less memory, reducing once sends less
    DDP, FSDP2        DDP reduces once a step; FSDP2 has the same two rows as ZeRO-3

    row (ZeRO-2) -> pipeline stage 0: states, peak, traffic     of the rank with the most
                    pipeline stage 1: ...
                    the step of each turn, tokens/s, loss

    step of a turn   the median on the slowest rank, without the first step
    step of a row    the geometric mean of its turns

In the first turn, one more step, which is not compiled, counts memory and traffic. A row that
failed has a reason instead of figures. If only this step failed, the row has times alone.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import World
from megaspeed.config.resolve import GradientReduction, Run, resolve_run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.measurement.local_ranks import DeviceType
from megaspeed.measurement.timed_steps import Steps, take_turn
from megaspeed.measurement.torch_trainers import Ddp, Fsdp2, refusal
from megaspeed.measurement.turns import Row
from megaspeed.measurement.watched_step import RankMeasurement, WatchedZero
from megaspeed.planning.costs.memory import MemoryBytes
from megaspeed.planning.costs.stage_memory import predict_memory
from megaspeed.planning.costs.traffic import Traffic, predict_traffic

Baseline = Literal["ddp", "fsdp"]
Engine = Literal["zero", "ddp", "fsdp"]

TRAINERS: dict[Engine, Callable[..., Any]] = {
    "zero": WatchedZero.build,
    "ddp": partial(Ddp, watched=True),
    "fsdp": partial(Fsdp2, watched=True),
}


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
class ComparedRow(Row):
    """A ZeRO stage, or an engine of torch."""

    engine: Engine
    predicted: Sequence[StageBytes] | None = None  # by pipeline stage; None for torch's engines

    @property
    def watched(self) -> Sequence[RankMeasurement]:
        """By rank; empty if memory and traffic are not known."""
        return self.extras[0] if self.extras else ()

    @property
    def measured(self) -> list[StageBytes]:
        """By pipeline stage; empty if memory and traffic are not known."""
        stages = sorted({rank.pipeline_stage for rank in self.watched})
        return [self._of_stage(stage) for stage in stages]

    def _of_stage(self, stage: int) -> StageBytes:
        ranks = [rank for rank in self.watched if rank.pipeline_stage == stage]
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
    def fullest_stage(self) -> int:
        """The pipeline stage with the highest peak, if memory is known."""
        peaks = [stage.peak_bytes for stage in self.measured]
        return peaks.index(max(peaks))

    @property
    def peak_bytes(self) -> int | None:
        """The peak of the fullest rank; None if it is not known."""
        if self.measured:
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
        """The step of the row."""
        return statistics.geometric_mean(self.turn_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together."""
        return self.run.tokens_per_step / self.step_seconds


def zero_rows(run: Run, zero_stages: Sequence[int], device_type: DeviceType) -> list[ComparedRow]:
    """Return a row for each ZeRO stage, or two if ``gradient_reduction`` makes a difference."""
    return [
        _row(run, "zero", f"ZeRO-{stage}", stage, reduction, device_type)
        for stage in sorted(set(zero_stages))
        for reduction in _reductions(run, stage)
    ]


def baseline_rows(
    run: Run, baselines: Sequence[Baseline], device_type: DeviceType
) -> list[ComparedRow]:
    """Return the rows of torch's own data parallelism: DDP, then FSDP2.

    Raises:
        ConfigError: DDP and FSDP2 cannot train this run.
    """
    reason = refusal(run) if baselines else None
    if reason is not None:
        problem = f"--baselines {' '.join(baselines)}: {reason}, or omit --baselines"
        raise ConfigError([problem], where=run.name)
    rows = []
    if "ddp" in baselines:
        # DDP keeps complete gradients, so it would gain nothing by reducing more than once.
        rows.append(_row(run, "ddp", "DDP", run.zero_stage, None, device_type))
    if "fsdp" in baselines:
        for reduction in _reductions(run, 3):
            rows.append(_row(run, "fsdp", "FSDP2", run.zero_stage, reduction, device_type))
    return rows


def part_of_turn(
    corpus: PreparedCorpus, steps: Steps, row: ComparedRow, number: int
) -> tuple[Callable[..., Any], *tuple[Any, ...]]:
    """Return what the ranks of a turn call. Only the first one counts memory and traffic."""
    steps = replace(steps, extra="memory" if number == 1 else None)
    return take_turn, TRAINERS[row.engine], row.run, corpus, steps


def _reductions(run: Run, zero_stage: int) -> tuple[GradientReduction | None, ...]:
    """The reductions that make a difference at this ZeRO stage; (None,) if none does."""
    if run.compression is not None:
        return (None,)  # it needs complete gradients
    several = run.batch.gradient_accumulation_steps > 1 and run.grid.dp > 1
    return ("per_micro_batch", "per_step") if zero_stage >= 2 and several else (None,)


def _row(
    run: Run,
    engine: Engine,
    name: str,
    zero_stage: int,
    reduction: GradientReduction | None,
    device_type: DeviceType,
) -> ComparedRow:
    """A row that trains ``run`` at this ZeRO stage.

    If ``reduction`` is None, gradients are reduced once a step. PowerSGD starts at step 1, because
    the first steps are measured.
    """
    keys = {
        "zero_optimization.stage": zero_stage,
        "parallel.gradient_reduction": reduction or "per_step",
    }
    resolved = resolve_run(
        run.config.compressed_from_step_1().changed(keys),
        World(run.grid.world_size, "--world-size", device_type),
        name=run.name,
    )
    return ComparedRow(
        label=name if reduction is None else f"{name} {reduction}",
        engine=engine,
        run=resolved,
        predicted=_predict(resolved, device_type) if engine == "zero" else None,
    )


def _predict(run: Run, device_type: DeviceType) -> list[StageBytes]:
    """By pipeline stage, the figures of the step that is measured."""
    if device_type == "cpu":  # on a GPU, the peak is the allocator's in the timed steps
        run = replace(run, config=run.config.changed({"training.compile": False}))
    predicted = []
    for stage in range(run.grid.pp):
        memory = predict_memory(run, stage, device_type=device_type)
        traffic = predict_traffic(run, stage, device_type)
        predicted.append(StageBytes(states=memory.states, peak=memory.peak, traffic=traffic))
    return predicted

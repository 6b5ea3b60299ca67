"""A comparison with round numbers for checks by hand: pp 2, dp 2, in MiB."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megaspeed.config.resolve import Run
from megaspeed.measurement.compare import ComparedRow, ComparisonResult, StageBytes, zero_rows
from megaspeed.measurement.turns import Device, TimedRank
from megaspeed.measurement.watched_step import RankMeasurement
from megaspeed.planning.costs.memory import MemoryBytes
from tests.support.tiny import tiny_run

MIB = 2**20
TEXT = Path(__file__).parents[3] / "LICENSE"


def run() -> Run:
    """Return a run of 24 samples of 16 tokens a step."""
    return tiny_run(TEXT, pp=2, dp=2)


def watched(rank: int, *, activations: int, sent: int) -> RankMeasurement:
    """Return a rank with 10 MiB of states, and this many MiB of other memory and of traffic."""
    states = MemoryBytes(parameters=2 * MIB, gradients=2 * MIB, optimizer_states=6 * MIB)
    return RankMeasurement(
        rank=rank,
        pipeline_stage=rank // 2,
        states=states,
        peak=replace(states, activations=activations * MIB),
        traffic={
            ("dp", "all_gather"): sent * MIB,
            ("pp", "send"): MIB,
            ("world", "all_reduce"): 24,
        },
    )


def all_watched() -> list[RankMeasurement]:
    """Return all ranks. Rank 1 has the most memory of pipeline stage 0, and rank 2 of stage 1."""
    return [
        watched(0, activations=5, sent=3),
        watched(1, activations=6, sent=2),
        watched(2, activations=2, sent=1),
        watched(3, activations=1, sent=1),
    ]


def turn(*ms: float, loss: float = 2.5) -> list[TimedRank]:
    """Return a turn of four ranks, each 10 ms slower than the previous one."""
    return [
        TimedRank(
            losses=[3.0, 2.75, loss],
            grad_norm=1.5,
            skipped_steps=0,
            step_seconds=[each / 1000 + 0.01 * rank for each in ms],
            peak_bytes=1,
            device=Device(name="CPU", memory_bytes=64 * MIB),
        )
        for rank in range(4)
    ]


def predictions() -> list[StageBytes]:
    """Return predictions: 12 + 8 MiB where 10 + 6 are measured, then 10 + 2 as measured. The
    predicted traffic is correct.
    """
    states = MemoryBytes(parameters=2 * MIB, gradients=2 * MIB, optimizer_states=6 * MIB)
    more = replace(states, gradients=4 * MIB)
    return [
        StageBytes(
            states=more,
            peak=replace(more, activations=8 * MIB),
            traffic={("dp", "all_gather"): 3 * MIB, ("pp", "send"): MIB},
        ),
        StageBytes(
            states=states,
            peak=replace(states, activations=2 * MIB),
            traffic={("dp", "all_gather"): MIB, ("pp", "send"): MIB},
        ),
    ]


def trained(row: ComparedRow, loss: float = 2.5) -> ComparedRow:
    """Return the row with the figures of its ranks and of the formulas."""
    turns = [turn(250, 125, 500, loss=loss)]
    return replace(row, turns=turns, extras=all_watched(), predicted=predictions())


def zero_0() -> ComparedRow:
    """Return ZeRO-0, which has one setting of gradient_reduction."""
    return zero_rows(run(), [0], "cpu")[0]


def zero_2() -> list[ComparedRow]:
    """Return the rows of ZeRO-2, which has two settings of gradient_reduction."""
    return zero_rows(run(), [2], "cpu")


def result(*others: ComparedRow) -> ComparisonResult:
    """Return the result of ZeRO-0 and these rows."""
    rows: Sequence[ComparedRow] = [trained(zero_0()), *others]
    return ComparisonResult(run=run(), turns=1, steps=3, rows=rows)

"""The row that the verdict names, computed by hand from round figures."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from megaspeed.measurement.compare import ComparedRow, ComparisonResult, verdict, zero_rows
from megaspeed.planning.costs.memory import MemoryBytes
from tests.measurement.compare.figures import MIB, run, trained, turn, watched, zero_2

ROWS = zero_rows(run(), [0, 1, 2], "cpu")
"""ZeRO-0, ZeRO-1, ZeRO-2 per_micro_batch, ZeRO-2 per_step."""


def row(index: int, *, ms: Sequence[int], peak: int, sent: int) -> ComparedRow:
    """Return the row at ``index``: its step in each turn in ms, its peak and sent bytes in MiB."""
    measured = replace(
        watched(0, activations=0, sent=0),
        peak=MemoryBytes(parameters=peak * MIB),
        traffic={("dp", "all_reduce"): sent * MIB},
    )
    return replace(ROWS[index], turns=[turn(each)[:1] for each in ms], extras=[measured])


def verdict_on(*rows: ComparedRow) -> str:
    """Return the verdict on a device of 64 MiB."""
    return verdict(ComparisonResult(run=run(), turns=3, steps=1, rows=rows))


def test_the_fastest_row_is_recommended_with_its_time() -> None:
    """Rows have no noise if their ratio is constant while the machine's speed changes."""
    text = verdict_on(
        row(0, ms=[100, 110, 105], peak=60, sent=1), row(1, ms=[200, 220, 210], peak=20, sent=1)
    )
    assert text == (
        "use ZeRO-0 here (--set zero_optimization.stage=0): it is the fastest row, 105 ms a step."
    )


def test_of_rows_within_the_noise_the_one_with_the_lowest_peak_is_recommended() -> None:
    text = verdict_on(
        row(0, ms=[100, 102, 104], peak=60, sent=1), row(1, ms=[106, 104, 102], peak=20, sent=9)
    )
    assert text == (
        "use ZeRO-1 here (--set zero_optimization.stage=1): ZeRO-0 and ZeRO-1 are tied, and of "
        "these ZeRO-1 has the lowest peak, 20.00 MiB."
    )


def test_whichever_of_equal_rows_chance_makes_the_fastest_the_verdict_is_the_same() -> None:
    """There are three runs of three rows with equal bytes. Each time, another row has the best
    turns.
    """
    times = [[100, 104, 101], [103, 101, 105], [102, 103, 99]]
    verdicts = set()
    for shift in range(3):
        order = times[shift:] + times[:shift]
        verdicts.add(verdict_on(*(row(i, ms=ms, peak=20, sent=4) for i, ms in enumerate(order))))
    assert verdicts == {
        "use ZeRO-0 here (--set zero_optimization.stage=0): ZeRO-0, ZeRO-1 and ZeRO-2 "
        "per_micro_batch are tied, and of these ZeRO-0 has the lowest peak, 20.00 MiB."
    }


def test_of_similar_peaks_the_row_that_sends_the_fewest_bytes_is_recommended() -> None:
    text = verdict_on(
        row(0, ms=[100, 102, 104], peak=60, sent=1),
        row(1, ms=[100, 102, 104], peak=21, sent=5),
        row(2, ms=[100, 102, 104], peak=20, sent=9),
    )
    assert text.startswith("use ZeRO-1 here (--set zero_optimization.stage=1): ZeRO-0, ZeRO-1 and ")
    assert text.endswith(
        "of these ZeRO-1 sends the fewest bytes, 5.00 MiB a step, and has a peak of 21.00 MiB "
        "(lowest: 20.00 MiB)."
    )


def test_the_setting_of_the_reduction_is_named_if_the_row_depends_on_it() -> None:
    text = verdict_on(row(3, ms=[100], peak=20, sent=1))
    settings = "zero_optimization.stage=2 parallel.gradient_reduction=per_step"
    assert text.startswith(f"use ZeRO-2 per_step here (--set {settings}): ")


def test_a_row_that_exceeds_the_memory_is_excluded_and_named() -> None:
    text = verdict_on(
        row(0, ms=[100, 110, 105], peak=65, sent=1), row(1, ms=[200, 220, 210], peak=20, sent=1)
    )
    assert text.startswith("use ZeRO-1 here ")
    assert text.endswith("; the peak of ZeRO-0 exceeds the 64.00 MiB of a rank.")


def test_a_failed_row_is_excluded() -> None:
    failed = replace(ROWS[0], failure="out of memory")
    assert verdict_on(failed, row(1, ms=[100], peak=20, sent=1)).startswith("use ZeRO-1 here ")


def test_a_baseline_is_never_recommended_but_named_if_it_is_faster() -> None:
    zero = row(0, ms=[100, 102, 104], peak=20, sent=1)
    ddp = replace(row(1, ms=[50, 51, 52], peak=20, sent=1), predicted=None, label="DDP")
    text = verdict_on(zero, ddp)
    assert text.startswith("use ZeRO-0 here ")
    assert text.endswith("; torch's DDP is faster, 51.0 ms.")
    assert "DDP" not in verdict_on(zero, replace(ddp, turns=zero.turns))


def test_one_turn_does_not_show_the_noise_so_all_rows_are_tied() -> None:
    text = verdict_on(row(0, ms=[100], peak=60, sent=1), row(1, ms=[300], peak=20, sent=1))
    assert text.startswith("use ZeRO-1 here ") and "ZeRO-0 and ZeRO-1 are tied" in text


def test_a_row_whose_memory_could_not_be_counted_is_not_recommended() -> None:
    failed = replace(row(0, ms=[100], peak=20, sent=1), extras=(), failure="killed")
    assert verdict_on(failed, row(1, ms=[300], peak=20, sent=1)).startswith("use ZeRO-1 here ")


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([replace(ROWS[0], failure="killed")], "no ZeRO row was measured."),
        ([row(0, ms=[1], peak=70, sent=1), row(1, ms=[1], peak=66, sent=1)], "ZeRO-1 has the low"),
        ([trained(ROWS[0]), trained(zero_2()[0], loss=2.6)], "the losses disagree."),
    ],
    ids=["all failed", "none fits", "the losses disagree"],
)
def test_the_verdict_states_why_no_row_is_recommended(rows: list[ComparedRow], reason: str) -> None:
    text = verdict_on(*rows)
    assert text.startswith("no row is recommended, because ") and reason in text

"""The row that the verdict names, computed by hand from round figures."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from megaspeed.analysis.compare.result import ComparisonResult, Row, verdict
from megaspeed.analysis.compare.rows import zero_rows
from megaspeed.analysis.costs.memory import MemoryBytes
from tests.analysis.compare.figures import MIB, record, run, trained, zero_2

ROWS = zero_rows(run(), [0, 1, 2], "cpu")
"""ZeRO-0, ZeRO-1, ZeRO-2 per_micro_batch, ZeRO-2 per_step."""


def row(index: int, *, ms: Sequence[int], peak: int, sent: int) -> Row:
    """The row at ``index``: times of its steps in milliseconds, peak and bytes sent in MiB."""
    measured = replace(
        record(0, activations=0, sent=0),
        step_times_seconds=[9.0, *(each / 1000 for each in ms)],
        peak=MemoryBytes(parameters=peak * MIB),
        traffic={("dp", "all_reduce"): sent * MIB},
    )
    return replace(ROWS[index], ranks=[measured])


def verdict_on(*rows: Row, steps: int = 4) -> str:
    """On a device of 64 MiB."""
    return verdict(ComparisonResult(run=run(), steps=steps, rows=rows))


def test_the_fastest_row_is_recommended_with_its_time() -> None:
    text = verdict_on(
        row(0, ms=[100, 102, 104], peak=60, sent=1), row(1, ms=[200, 202, 204], peak=20, sent=1)
    )
    assert text == (
        "use ZeRO-0 here (--set zero_optimization.stage=0): it is the fastest row, with a median "
        "step of 102 ms (quartiles 101-103)."
    )


def test_of_rows_within_their_spread_the_one_with_the_lowest_peak_is_recommended() -> None:
    text = verdict_on(
        row(0, ms=[100, 102, 104], peak=60, sent=1), row(1, ms=[102, 104, 106], peak=20, sent=9)
    )
    assert text == (
        "use ZeRO-1 here (--set zero_optimization.stage=1): ZeRO-0 and ZeRO-1 are equally fast "
        "within their spread (ZeRO-0 takes 102 ms (quartiles 101-103), ZeRO-1 104 ms (quartiles "
        "103-105)), and of these ZeRO-1 has the lowest peak, 20.00 MiB."
    )


def test_of_similar_peaks_the_row_that_sends_the_fewest_bytes_is_recommended() -> None:
    text = verdict_on(
        row(0, ms=[100, 102, 104], peak=60, sent=1),
        row(1, ms=[100, 102, 104], peak=21, sent=5),
        row(2, ms=[100, 102, 104], peak=20, sent=9),
    )
    assert text.startswith("use ZeRO-1 here (--set zero_optimization.stage=1): ZeRO-0, ZeRO-1 and ")
    assert text.endswith(
        "of these ZeRO-1 sends the fewest bytes, 5.00 MiB a step, at a peak of 21.00 MiB, close to "
        "the lowest, 20.00 MiB."
    )


def test_the_setting_of_the_reduction_is_named_if_the_row_depends_on_it() -> None:
    text = verdict_on(row(3, ms=[100], peak=20, sent=1))
    settings = "zero_optimization.stage=2 parallel.gradient_reduction=per_step"
    assert text.startswith(f"use ZeRO-2 per_step here (--set {settings}): ")


def test_a_row_that_exceeds_the_memory_is_excluded_and_named() -> None:
    text = verdict_on(
        row(0, ms=[100, 102, 104], peak=65, sent=1), row(1, ms=[200, 202, 204], peak=20, sent=1)
    )
    assert text.startswith("use ZeRO-1 here ")
    assert text.endswith("; the peak of ZeRO-0 exceeds the 64.00 MiB of a rank.")


def test_a_failed_row_is_excluded() -> None:
    failed = replace(ROWS[0], reason="out of memory")
    assert verdict_on(failed, row(1, ms=[100], peak=20, sent=1)).startswith("use ZeRO-1 here ")


def test_a_baseline_is_never_recommended_but_named_if_it_is_faster() -> None:
    zero = row(0, ms=[100, 102, 104], peak=20, sent=1)
    ddp = replace(row(1, ms=[50, 52, 54], peak=20, sent=1), engine="ddp", label="DDP")
    text = verdict_on(zero, ddp)
    assert text.startswith("use ZeRO-0 here ")
    assert text.endswith("; torch's DDP is faster, 52.0 ms (quartiles 51.0-53.0).")
    assert "DDP" not in verdict_on(zero, replace(ddp, ranks=zero.ranks))


def test_a_single_timed_step_is_named() -> None:
    text = verdict_on(row(0, ms=[100], peak=20, sent=1), steps=2)
    assert text.endswith("; only one step was measured after the first, so the spread is unknown.")


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([replace(ROWS[0], reason="killed")], "no ZeRO row was measured."),
        ([row(0, ms=[1], peak=70, sent=1), row(1, ms=[1], peak=66, sent=1)], "ZeRO-1 has the low"),
        ([trained(ROWS[0]), trained(zero_2()[0], loss=2.6)], "the losses disagree."),
    ],
    ids=["all failed", "none fits", "the losses disagree"],
)
def test_the_verdict_states_why_no_row_is_recommended(rows: list[Row], reason: str) -> None:
    text = verdict_on(*rows)
    assert text.startswith("no row is recommended, because ") and reason in text

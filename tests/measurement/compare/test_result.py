"""Records of ranks become the figures of a row and the verdict on all rows."""

import json
import math
from dataclasses import replace

import pytest

from megaspeed.measurement.compare import report
from megaspeed.measurement.turns import Device
from tests.measurement.compare.figures import MIB, result, trained, turn, zero_0, zero_2


def test_a_pipeline_stage_has_the_figures_of_its_fullest_and_of_its_busiest_rank() -> None:
    row = trained(zero_0())
    first, second = row.measured
    peaks = [first.peak, second.peak]
    assert (peaks[0].total, peaks[0].activations) == (16 * MIB, 6 * MIB), "rank 1"
    assert first.sent_bytes == 4 * MIB + 24, "rank 0"
    assert (peaks[1].total, peaks[1].activations) == (12 * MIB, 2 * MIB), "rank 2"
    assert (row.peak_bytes, row.sent_bytes) == (16 * MIB, 4 * MIB + 24)


def test_the_step_of_a_turn_is_the_slowest_ranks_median_without_the_first_step() -> None:
    row = replace(trained(zero_0()), turns=[turn(250, 120, 500), turn(970), turn(180, 60)])
    assert row.turn_seconds == pytest.approx([0.28, 1.0, 0.15]), "of rank 3, 30 ms slower"
    assert row.step_seconds == pytest.approx((0.28 * 1.0 * 0.15) ** (1 / 3))
    assert row.tokens_per_second == pytest.approx(24 * 16 / row.step_seconds)


def test_the_peak_of_a_gpu_is_its_allocators_in_any_turn() -> None:
    gpu = Device(name="NVIDIA H100", memory_bytes=80 * 2**30)
    turns = [
        [
            replace(rank, peak_bytes=(20 + number + i) * MIB, device=gpu)
            for i, rank in enumerate(turn(9))
        ]
        for number in (1, 0)
    ]
    row = replace(trained(zero_0()), turns=turns)
    assert [stage.peak_bytes for stage in row.measured] == [22 * MIB, 24 * MIB]
    assert replace(row, extras=()).peak_bytes == 24 * MIB, "even if the tensors are unknown"


def test_a_row_whose_memory_could_not_be_counted_keeps_its_times() -> None:
    row = replace(trained(zero_2()[0]), extras=(), failure="out of memory; see log")
    compared = result(row)
    assert not compared.succeeded and row.step_seconds == pytest.approx(0.28)
    figures = report(compared).figures
    assert {stage["label"] for stage in figures["pipeline_stages"]} == {"ZeRO-0"}
    written = figures["rows"][1]
    assert written["turn_seconds"] == pytest.approx([0.28])
    assert (written["peak_bytes"], written["sent_bytes"]) == (None, None)
    assert figures["failures"] == {"ZeRO-2 per_micro_batch": "out of memory; see log"}


def test_rows_with_one_loss_agree() -> None:
    equal = trained(zero_2()[0], loss=2.5 * (1 + 9e-7))
    assert result(equal).disagreements == [] and result(equal).succeeded


@pytest.mark.parametrize("loss", [2.5 * (1 + 2e-6), math.nan, math.inf])
def test_another_loss_is_reported_with_both_numbers(loss: float) -> None:
    other = trained(zero_2()[0], loss=loss)
    compared = result(other)
    assert not compared.succeeded
    (message,) = compared.disagreements
    assert message.startswith(f"ZeRO-2 per_micro_batch: loss {loss:.9g}, but ZeRO-0 has 2.5; ")
    assert message.endswith("1e-06 is allowed in fp32")


def test_a_first_row_that_diverged_agrees_with_nothing() -> None:
    diverged = trained(zero_0(), loss=math.nan)
    compared = replace(result(), rows=[diverged, diverged])
    assert not compared.succeeded
    (message,) = compared.disagreements
    assert message.startswith("ZeRO-0 has loss nan, so no row can agree with it; lower the")


def test_a_failed_row_fails_the_comparison() -> None:
    failed = replace(zero_2()[1], failure="out of memory")
    assert not failed.done and not result(failed).succeeded


def test_json_has_every_figure_of_rows_and_stages() -> None:
    failed = replace(zero_2()[1], failure="out of memory")
    lost = trained(zero_2()[0], loss=math.nan)
    written = json.loads(json.dumps(report(result(lost, failed)).figures, allow_nan=False))
    assert len(written["notes"]) == 2
    assert written["failures"] == {"ZeRO-2 per_step": "out of memory"}
    zero, nan = written["rows"]
    assert nan["losses"] == [3.0, 2.75, None] and nan["gradient_reduction"] == "per_micro_batch"
    assert zero["step_time_seconds"] == pytest.approx(0.28)
    assert (zero["zero_stage"], zero["losses"]) == (0, [3.0, 2.75, 2.5])
    assert written["verdict"] == "no row is recommended, because the losses disagree."
    first, second, *_ = written["pipeline_stages"]
    assert [(each["label"], each["pipeline_stage"]) for each in (first, second)] == [
        ("ZeRO-0", 0),
        ("ZeRO-0", 1),
    ]
    states = {"parameters": 2 * MIB, "gradients": 2 * MIB, "optimizer_states": 6 * MIB}
    assert first["states_bytes"]["measured"].items() >= {**states, "total": 10 * MIB}.items()
    assert first["states_bytes"]["predicted"]["gradients"] == 4 * MIB
    assert first["peak_bytes"]["measured"]["total"] == 16 * MIB
    assert first["peak_bytes"]["predicted"]["total"] == 20 * MIB
    assert first["traffic_bytes"]["measured"] == {
        "dp": {"all_gather": 3 * MIB},
        "pp": {"send": MIB},
        "world": {"all_reduce": 24},
        "total": 4 * MIB + 24,
    }

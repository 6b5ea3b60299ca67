"""Records of ranks become the figures of a row and the verdict on all rows."""

import json
import math
from dataclasses import replace

import pytest

from megaspeed.measurement.compare.report import report
from megaspeed.measurement.turns import Device
from tests.measurement.compare.figures import MIB, result, trained, turn, zero_0, zero_2


def test_a_pipeline_stage_has_the_figures_of_its_fullest_and_of_its_busiest_rank() -> None:
    row = trained(zero_0())
    first, second = row.measured
    peaks = [first.peak, second.peak]
    assert (peaks[0].total, peaks[0].activations) == (16 * MIB, 6 * MIB), "rank 1"
    assert first.sent_bytes == 4 * MIB + 24, "rank 0"
    assert (peaks[1].total, peaks[1].activations) == (12 * MIB, 2 * MIB), "rank 2"
    assert (row.fullest_stage, row.peak_bytes, row.sent_bytes) == (0, 16 * MIB, 4 * MIB + 24)


def test_the_step_of_a_turn_is_the_slowest_ranks_median_without_the_first_step() -> None:
    row = replace(trained(zero_0()), turns=[turn(250, 120, 500), turn(970), turn(180, 60)])
    assert row.turn_seconds == pytest.approx([0.28, 1.0, 0.15]), "of rank 3, 30 ms slower"
    assert row.step_seconds == pytest.approx((0.28 * 1.0 * 0.15) ** (1 / 3))
    assert row.tokens_per_second == pytest.approx(24 * 16 / row.step_seconds)


def test_the_peak_of_a_gpu_is_its_allocators_in_any_turn() -> None:
    gpu = Device(name="NVIDIA H100", memory_bytes=80 * 2**30, threads=1)
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
    row = replace(trained(zero_2()[0]), extras=(), no_extras="out of memory; see log")
    compared = result(row)
    assert not compared.succeeded and row.step_seconds == pytest.approx(0.28)
    assert (row.peak_bytes, row.sent_bytes) == (None, None)
    assert [each.label for each in compared.watched] == ["ZeRO-0"]
    written = report(compared).figures["rows"][1]
    assert written["turn_seconds"] == pytest.approx([0.28]) and written["pipeline_stages"] == []
    assert written["unwatched"] == "out of memory; see log"


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


def test_json_has_every_figure_of_rows_stages_and_ranks() -> None:
    failed = replace(zero_2()[1], failure="out of memory")
    lost = trained(zero_2()[0], loss=math.nan)
    written = json.loads(json.dumps(report(result(lost, failed)).figures, allow_nan=False))
    assert written["degrees"] == {"pp": 2, "dp": 2, "tp": 1}
    assert written["losses_agree"] is False and len(written["disagreements"]) == 1
    zero, nan, without = written["rows"]
    assert nan["loss"] is None and nan["gradient_reduction"] == "per_micro_batch"
    assert without == {
        "label": "ZeRO-2 per_step",
        "engine": "zero",
        "status": "failed",
        "reason": "out of memory",
    }
    stage = zero["pipeline_stages"][0]
    assert stage["states_bytes"]["predicted_over_measured"] == {
        "parameters": 1.0,
        "gradients": 2.0,
        "optimizer_states": 1.0,
        "activations": None,
        "communication_buffers": None,
        "total": 1.2,
    }
    assert zero["step_time_seconds"] == pytest.approx(0.28)
    assert [ranks[0] for ranks in zero["turns"]] == [[9.0, 0.25, 0.125, 0.5]]
    assert written["device_memory_bytes"] == 64 * MIB
    assert written["verdict"] == "no row is recommended, because the losses disagree."
    assert stage["peak_bytes"]["measured"]["total"] == 16 * MIB
    assert stage["peak_bytes"]["predicted"]["total"] == 20 * MIB
    assert stage["traffic_bytes"]["counted"] == {
        "dp": {"all_gather": 3 * MIB},
        "pp": {"send": MIB},
        "world": {"all_reduce": 24},
        "total": 4 * MIB + 24,
    }
    assert [rank["peak_bytes"]["total"] // MIB for rank in zero["ranks"]] == [15, 16, 12, 11]
    assert zero["losses"] == [3.0, 2.75, 2.5]

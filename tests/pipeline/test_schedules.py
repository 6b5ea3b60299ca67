"""Schedules as drawings that a person can check, and as their instructions."""

from dataclasses import replace
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaspeed.pipeline.programs import stage_program
from megaspeed.pipeline.schedules import (
    SCHEDULES,
    Backward,
    Forward,
    LoadMicroBatch,
    OptimizerStep,
    ReceiveActivation,
    ReceiveGradient,
    ReduceGradients,
    ReduceTiedGradients,
    SendActivation,
    SendGradient,
    Transfer,
    gpipe,
    one_forward_one_backward,
    peak_in_flight,
)
from megaspeed.pipeline.simulation import Durations, format_grid, simulate
from tests.pipeline.shapes import CHUNKED, shape


def drawn(grid: str) -> str:
    return dedent(grid).strip("\n")


def test_gpipe_runs_all_forwards_then_all_backwards() -> None:
    assert format_grid(shape("gpipe", 4, 4)) == drawn("""
        tick              0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19 20
        pipeline stage 0  F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
        pipeline stage 1  .  F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 .  .
        pipeline stage 2  .  .  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 .  .  .  .
        pipeline stage 3  .  .  .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3 .  .  .  .  .  .
    """)


def test_gpipe_with_more_micro_batches_than_stages() -> None:
    assert format_grid(shape("gpipe", 3, 4)) == drawn("""
        tick              0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17
        pipeline stage 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
        pipeline stage 1  .  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 .  .
        pipeline stage 2  .  .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3 .  .  .  .
    """)


def test_1f1b_warms_up_alternates_and_cools_down() -> None:
    assert format_grid(shape("1f1b", 4, 4)) == drawn("""
        tick              0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19 20
        pipeline stage 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 .  B1 B1 .  B2 B2 .  B3 B3
        pipeline stage 1  .  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3 .  .
        pipeline stage 2  .  .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .  .  .
        pipeline stage 3  .  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .  .  .
    """)


def test_1f1b_with_more_micro_batches_than_stages() -> None:
    assert format_grid(shape("1f1b", 3, 5)) == drawn("""
        tick              0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19 20
        pipeline stage 0  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 F4 B2 B2 .  B3 B3 .  B4 B4
        pipeline stage 1  .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 .  B4 B4 .  .
        pipeline stage 2  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 .  .  .  .
    """)


def test_1f1b_with_fewer_micro_batches_than_stages() -> None:
    assert format_grid(shape("1f1b", 4, 2)) == drawn("""
        tick              0  1  2  3  4  5  6  7  8  9  10 11 12 13 14
        pipeline stage 0  F0 F1 .  .  .  .  .  .  .  .  B0 B0 .  B1 B1
        pipeline stage 1  .  F0 F1 .  .  .  .  .  B0 B0 .  B1 B1 .  .
        pipeline stage 2  .  .  F0 F1 .  .  B0 B0 .  B1 B1 .  .  .  .
        pipeline stage 3  .  .  .  F0 B0 B0 F1 B1 B1 .  .  .  .  .  .
    """)


def test_more_micro_batches_in_flight_make_the_warm_up_longer() -> None:
    assert format_grid(shape("1f1b", 3, 5, extra_in_flight=2)) == drawn("""
        tick              0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19 20
        pipeline stage 0  F0 F1 F2 F3 F4 .  .  B0 B0 .  B1 B1 .  B2 B2 .  B3 B3 .  B4 B4
        pipeline stage 1  .  F0 F1 F2 .  B0 B0 F3 B1 B1 F4 B2 B2 .  B3 B3 .  B4 B4 .  .
        pipeline stage 2  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 .  .  .  .
    """)


def test_evaluation_runs_forwards_only() -> None:
    assert format_grid(shape("forward_only", 3, 4)) == drawn("""
        tick              0  1  2  3  4  5
        pipeline stage 0  F0 F1 F2 F3 .  .
        pipeline stage 1  .  F0 F1 F2 F3 .
        pipeline stage 2  .  .  F0 F1 F2 F3
    """)


def test_interleaved_1f1b_runs_one_chunk_after_the_other() -> None:
    assert format_grid(shape("1f1b", 2, 2, chunks=2)) == drawn("""
        tick              0    1    2    3    4    5    6    7    8    9    10   11   12   13   14
        pipeline stage 0  F0.0 F1.0 F0.1 F1.1 .    .    B0.1 B0.1 .    B1.1 B1.1 B0.0 B0.0 B1.0 B1.0
        pipeline stage 1  .    F0.0 F1.0 F0.1 B0.1 B0.1 F1.1 B1.1 B1.1 B0.0 B0.0 B1.0 B1.0 .    .
    """)


def test_a_row_that_is_too_wide_continues_in_a_block_below() -> None:
    one_row = shape("1f1b", 2, 3)
    assert format_grid(one_row, 37) == drawn("""
        tick              0  1  2  3  4  5
        pipeline stage 0  F0 F1 .  .  B0 B0
        pipeline stage 1  .  F0 B0 B0 F1 B1

        tick              6  7  8  9  10 11
        pipeline stage 0  F2 B1 B1 .  B2 B2
        pipeline stage 1  B1 F2 B2 B2 .  .
    """)
    assert format_grid(one_row, 53) == format_grid(one_row)
    assert max(map(len, format_grid(one_row, 52).splitlines())) == 50
    assert format_grid(one_row, 1).count("tick") == 12, "a block has at least one tick"


def test_instructions_of_the_middle_stage() -> None:
    assert stage_program(shape("1f1b", 3, 2), 1) == [
        Transfer((ReceiveActivation(0),)),
        LoadMicroBatch(0),
        Forward(0),
        Transfer((SendActivation(0), ReceiveActivation(1))),
        LoadMicroBatch(1),
        Forward(1),
        Transfer((SendActivation(1),)),
        Transfer((ReceiveGradient(0),)),
        Backward(0),
        Transfer((SendGradient(0),)),
        Transfer((ReceiveGradient(1),)),
        Backward(1),
        Transfer((SendGradient(1),)),
        ReduceGradients(),
        ReduceTiedGradients(),
        OptimizerStep(),
    ]


def test_the_steady_state_of_1f1b_sends_and_receives_at_once() -> None:
    program = stage_program(shape("1f1b", 3, 5), 1)
    transfers = [one.messages for one in program if isinstance(one, Transfer)]
    assert (SendActivation(2), ReceiveGradient(1)) in transfers
    assert (SendGradient(1), ReceiveActivation(3)) in transfers


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_stage_sends_nothing(schedule: str) -> None:
    kinds = {type(instruction) for instruction in stage_program(shape(schedule, 1, 3), 0)}
    assert kinds == {
        LoadMicroBatch,
        Forward,
        Backward,
        ReduceGradients,
        ReduceTiedGradients,
        OptimizerStep,
    }


def test_a_json_name_for_each_training_schedule() -> None:
    assert dict(SCHEDULES) == {"gpipe": gpipe, "1f1b": one_forward_one_backward}


@given(stages=st.integers(1, 9), micro_batches=st.integers(1, 17))
def test_peak_in_flight_and_bubble(stages: int, micro_batches: int) -> None:
    """The programs have the values of the closed forms."""
    for stage in range(stages):
        assert peak_in_flight(shape("gpipe", stages, micro_batches), stage) == micro_batches
        peak = min(micro_batches, stages - stage)
        assert peak_in_flight(shape("1f1b", stages, micro_batches), stage) == peak
    for schedule in ("gpipe", "1f1b", "forward_only"):
        pipeline = shape(schedule, stages, micro_batches)
        timeline = simulate(pipeline)
        available = stages * timeline.length
        busy = sum(span.end - span.start for spans in timeline.computes for span in spans)
        assert pipeline.ideal_bubble == (stages - 1) / (micro_batches + stages - 1)
        assert pipeline.ideal_bubble == pytest.approx((available - busy) / available, abs=1e-12)


@given(stages=st.integers(2, 9), micro_batches=st.integers(1, 17), extra=st.integers(0, 8))
def test_extra_in_flight_adds_one_for_each_later_stage_at_most(
    stages: int, micro_batches: int, extra: int
) -> None:
    pipeline = shape("1f1b", stages, micro_batches, extra_in_flight=extra)
    for stage in range(stages):
        peak = min(micro_batches, stages - stage + extra, 2 * (stages - stage) - 1)
        assert peak_in_flight(pipeline, stage) == peak
    assert simulate(pipeline).length == 3 * (micro_batches + stages - 1), "the same bubble"


@pytest.mark.parametrize(
    ("message", "lengths"), [(0.15, (233.7, 228.7, 223.15)), (0.3, (254.4, 249.4, 235.3))]
)
def test_more_micro_batches_in_flight_hide_half_of_the_messages(
    message: float, lengths: tuple[float, ...]
) -> None:
    """Of 8 stages and 64 micro-batches, whose computation takes 3 ticks; without messages 213."""
    for extra, expected in zip((0, 4, 7), lengths, strict=True):
        pipeline = shape("1f1b", 8, 64, extra_in_flight=extra)
        times = replace(Durations.in_ticks(pipeline), message=message)
        assert simulate(pipeline, times).length == pytest.approx(expected)


def test_chunks_divide_the_bubble_for_any_number_of_groups() -> None:
    """The bubble is (P - 1) / (v M) of the computation (Narayanan et al. 2021, section 2.2.2), and
    the batches of messages in the order of the timetable add nothing to it.
    """
    for each in CHUNKED:
        busy = 3 * each.chunks * each.micro_batches
        assert (simulate(each).length - busy) / 3 == each.stages - 1, each


def test_recomputation_has_a_timetable_of_its_own() -> None:
    """A backward that recomputes takes three times as long as a forward. In the timetable of other
    runs, messages would wait for it: 7.5 instead of 6 micro-batches.
    """
    for each in CHUNKED[::5]:
        again = replace(each, backward_ticks=3)
        busy = 4 * each.chunks * each.micro_batches
        assert (simulate(again).length - busy) / 4 <= each.stages - 0.5, each
    uneven = shape("1f1b", 7, 29, chunks=3, groups=3)
    times = Durations.in_ticks(replace(uneven, backward_ticks=3))
    assert simulate(replace(uneven, backward_ticks=3)).length - 348 == 24
    assert simulate(uneven, times).length - 348 == 30


def test_fewer_groups_keep_more_activations() -> None:
    """Of 64 micro-batches on the first of 8 stages with 4 chunks, in units of a whole stage."""
    peaks = {k: peak_in_flight(shape("1f1b", 8, 64, 4, k), 0) / 4 for k in (8, 4, 2, 1)}
    assert peaks == {8: 9.75, 4: 15.75, 2: 27.75, 1: 51.75}

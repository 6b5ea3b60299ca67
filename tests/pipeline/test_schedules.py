"""Schedules as drawings that a person can check, and as their instructions."""

from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaspeed.pipeline.schedules import (
    SCHEDULES,
    Backward,
    Forward,
    Instruction,
    LoadMicroBatch,
    MicroBatchInstruction,
    OptimizerStep,
    ReceiveActivation,
    ReceiveGradient,
    ReduceGradients,
    ReduceTiedGradients,
    Schedule,
    SendActivation,
    SendGradient,
    forward_only,
    gpipe,
    one_forward_one_backward,
    peak_micro_batches_in_flight,
)
from megaspeed.pipeline.simulation import bubble_fraction, format_grid


def drawn(grid: str) -> str:
    return dedent(grid).strip("\n")


def test_gpipe_runs_all_forwards_then_all_backwards() -> None:
    assert format_grid(gpipe, 4, 4) == drawn("""
        tick              0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19 20
        pipeline stage 0  F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
        pipeline stage 1  .  F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 .  .
        pipeline stage 2  .  .  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 .  .  .  .
        pipeline stage 3  .  .  .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3 .  .  .  .  .  .
    """)


def test_gpipe_with_more_micro_batches_than_stages() -> None:
    assert format_grid(gpipe, 3, 4) == drawn("""
        tick              0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17
        pipeline stage 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
        pipeline stage 1  .  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 .  .
        pipeline stage 2  .  .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3 .  .  .  .
    """)


def test_1f1b_warms_up_alternates_and_cools_down() -> None:
    assert format_grid(one_forward_one_backward, 4, 4) == drawn("""
        tick              0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19 20
        pipeline stage 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 .  B1 B1 .  B2 B2 .  B3 B3
        pipeline stage 1  .  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3 .  .
        pipeline stage 2  .  .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .  .  .
        pipeline stage 3  .  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .  .  .
    """)


def test_1f1b_with_more_micro_batches_than_stages() -> None:
    assert format_grid(one_forward_one_backward, 3, 5) == drawn("""
        tick              0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17 18 19 20
        pipeline stage 0  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 F4 B2 B2 .  B3 B3 .  B4 B4
        pipeline stage 1  .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 .  B4 B4 .  .
        pipeline stage 2  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 .  .  .  .
    """)


def test_1f1b_with_fewer_micro_batches_than_stages() -> None:
    assert format_grid(one_forward_one_backward, 4, 2) == drawn("""
        tick              0  1  2  3  4  5  6  7  8  9  10 11 12 13 14
        pipeline stage 0  F0 F1 .  .  .  .  .  .  .  .  B0 B0 .  B1 B1
        pipeline stage 1  .  F0 F1 .  .  .  .  .  B0 B0 .  B1 B1 .  .
        pipeline stage 2  .  .  F0 F1 .  .  B0 B0 .  B1 B1 .  .  .  .
        pipeline stage 3  .  .  .  F0 B0 B0 F1 B1 B1 .  .  .  .  .  .
    """)


def test_evaluation_runs_forwards_only() -> None:
    assert format_grid(forward_only, 3, 4) == drawn("""
        tick              0  1  2  3  4  5
        pipeline stage 0  F0 F1 F2 F3 .  .
        pipeline stage 1  .  F0 F1 F2 F3 .
        pipeline stage 2  .  .  F0 F1 F2 F3
    """)


def test_instructions_of_the_middle_stage() -> None:
    assert list(one_forward_one_backward(3, 1, 2)) == [
        ReceiveActivation(0),
        LoadMicroBatch(0),
        Forward(0),
        SendActivation(0),
        ReceiveActivation(1),
        LoadMicroBatch(1),
        Forward(1),
        SendActivation(1),
        ReceiveGradient(0),
        Backward(0),
        SendGradient(0),
        ReceiveGradient(1),
        Backward(1),
        SendGradient(1),
        ReduceGradients(),
        ReduceTiedGradients(),
        OptimizerStep(),
    ]


@pytest.mark.parametrize("schedule", SCHEDULES.values())
def test_one_stage_sends_nothing(schedule: Schedule) -> None:
    kinds = {type(instruction) for instruction in schedule(1, 0, 3)}
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


def walked_peak(program: list[Instruction]) -> int:
    """Walk through a stage's program, and return its peak of micro-batches in flight."""
    named = [one.micro_batch for one in program if isinstance(one, MicroBatchInstruction)]
    in_flight = peak = 0
    for position, instruction in enumerate(program):
        if isinstance(instruction, MicroBatchInstruction):
            in_flight += isinstance(instruction, Forward)
            peak = max(peak, in_flight)
            in_flight -= instruction.micro_batch not in named[position + 1 :]
    return peak


@given(stages=st.integers(1, 9), micro_batches=st.integers(1, 17))
def test_peak_in_flight_and_bubble(stages: int, micro_batches: int) -> None:
    """The closed forms equal the results of a walk through each program."""
    for stage in range(stages):
        for schedule, peak in (
            (gpipe, micro_batches),
            (one_forward_one_backward, min(micro_batches, stages - stage)),
        ):
            assert peak_micro_batches_in_flight(schedule, stages, stage, micro_batches) == peak
            assert walked_peak(list(schedule(stages, stage, micro_batches))) == peak
    for schedule in (gpipe, one_forward_one_backward, forward_only):
        bubble = (stages - 1) / (micro_batches + stages - 1)
        assert bubble_fraction(schedule, stages, micro_batches) == bubble

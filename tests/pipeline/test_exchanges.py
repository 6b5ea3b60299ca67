"""Which messages are sent as one batch. Both ends of a link agree on this."""

from itertools import product

import pytest

from megaspeed.pipeline.schedules import (
    SCHEDULES,
    Batch,
    Exchange,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    Schedule,
    SendActivation,
    SendGradient,
    forward_only,
    gpipe,
    one_forward_one_backward,
    other_end,
    peer,
    stage_program,
)


def batches(
    schedule: Schedule, pipeline_stages: int, stage: int, micro_batches: int
) -> list[Batch]:
    program = stage_program(schedule, pipeline_stages, stage, micro_batches)
    return [instruction for instruction in program if isinstance(instruction, Batch)]


def test_the_steady_state_of_1f1b_exchanges() -> None:
    assert batches(one_forward_one_backward, 3, 1, 3) == [
        ReceiveActivation(0),
        SendActivation(0),
        ReceiveActivation(1),
        Exchange(SendActivation(1), ReceiveGradient(0)),
        Exchange(SendGradient(0), ReceiveActivation(2)),
        Exchange(SendActivation(2), ReceiveGradient(1)),
        SendGradient(1),
        ReceiveGradient(2),
        SendGradient(2),
    ]


def test_gpipe_exchanges_nothing() -> None:
    # The first stage receives a gradient directly after its last send. But the second stage sends
    # that gradient only after its own forward and backward.
    assert batches(gpipe, 2, 0, 2) == [
        SendActivation(0),
        SendActivation(1),
        ReceiveGradient(0),
        ReceiveGradient(1),
    ]


@pytest.mark.parametrize("schedule", [*SCHEDULES.values(), forward_only])
@pytest.mark.parametrize("pipeline_stages", range(1, 9))
def test_both_ends_of_a_link_start_the_same_batches_in_the_same_order(
    schedule: Schedule, pipeline_stages: int
) -> None:
    for micro_batches, stage in product(range(1, 17), range(pipeline_stages - 1)):
        sides = [
            [
                batch
                for batch in batches(schedule, pipeline_stages, here, micro_batches)
                if peer(here, batch) == there
            ]
            for here, there in [(stage, stage + 1), (stage + 1, stage)]
        ]
        assert sides[0] == [other_end(batch) for batch in sides[1]]


@pytest.mark.parametrize("schedule", [*SCHEDULES.values(), forward_only])
def test_nothing_else_of_the_schedule_changes(schedule: Schedule) -> None:
    for pipeline_stages, micro_batches in product(range(1, 5), range(1, 9)):
        for stage in range(pipeline_stages):
            flat: list[Instruction] = []
            for instruction in stage_program(schedule, pipeline_stages, stage, micro_batches):
                if isinstance(instruction, Exchange):
                    flat += [instruction.send, instruction.receive]
                else:
                    flat.append(instruction)
            assert flat == list(schedule(pipeline_stages, stage, micro_batches))

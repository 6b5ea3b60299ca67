"""check_programs accepts our programs and refuses each broken one; simulate returns seconds."""

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from megaspeed.pipeline.schedules import (
    SCHEDULES,
    Backward,
    Forward,
    LoadMicroBatch,
    OptimizerStep,
    ReceiveActivation,
    ReceiveGradient,
    ReduceGradients,
    ScheduleError,
    SendActivation,
    SendGradient,
    Transfer,
)
from megaspeed.pipeline.simulation import (
    Durations,
    Span,
    check_programs,
    check_schedule,
    simulate,
)
from tests.pipeline.edits import Edit, alone, edited, inserted, moved, swapped, without
from tests.pipeline.shapes import CHUNKED, shape


@pytest.mark.parametrize("schedule", [*SCHEDULES, "forward_only"])
def test_every_schedule_of_ours_passes(schedule: str) -> None:
    for stages, micro_batches in product(range(1, 9), range(1, 17)):
        check_schedule(shape(schedule, stages, micro_batches))


def test_every_schedule_with_more_in_flight_passes() -> None:
    for stages, micro_batches in product(range(2, 8), range(1, 17)):
        for extra in range(1, stages):
            check_schedule(shape("1f1b", stages, micro_batches, extra_in_flight=extra))


def test_every_schedule_with_chunks_passes() -> None:
    for each in CHUNKED[::4]:
        check_schedule(each)


REDUCE, STEP = ReduceGradients(), OptimizerStep()

# (the edit of stage 1, the law in the message)
BROKEN: list[tuple[Edit, str]] = [
    (moved(Backward(2), before=Forward(2)), f"{Backward(2)} comes before {Forward(2)}"),
    (
        moved(alone(ReceiveGradient(1)), before=alone(SendGradient(1))),
        f"{Backward(1)} comes before {ReceiveGradient(1)}",
    ),
    (
        moved(LoadMicroBatch(1), before=alone(SendActivation(1))),
        f"{Forward(1)} comes before {LoadMicroBatch(1)}",
    ),
    (
        moved(alone(SendActivation(1)), before=Forward(1)),
        f"{SendActivation(1)} comes before {Forward(1)}",
    ),
    (
        moved(alone(SendGradient(1)), before=Backward(1)),
        f"{SendGradient(1)} comes before {Backward(1)}",
    ),
    (without(LoadMicroBatch(3)), f"{Forward(3)} comes before {LoadMicroBatch(3)}"),
    (inserted(Forward(0), before=Forward(1)), f"{Forward(0)} comes twice"),
    (inserted(LoadMicroBatch(4), before=Forward(1)), "is not possible here"),
    (without(alone(SendActivation(2))), f"never runs {SendActivation(2)}"),
    (
        without(alone(ReceiveActivation(2))),
        f"{Forward(2)} comes before {ReceiveActivation(2)}",
    ),
    (without(Backward(3), alone(SendGradient(3))), f"{REDUCE} comes before {Backward(3)}"),
    (swapped(REDUCE, STEP), f"{STEP} comes before {REDUCE}, which it needs"),
    (moved(STEP, before=Backward(3)), f"{STEP} comes before Reduce"),
    (without(STEP), f"never runs {STEP}"),
    (inserted(REDUCE, before=STEP), f"{REDUCE} comes twice"),
]


@pytest.mark.parametrize(("edit", "law"), BROKEN)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_that_breaks_a_law_is_refused(schedule: str, edit: Edit, law: str) -> None:
    pipeline = shape(schedule, 3, 4)
    with pytest.raises(ScheduleError, match=f"pipeline stage 1 of 3.*{re.escape(law)}"):
        check_programs(pipeline, edited(pipeline, 1, edit))


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (0, ReceiveActivation(0)),
        (0, SendGradient(0)),
        (2, SendActivation(0)),
        (2, ReceiveGradient(0)),
    ],
)
def test_an_end_of_the_pipeline_has_no_neighbour_beyond(stage: int, message: Any) -> None:
    pipeline = shape("gpipe", 3, 4)
    programs = edited(pipeline, stage, inserted(alone(message), before=Backward(0)))
    with pytest.raises(ScheduleError, match=re.escape(f"{message!r} is not possible here")):
        check_programs(pipeline, programs)


# The stage that sends has computed both before it sends either. So its program alone is valid.
SECOND_FIRST = [
    (0, SendActivation(0), SendActivation(1), moved(Forward(1), before=alone(SendActivation(0)))),
    (2, SendGradient(0), SendGradient(1), moved(Backward(1), before=alone(SendGradient(0)))),
]


@pytest.mark.parametrize(("sender", "first", "second", "computes_both"), SECOND_FIRST)
def test_messages_sent_in_another_order_than_received_are_refused(
    sender: int, first: Any, second: Any, computes_both: Edit
) -> None:
    pipeline = shape("gpipe", 3, 4)
    loads = moved(LoadMicroBatch(1), before=Forward(0))
    programs = edited(pipeline, sender, loads, computes_both, swapped(alone(first), alone(second)))
    message = f"stage 1, .* would get micro-batch 1 of chunk 0, which pipeline stage {sender} sends"
    with pytest.raises(ScheduleError, match=message):
        check_programs(pipeline, programs)


def test_a_deadlock_names_what_each_stage_waits_for() -> None:
    # The first stage wants a gradient before it has sent the activation that this gradient needs.
    pipeline = shape("gpipe", 3, 4)
    impatient = moved(alone(ReceiveGradient(0)), before=alone(SendActivation(3)))
    with pytest.raises(ScheduleError) as error:
        check_programs(pipeline, edited(pipeline, 0, impatient))
    assert str(error.value).splitlines() == [
        "Deadlock: no pipeline stage can continue.",
        f"  pipeline stage 0 waits at {alone(ReceiveGradient(0))!r}",
        f"  pipeline stage 1 waits at {Transfer((SendActivation(2), ReceiveActivation(3)))!r}",
        f"  pipeline stage 2 waits at {alone(ReceiveActivation(3))!r}",
    ]


def test_two_sends_that_face_each_other_deadlock_unless_they_are_one_batch() -> None:
    pipeline = shape("1f1b", 2, 4)
    check_schedule(pipeline)
    programs = edited(pipeline, 0)
    programs[1] = edited(pipeline, 1)[1]
    with pytest.raises(ScheduleError, match="Deadlock"):
        check_programs(pipeline, programs)


@pytest.mark.parametrize(("stages", "micro_batches"), [(0, 4), (2, 0)])
def test_an_empty_pipeline_is_refused(stages: int, micro_batches: int) -> None:
    with pytest.raises(ScheduleError, match="at least one pipeline stage and one micro-batch"):
        check_schedule(shape("gpipe", stages, micro_batches))


def test_a_message_delays_what_receives_it_and_not_what_sends_it() -> None:
    durations = Durations(forward=[1, 2], backward=[3, 4], message=0.5)
    spans = [
        [(span.start, span.end) for span in stage]
        for stage in simulate(shape("gpipe", 2, 2), durations).computes
    ]
    assert spans == [
        [(0, 1), (1, 2), (10.5, 13.5), (14.5, 17.5)],
        # The second message starts when the first forward has ended, because the stage asks for it
        # only then.
        [(1.5, 3.5), (4, 6), (6, 10), (10, 14)],
    ]


def test_a_send_and_a_receive_of_one_batch_delay_both_stages_once() -> None:
    durations = Durations(forward=[1, 1], backward=[2, 2], message=0.25)
    timeline = simulate(shape("1f1b", 2, 2), durations)
    assert timeline.computes[1][2].start == 1 + 0.25 + 3
    assert timeline.length == 1 + 0.25 + 3 + 3 + 0.25 + 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equal_seconds_give_the_timetable_in_ticks(schedule: str) -> None:
    pipeline = shape(schedule, 4, 6)
    ticks = simulate(pipeline).computes
    durations = Durations(forward=[0.5] * 4, backward=[1.0] * 4)
    seconds = simulate(pipeline, durations).computes
    for stage, same in zip(ticks, seconds, strict=True):
        assert [(span.instruction, span.start / 2) for span in stage] == [
            (span.instruction, span.start) for span in same
        ]


def test_gathers_and_reductions_run_beside_the_computation() -> None:
    """Two stages, two chunks, one group of two micro-batches. The first stage computes

    F0.0 F1.0 F0.1 F1.1 ... B0.1 B1.1 B0.0 B1.0
    """
    pipeline = replace(shape("1f1b", 2, 2, chunks=2), gather_policy="chunks")
    durations = Durations(
        forward=[1] * 4, backward=[2] * 4, gather=[0.5, 0.5, 3, 3], reduce=[4, 4, 1, 1]
    )
    timeline = simulate(pipeline, durations)
    first, collectives = timeline.computes[0], timeline.collectives[0]
    # Layers arrive while others compute, so the gather of 0.5 is hidden. That of 3 is not.
    assert [(span.start, span.end) for span in first[:4]] == [(0, 1), (1, 2), (2, 5), (5, 6)]
    gathers = [(span.start, span.end) for span in collectives[:2]]
    assert gathers == [(0, 0.5), (2, 5)]
    *_, before_last, last = first
    assert collectives[-1] == Span(ReduceGradients(), last.end, last.end + 4)
    assert before_last.end == last.start
    assert timeline.length == last.end + 4
    assert simulate(pipeline, replace(durations, gather=(), reduce=())).length < timeline.length

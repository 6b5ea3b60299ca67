"""check_schedule accepts our schedules and refuses each broken one; simulate returns seconds."""

import re
from collections.abc import Callable, Iterator

import pytest

from megaspeed.pipeline.schedules import (
    SCHEDULES,
    Backward,
    Forward,
    Instruction,
    LoadMicroBatch,
    OptimizerStep,
    ReceiveActivation,
    ReceiveGradient,
    ReduceGradients,
    Schedule,
    ScheduleError,
    SendActivation,
    SendGradient,
    forward_only,
    gpipe,
    one_forward_one_backward,
)
from megaspeed.pipeline.simulation import Durations, check_schedule, length, simulate

Edit = Callable[[list[Instruction]], list[Instruction]]


def edited(schedule: Schedule, stage: int, *edits: Edit) -> Schedule:
    """Return ``schedule`` with the instructions of one stage changed."""

    def changed(
        pipeline_stages: int, pipeline_stage: int, micro_batches: int
    ) -> Iterator[Instruction]:
        program = list(schedule(pipeline_stages, pipeline_stage, micro_batches))
        for edit in edits if pipeline_stage == stage else ():
            program = edit(program)
        yield from program

    return changed


def without(*dropped: Instruction) -> Edit:
    return lambda program: [one for one in program if one not in dropped]


def swapped(first: Instruction, second: Instruction) -> Edit:
    exchange = {first: second, second: first}
    return lambda program: [exchange.get(one, one) for one in program]


def moved(what: Instruction, *, before: Instruction) -> Edit:
    def edit(program: list[Instruction]) -> list[Instruction]:
        rest = [one for one in program if one != what]
        at = rest.index(before)
        return [*rest[:at], what, *rest[at:]]

    return edit


def inserted(what: Instruction, *, before: Instruction) -> Edit:
    def edit(program: list[Instruction]) -> list[Instruction]:
        at = program.index(before)
        return [*program[:at], what, *program[at:]]

    return edit


@pytest.mark.parametrize("name", [*SCHEDULES, "evaluation"])
@pytest.mark.parametrize("pipeline_stages", range(1, 9))
def test_every_schedule_of_ours_passes(name: str, pipeline_stages: int) -> None:
    schedule = forward_only if name == "evaluation" else SCHEDULES[name]
    for micro_batches in range(1, 17):
        check_schedule(schedule, pipeline_stages, micro_batches)


REDUCE, STEP = ReduceGradients(), OptimizerStep()

# (the edit of stage 1, the law in the message)
BROKEN: list[tuple[Edit, str]] = [
    (moved(Backward(2), before=Forward(2)), f"{Backward(2)} comes before {Forward(2)}"),
    (
        moved(ReceiveGradient(1), before=SendGradient(1)),
        f"{Backward(1)} comes before {ReceiveGradient(1)}",
    ),
    (
        moved(LoadMicroBatch(1), before=SendActivation(1)),
        f"{Forward(1)} comes before {LoadMicroBatch(1)}",
    ),
    (moved(SendActivation(1), before=Forward(1)), f"{SendActivation(1)} comes before {Forward(1)}"),
    (moved(SendGradient(1), before=Backward(1)), f"{SendGradient(1)} comes before {Backward(1)}"),
    (
        lambda program: [one for one in program if getattr(one, "micro_batch", None) != 3],
        f"never runs {LoadMicroBatch(3)}",
    ),
    (inserted(Forward(0), before=Forward(1)), f"{Forward(0)} comes twice"),
    (inserted(LoadMicroBatch(4), before=Forward(1)), "is not possible here"),
    (without(SendActivation(2)), f"never runs {SendActivation(2)}"),
    (without(ReceiveActivation(2)), f"never runs {ReceiveActivation(2)}"),
    (without(Backward(2), SendGradient(2)), f"never runs {Backward(2)}"),
    (swapped(REDUCE, STEP), f"{STEP} comes before {REDUCE}, which it needs"),
    (moved(STEP, before=Backward(3)), f"{STEP} comes before Reduce"),
    (without(STEP), f"never runs {STEP}"),
    (inserted(REDUCE, before=STEP), f"{REDUCE} comes twice"),
]


@pytest.mark.parametrize(("edit", "law"), BROKEN)
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_stage_that_breaks_a_law_is_refused(schedule: Schedule, edit: Edit, law: str) -> None:
    with pytest.raises(ScheduleError, match=f"pipeline stage 1 of 3.*{re.escape(law)}"):
        check_schedule(edited(schedule, 1, edit), 3, 4)


@pytest.mark.parametrize(
    ("pipeline_stage", "instruction"),
    [
        (0, ReceiveActivation(0)),
        (0, SendGradient(0)),
        (2, SendActivation(0)),
        (2, ReceiveGradient(0)),
    ],
)
def test_an_end_of_the_pipeline_has_no_neighbour_beyond(
    pipeline_stage: int, instruction: Instruction
) -> None:
    schedule = edited(gpipe, pipeline_stage, inserted(instruction, before=Backward(0)))
    with pytest.raises(ScheduleError, match=re.escape(f"{instruction!r} is not possible here")):
        check_schedule(schedule, 3, 4)


# The stage that sends has computed both before it sends either. So its program alone is valid.
SECOND_FIRST = {
    0: edited(gpipe, 0, moved(SendActivation(0), before=LoadMicroBatch(2))),
    2: edited(
        gpipe, 2, swapped(Backward(0), Backward(1)), swapped(SendGradient(0), SendGradient(1))
    ),
}


@pytest.mark.parametrize(("sender", "schedule"), SECOND_FIRST.items())
def test_messages_sent_in_another_order_than_received_are_refused(
    sender: int, schedule: Schedule
) -> None:
    message = f"stage 1, .* would get micro-batch 1, which pipeline stage {sender} sends first"
    with pytest.raises(ScheduleError, match=message):
        check_schedule(schedule, 3, 4)


def test_a_deadlock_names_what_each_stage_waits_for() -> None:
    # The first stage wants a gradient before it has sent the activation that this gradient needs.
    impatient = edited(gpipe, 0, moved(ReceiveGradient(0), before=SendActivation(0)))
    with pytest.raises(ScheduleError) as error:
        check_schedule(impatient, 3, 4)
    assert str(error.value).splitlines() == [
        "Deadlock: no pipeline stage can continue.",
        "  pipeline stage 0 waits at ReceiveGradient(micro_batch=0) for pipeline stage 1",
        "  pipeline stage 1 waits at ReceiveActivation(micro_batch=0) for pipeline stage 0",
        "  pipeline stage 2 waits at ReceiveActivation(micro_batch=0) for pipeline stage 1",
        "  If two neighbours send to each other, both must yield the receive directly after the "
        "send.",
    ]


def test_stages_that_each_wait_for_a_later_message_of_the_other_deadlock() -> None:
    # The last stage wants all activations before its first backward. The first stage wants the
    # first gradient before it sends the last activation. Each program alone is valid.
    eager = edited(gpipe, 0, moved(ReceiveGradient(0), before=LoadMicroBatch(3)))
    with pytest.raises(ScheduleError, match=r"stage 1 waits at ReceiveActivation\(.*=3\)"):
        check_schedule(eager, 2, 4)


def test_two_sends_that_face_each_other_deadlock_unless_both_can_be_one_batch() -> None:
    # The last stage runs 1f1b and sends the gradient of 0 before it receives the activation of 1.
    # The first stage runs gpipe: it sends all activations before it receives a gradient, so no
    # receive directly follows the send of 1.
    def mixed(
        pipeline_stages: int, pipeline_stage: int, micro_batches: int
    ) -> Iterator[Instruction]:
        schedule = gpipe if pipeline_stage == 0 else one_forward_one_backward
        return schedule(pipeline_stages, pipeline_stage, micro_batches)

    with pytest.raises(ScheduleError) as error:
        check_schedule(mixed, 2, 8)
    assert str(error.value).splitlines()[1:3] == [
        "  pipeline stage 0 waits at SendActivation(micro_batch=1) for pipeline stage 1",
        "  pipeline stage 1 waits at SendGradient(micro_batch=0) for pipeline stage 0",
    ]


def test_a_load_between_a_send_and_its_receive_deadlocks() -> None:
    # 1f1b as it was before sends and receives were joined.
    split = edited(
        one_forward_one_backward, 1, moved(LoadMicroBatch(1), before=ReceiveActivation(1))
    )
    with pytest.raises(ScheduleError, match=r"stage 1 waits at SendGradient\(micro_batch=0\)"):
        check_schedule(split, 2, 2)


@pytest.mark.parametrize(("pipeline_stages", "micro_batches"), [(0, 4), (2, 0)])
def test_an_empty_pipeline_is_refused(pipeline_stages: int, micro_batches: int) -> None:
    with pytest.raises(ScheduleError, match="at least one pipeline stage and one micro-batch"):
        check_schedule(gpipe, pipeline_stages, micro_batches)


def test_a_message_delays_what_receives_it_and_not_what_sends_it() -> None:
    durations = Durations(forward=[1, 2], backward=[3, 4], message=0.5)
    spans = [
        [(span.start, span.end) for span in stage] for stage in simulate(gpipe, 2, 2, durations)
    ]
    assert spans == [
        [(0, 1), (1, 2), (10.5, 13.5), (14.5, 17.5)],
        # The second message starts when the first forward has ended, because the stage asks for it
        # only then.
        [(1.5, 3.5), (4, 6), (6, 10), (10, 14)],
    ]


def test_an_exchange_delays_both_stages_once() -> None:
    durations = Durations(forward=[1, 1], backward=[2, 2], message=0.25)
    first, last = simulate(one_forward_one_backward, 2, 2, durations)
    # Forward 0, message, forward and backward 0 of the last stage, exchange of gradient 0 and
    # activation 1, forward and backward 1 of the last stage, message, backward 1.
    assert last[2].start == 1 + 0.25 + 3 + 0.25
    assert first[2].start == last[2].start
    assert length([first, last]) == 1 + 0.25 + 3 + 0.25 + 3 + 0.25 + 2


@pytest.mark.parametrize("name", SCHEDULES)
def test_equal_seconds_give_the_timetable_in_ticks(name: str) -> None:
    ticks = simulate(SCHEDULES[name], 4, 6)
    seconds = simulate(SCHEDULES[name], 4, 6, Durations(forward=[0.5] * 4, backward=[1.0] * 4))
    for stage, same in zip(ticks, seconds, strict=True):
        assert [(span.instruction, span.start / 2) for span in stage] == [
            (span.instruction, span.start) for span in same
        ]
        assert all(isinstance(span.end, int) for span in stage)

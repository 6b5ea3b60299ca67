"""What a stage holds at each computation."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product
from typing import Literal

import pytest

from megaspeed.pipeline.programs import stage_program
from megaspeed.pipeline.schedules import (
    Backward,
    Forward,
    Pipeline,
    Receive,
    Send,
    Transfer,
    input_of,
    order_of,
    peak_in_flight,
)
from megaspeed.planning.costs import moments
from megaspeed.planning.costs.moments import Moment, messages_of, moments_of, moments_of_one_chunk


def shape(stages: int, chunks: int, micro_batches: int, groups: int) -> Pipeline:
    return Pipeline(
        schedule="1f1b",
        stages=stages,
        micro_batches=micro_batches,
        chunks=chunks,
        groups=groups,
        gather_policy="chunks_ahead",
    )


SHAPES = [
    shape(stages, chunks, groups * stages + more, groups)
    for stages, chunks, groups, more in product((2, 3, 5), (2, 3), (1, 2, 4), (0, 3))
]


def messages_of_the_program(pipeline: Pipeline, stage: int) -> Iterator[int]:
    """Yield the messages that the executor holds at each computation, without its input."""
    received: set[Receive] = set()
    in_flight: set[Receive] = set()
    sending = 0
    for instruction in stage_program(pipeline, stage):
        if isinstance(instruction, Transfer):
            in_flight = {each for each in instruction.messages if isinstance(each, Receive)}
            sending = sum(isinstance(each, Send) for each in instruction.messages)
            received |= in_flight
        elif isinstance(instruction, Forward | Backward):
            needed = input_of(pipeline, stage, instruction)
            if needed is not None:
                received.remove(needed)
                if needed in in_flight:  # waits for the batch
                    in_flight, sending = set(), 0
            yield len(received) + sending


@pytest.mark.parametrize("pipeline", SHAPES, ids=str)
def test_messages_are_those_of_the_program(pipeline: Pipeline) -> None:
    for stage in range(pipeline.stages):
        assert messages_of(pipeline, stage) == list(messages_of_the_program(pipeline, stage))


def test_messages_worked_by_hand() -> None:
    """The first stage runs chunk 0 for all 64 micro-batches. Chunk 0 of the last of 8 stages has
    computed micro-batch m at tick m + 8. So in tick 64, 56 inputs of chunk 1 wait, and one output
    is being sent.
    """
    assert messages_of(shape(8, 4, 64, 1), 0)[63] == 56 + 1


def kinds_of(pipeline: Pipeline, stage: int) -> dict[Moment, set[tuple[int, ...]]]:
    kinds: dict[Moment, set[tuple[int, ...]]] = {}
    for each in chain(*moments_of(pipeline, stage, sums_visits=True)):
        kind = replace(each, in_flight=(), messages=0)
        kinds.setdefault(kind, set()).add((*each.in_flight, each.messages))
    return kinds


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (2, 3), (4, 3)])
@pytest.mark.parametrize("larger", [0, 1, 5])
def test_the_first_groups_of_a_size_hold_as_much_as_all(
    monkeypatch: pytest.MonkeyPatch, stages: int, chunks: int, larger: int
) -> None:
    pipeline = shape(stages, chunks, 10 * stages + larger, 10)
    first = [kinds_of(pipeline, stage) for stage in range(stages)]
    moments_of.cache_clear()
    monkeypatch.setattr(moments, "_GROUPS", 10)
    assert first == [kinds_of(pipeline, stage) for stage in range(stages)]
    moments_of.cache_clear()


@pytest.mark.parametrize("pipeline", SHAPES, ids=str)
def test_one_moment_has_the_most_forwards_in_flight(pipeline: Pipeline) -> None:
    for stage in range(pipeline.stages):
        alike = moments_of(pipeline, stage, sums_visits=False)
        most = max(sum(each.in_flight) for each in chain(*alike))
        assert most + 1 == peak_in_flight(pipeline, stage)


def test_received_messages_wait_beside_computations() -> None:
    """With 3 more micro-batches in flight, two messages wait on all stages but the first. The
    prediction once counted one at most, so a stage needed more memory than predicted.
    """
    pipeline = Pipeline(schedule="1f1b", stages=4, micro_batches=8, extra_in_flight=3)
    most = [
        max(
            (each.in_flight[0], each.messages)
            for each in moments_of_one_chunk(pipeline, stage)
            if each.direction == "backward"
        )
        for stage in range(4)
    ]
    assert most == [(6, 0), (4, 2), (2, 2), (0, 2)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
def test_the_first_micro_batches_hold_as_many_messages_as_all(
    schedule: Literal["1f1b", "gpipe"], stages: int
) -> None:
    for extra, count in product({0, stages // 2, stages - 1}, (*range(1, 2 * stages + 4), 50)):
        pipeline = Pipeline(
            schedule=schedule,
            stages=stages,
            micro_batches=count,
            extra_in_flight=0 if schedule == "gpipe" else extra,
        )
        for stage in range(stages):
            most = peak_in_flight(pipeline, stage)
            expected: dict[tuple[bool, int], int] = {}
            in_flight = 0
            program = zip(
                order_of(pipeline, stage), messages_of_the_program(pipeline, stage), strict=True
            )
            for compute, messages in program:
                is_forward = isinstance(compute, Forward)
                in_flight -= not is_forward
                key = is_forward, in_flight
                expected[key] = max(messages, expected.get(key, 0))
                in_flight += is_forward
            found: dict[tuple[bool, int], int] = {}
            for each in moments_of_one_chunk(pipeline, stage):
                key = each.direction == "forward", each.in_flight[0]
                found[key] = max(each.messages, found.get(key, 0))
            assert found == {key: n for key, n in expected.items() if key[1] >= most - 2}

"""Visits of a stage to its chunks, and the gathers of ZeRO-3 that follow from them."""

import re
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaspeed.pipeline.programs import stage_program
from megaspeed.pipeline.schedules import (
    Backward,
    Forward,
    Gather,
    Pipeline,
    Release,
    ScheduleError,
    StageProgram,
    order_of,
    peak_in_flight,
)
from megaspeed.pipeline.simulation import check_programs, check_schedule
from megaspeed.pipeline.visits import holds_of, visits_of
from tests.pipeline.edits import Edit, edited, inserted, moved, swapped, without
from tests.pipeline.shapes import shape


def by_chunks(pipeline: Pipeline, gathers: Literal["chunks", "chunks_ahead"]) -> Pipeline:
    return replace(pipeline, gather_policy=gathers)


def without_messages(program: StageProgram) -> list[str]:
    """Return the gathers, releases and computations of a program, in short."""
    short = {Forward: "F", Backward: "B", Gather: "gather ", Release: "release "}
    return [
        f"{short[type(one)]}{one.micro_batch}.{one.chunk}"
        if isinstance(one, Forward | Backward)
        else f"{short[type(one)]}{one.chunk}"
        for one in program
        if isinstance(one, Forward | Backward | Gather | Release)
    ]


def test_the_last_stage_gathers_its_last_chunk_once_for_both_visits() -> None:
    program = stage_program(by_chunks(shape("1f1b", 2, 3, chunks=2), "chunks"), 1)
    assert " ".join(without_messages(program)) == (
        "gather 0 F0.0 F1.0 F2.0 release 0 "
        "gather 1 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 release 1 "
        "gather 0 B0.0 B1.0 B2.0 release 0"
    )
    gathers = [one for one in program if isinstance(one, Gather)]
    assert gathers == [Gather(0, forward=True), Gather(1, forward=True), Gather(0, forward=False)]


def test_a_chunk_is_gathered_when_the_visit_before_it_begins() -> None:
    pipeline = by_chunks(shape("1f1b", 2, 2, chunks=3), "chunks_ahead")
    assert " ".join(without_messages(stage_program(pipeline, 0))) == (
        "gather 0 gather 1 F0.0 F1.0 release 0 gather 2 F0.1 F1.1 release 1 F0.2 F1.2 gather 1 "
        "B0.2 B1.2 release 2 gather 0 B0.1 B1.1 release 1 B0.0 B1.0 release 0"
    )


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    stages, chunks = draw(st.integers(2, 5)), draw(st.integers(2, 4))
    micro_batches = draw(st.integers(stages, 4 * stages + 1))
    groups = draw(st.integers(1, micro_batches // stages))
    schedule = draw(st.sampled_from(["1f1b", "forward_only"]))
    pipeline = shape(schedule, stages, micro_batches, chunks, groups)
    return by_chunks(pipeline, draw(st.sampled_from(["chunks", "chunks_ahead"])))


@given(pipelines())
def test_each_chunk_is_held_while_it_computes(pipeline: Pipeline) -> None:
    check_schedule(pipeline)
    for stage in range(pipeline.stages):
        order, holds = order_of(pipeline, stage), holds_of(pipeline, stage)
        held = [[h for h in holds if h.first <= at <= h.last] for at in range(len(order))]
        for compute, now in zip(order, held, strict=True):
            own = [hold for hold in now if hold.chunk == compute.chunk]
            assert len(own) == 1
            assert own[0].forward or isinstance(compute, Backward)
        passes = 1 if pipeline.schedule == "forward_only" else 2
        assert pipeline.chunks <= len(holds) <= passes * pipeline.groups * pipeline.chunks
        most = max(map(len, held))
        if pipeline.gather_policy == "chunks":
            assert most <= 2
        else:
            assert most <= 3
            assert len(holds) <= len(holds_of(by_chunks(pipeline, "chunks"), stage))


@given(pipelines())
def test_visits_are_runs_of_the_order(pipeline: Pipeline) -> None:
    for stage in range(pipeline.stages):
        order, visits = order_of(pipeline, stage), visits_of(pipeline, stage)
        passes = 1 if pipeline.schedule == "forward_only" else 2
        assert len(visits) == passes * pipeline.groups * pipeline.chunks
        kind = {True: Forward, False: Backward}
        of_visits = [
            [
                each
                for each in order[visit.first : visit.last + 1]
                if type(each) is kind[visit.forward]
            ]
            for visit in visits
        ]
        for visit, own in zip(visits, of_visits, strict=True):
            assert {compute.chunk for compute in own} == {visit.chunk}
        assert sum(map(len, of_visits)) == len(order)


@pytest.mark.parametrize(
    ("groups", "gathered", "in_flight"), [(8, 12.75, 9.75), (4, 6.25, 15.75), (1, 1.75, 51.75)]
)
def test_fewer_groups_gather_less_and_keep_more(
    groups: int, gathered: float, in_flight: float
) -> None:
    """In units of all parameters of a stage, and of all its activations of a micro-batch.

    Without chunks, 1f1b gathers 2 x 64 times all parameters, and keeps 8 micro-batches.
    """
    pipeline = by_chunks(shape("1f1b", 8, 64, 4, groups), "chunks")
    assert len(holds_of(pipeline, 0)) / 4 == gathered
    assert peak_in_flight(pipeline, 0) / 4 == in_flight


BROKEN: list[tuple[Edit, str]] = [
    (without(Gather(1, forward=True)), f"{Forward(0, 1)} comes before all that it needs"),
    (without(Gather(0, forward=False)), f"{Backward(0, 0)} comes before all that it needs"),
    (moved(Gather(1, forward=True), before=Forward(1, 1)), f"{Forward(0, 1)} comes before all"),
    (
        swapped(Gather(0, forward=True), Gather(0, forward=False)),
        f"{Forward(0, 0)} comes before all that it needs is gathered",
    ),
    (
        moved(Release(1), before=Backward(2, 1)),
        f"{Backward(2, 1)} comes before all that it needs is gathered",
    ),
    (
        inserted(Gather(1, forward=False), before=Backward(1, 1)),
        "comes before the chunk is released",
    ),
    (
        inserted(Release(0), before=Forward(0, 1)),
        f"{Release(0)} comes before the chunk is gathered",
    ),
    (without(Release(1)), "pipeline stage 1 of 2 never releases chunk 1"),
]


@pytest.mark.parametrize(("edit", "law"), BROKEN)
def test_a_program_that_uses_what_is_not_gathered_is_refused(edit: Edit, law: str) -> None:
    pipeline = by_chunks(shape("1f1b", 2, 3, chunks=2), "chunks")
    with pytest.raises(ScheduleError, match=re.escape(law)):
        check_programs(pipeline, edited(pipeline, 1, edit))

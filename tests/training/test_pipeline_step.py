"""A measured step: when its computations ran, and what each cause of a slow step costs."""

import pytest

from megaspeed.pipeline.schedules import Backward, Forward, LoadMicroBatch, OptimizerStep, Pipeline
from megaspeed.pipeline.simulation import Durations, simulate
from megaspeed.training.pipeline_step import EXPOSED, PipelineStep, StageTimes
from tests.pipeline.bars import BLACK, bars
from tests.pipeline.shapes import shape


def stages_of(
    pipeline: Pipeline, durations: Durations, before: float, after: float
) -> list[StageTimes]:
    """Return the times of simulated stages, as if the exchange came ``after`` the last backward."""
    timeline = simulate(pipeline, durations)
    zero = timeline.length + after
    return [
        StageTimes(
            begin=-before - zero,
            end=0,
            computes=[(span.start - zero, span.end - zero, 0.0) for span in spans],
        )
        for spans in timeline.computes
    ]


def test_a_computation_starts_when_its_input_has_arrived() -> None:
    forward, backward = Forward(0), Backward(0)
    times = StageTimes.of(
        [
            ("host", None, 0.001),
            ("data_loading", LoadMicroBatch(0), 0.002),
            ("compute", forward, 0.001),  # until it waits
            ("pipeline", forward, 0.010),
            ("compute", forward, 0.004),
            ("data", forward, 0.003),
            ("tensor", forward, 0.002),
            ("data", forward, 0.001),
            ("pipeline", None, 0.020),
            ("compute", backward, 0.006),
            ("optimizer", OptimizerStep(), 0.001),
            ("world", OptimizerStep(), 0.005),
            ("optimizer", OptimizerStep(), 0.002),
        ]
    )
    assert [times.begin, times.end] == pytest.approx([-56, 2])
    assert times.computes == [pytest.approx((-42, -32, 4)), pytest.approx((-12, -6, 0))]


@pytest.mark.parametrize("chunks", [1, 2])
def test_an_equal_pipeline_with_free_messages_loses_only_its_bubble(chunks: int) -> None:
    pipeline = shape("1f1b", 4, 8, chunks, 2 if chunks > 1 else 1)
    step = PipelineStep(pipeline, stages_of(pipeline, Durations.in_ticks(pipeline), 5, 10))
    assert step.lost == {"bubble": 3 * (1 + 2), "imbalance": 0, "messages and jitter": 0}
    assert step.work == 8 * chunks * (1 + 2) and step.length == 5 + step.work + 3 * (1 + 2) + 10


def test_the_costs_of_a_slow_chunk_and_of_messages_are_apart() -> None:
    """By hand: with one micro-batch, only one stage computes at a time: 1 + 3 + 6 + 2."""
    pipeline = shape("1f1b", 2, 1)
    durations = Durations(forward=[1, 3], backward=[2, 6], message=0.5)
    step = PipelineStep(pipeline, stages_of(pipeline, durations, 0, 0))
    assert step.work == 6
    assert step.lost == {"bubble": 6, "imbalance": 0, "messages and jitter": 1}

    # With four micro-batches the slow stage always computes, after one forward of the other and
    # before one backward of it: 1 + 4 x (3 + 6) + 2. Of equal stages, it is (4 + 1) x (2 + 4).
    pipeline = shape("1f1b", 2, 4)
    durations = Durations(forward=[1, 3], backward=[2, 6])
    step = PipelineStep(pipeline, stages_of(pipeline, durations, 0, 0))
    assert step.work == 24
    assert step.lost == {"bubble": 6, "imbalance": 9, "messages and jitter": 0}


def test_the_picture_has_the_measured_step_above_its_simulations() -> None:
    pipeline = shape("1f1b", 2, 2, 2)
    count = pipeline.virtual_stages
    slow = Durations(forward=[10] * count, backward=[20] * (count - 1) + [40], message=3)
    times = stages_of(pipeline, slow, 4, 6)
    start, end, _ = times[1].computes[0]
    times[1].computes[0] = (start, end, 2.5)  # of which it waited for gathered parameters
    step = PipelineStep(pipeline, times)
    figure = step.draw("costs $1 and $2, step 3")

    assert figure.get_suptitle() == f"costs $1 and $2, step 3: {step.length:,.1f} ms"
    for panel, timeline in enumerate((step.measured, step.steady, step.equal)):
        found = bars(figure, boxes=True, panel=panel)
        starts = {
            (stage, round(start, 3))
            for rows in found.values()
            for stage, spans in rows.items()
            for start, _ in spans
        }
        for stage, computes in enumerate(timeline.computes):
            assert {(stage, round(span.start, 3)) for span in computes} <= starts
        title = figure.axes[panel].get_title("left")
        assert f"{timeline.length:,.1f} ms" in title
    bubble, imbalance, jitter = (f"{cause} {ms:,.1f} ms" for cause, ms in step.lost.items())
    assert min(step.lost.values()) > 0
    assert jitter in figure.axes[1].get_title("left")
    assert imbalance in title and bubble in title
    (line,) = bars(figure, boxes=False)[BLACK][1]
    assert [*line] == pytest.approx([13, 15.5]), "after a forward and a message"
    assert EXPOSED in {text.get_text() for text in figure.legends[0].get_texts()}

"""A picture of a step has a box for each computation, at its time, in the colour of its chunk."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from matplotlib import colormaps
from matplotlib.figure import Figure

from megaspeed.data_axis.buckets import reduction_of_matrices
from megaspeed.pipeline.picture import HELD, REDUCED, Panel, draw, draw_schedule, save
from megaspeed.pipeline.schedules import Backward, Forward, pipeline_of
from megaspeed.pipeline.simulation import simulate
from tests.pipeline.bars import BLACK, bars
from tests.pipeline.shapes import shape
from tests.support.tiny import tiny_run

LIGHT, DARK = (colormaps["tab20"].colors[first::2] for first in (1, 0))  # type: ignore[attr-defined]


def schedule(pp: int, v: int, m: int, k: int, **changes: Any) -> Figure:
    changes.setdefault("zero_optimization", {"stage": 3})
    run = tiny_run(
        Path(__file__),
        pp=pp,
        dp=2,
        model={"num_hidden_layers": pp * v},
        parallel={"virtual_stages": v, "micro_batch_groups": k},
        train_batch_size=2 * m,
        gradient_accumulation_steps=m,
        **changes,
    )
    sums_visits = reduction_of_matrices(run, "cuda", run.grid.copies).when == "visit"
    return draw_schedule(pipeline_of(run), sums_visits=sums_visits)


def test_each_computation_is_a_box_at_its_time_in_the_colour_of_its_chunk() -> None:
    figure, timeline = schedule(4, 2, 8, 2), simulate(shape("1f1b", 4, 8, 2, 2))
    found = bars(figure, boxes=True)
    for colours, kind in ((LIGHT, Forward), (DARK, Backward)):
        for chunk in range(2):
            assert found[colours[chunk]] == {
                stage: {
                    (span.start, span.end)
                    for span in spans
                    if isinstance(span.instruction, kind) and span.instruction.chunk == chunk
                }
                for stage, spans in enumerate(timeline.computes)
            }
    numbers = Counter(text.get_text() for text in figure.axes[0].texts)
    assert numbers == {str(m): 4 * 2 * 2 for m in range(8)}, "each forward and backward has one"


def test_a_line_shows_how_long_a_chunk_is_held_and_when_its_gradients_are_reduced() -> None:
    """The order of stage 1, with ``F0'`` for chunk 1:

    tick   0  1  2  3  4  5  6  7  8  9 10 11 12 13
           .  F0 F1 F0'B0'B0'F1'B1'B1'B0 B0 B1 B1 .
    """
    figure = schedule(2, 2, 2, 1)
    lines = bars(figure, boxes=False)
    # The first gather starts in tick 0, while the stage waits for the input of F0.
    assert lines[DARK[0]][1] == {(0, 3), (9, 13)} and lines[DARK[1]][1] == {(3, 9)}
    assert lines[BLACK][1] == {(7, 9), (11, 13)}
    (legend,) = figure.legends
    assert {HELD, REDUCED} < {text.get_text() for text in legend.get_texts()}


def test_without_gathers_of_chunks_there_is_no_line() -> None:
    for figure in (
        schedule(2, 1, 4, 1),
        schedule(2, 2, 4, 1, zero_optimization={"stage": 1}),
    ):
        assert not bars(figure, boxes=False)
        assert not {HELD, REDUCED} & {text.get_text() for text in figure.legends[0].get_texts()}


def test_the_title_states_the_shape_the_bubble_and_the_peak() -> None:
    assert schedule(4, 2, 8, 2).axes[0].get_title("left").splitlines() == [
        "1f1b: 4 pipeline stages, v = 2 chunks each, k = 2 groups of M = 8 micro-batches",
        "bubble: 15.8% of the step; peak in flight: 11 forwards of a chunk",
    ]
    assert schedule(2, 1, 4, 1).axes[0].get_title("left").splitlines() == [
        "1f1b: 2 pipeline stages, M = 4 micro-batches",
        "bubble: 20.0% of the step; peak in flight: 2 forwards",
    ]


def test_numbers_are_only_written_where_they_fit(tmp_path: Path) -> None:
    """In the rendered picture, each number is within its box; narrow boxes have none."""
    assert not schedule(8, 4, 64, 8).axes[0].texts
    figure = schedule(2, 1, 40, 1)  # numbers with one and with two digits
    figure.savefig(tmp_path / "drawn.png")
    (axes,) = figure.axes
    assert {len(text.get_text()) for text in axes.texts} == {1, 2}
    boxes = [
        path.get_extents().transformed(axes.transData)
        for each in axes.collections
        for path in each.get_paths()
        if path.get_extents().width < 3
    ]
    for text in axes.texts:
        drawn = text.get_window_extent()
        x, y = (drawn.x0 + drawn.x1) / 2, (drawn.y0 + drawn.y1) / 2
        (box,) = [each for each in boxes if each.contains(x, y)]
        assert box.x0 <= drawn.x0 and drawn.x1 <= box.x1


def test_panels_have_one_scale() -> None:
    pipeline = shape("1f1b", 2, 2)
    step = simulate(pipeline)
    figure = draw(pipeline, [Panel("", step, end=30.0), Panel("", step)], "ms")
    assert [axes.get_xlim() for axes in figure.axes] == [(0, 30)] * 2
    assert "rest of the step" in {text.get_text() for text in figure.legends[0].get_texts()}


@pytest.mark.parametrize(
    ("suffix", "first"), [(".png", b"\x89PNG"), (".SVG", b"<?xml"), (".pdf", b"%PDF")]
)
def test_the_suffix_is_the_format(suffix: str, first: bytes, tmp_path: Path) -> None:
    save(schedule(2, 1, 4, 1), tmp_path / f"step{suffix}")
    assert (tmp_path / f"step{suffix}").read_bytes().startswith(first)

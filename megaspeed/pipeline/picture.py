"""Draws a step: a row for each pipeline stage, time from left to right.

    box     a forward (light) or a backward (dark) of a micro-batch; each chunk has its colour
    line    below the boxes: while something is true of a chunk, such as that it is held

Boxes have the number of the micro-batch if there is space. Panels of one picture have one scale.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megaspeed.files.durable import write_file
from megaspeed.pipeline.schedules import Backward, Compute, Forward, Pipeline, peak_in_flight
from megaspeed.pipeline.simulation import SimulatedStep, simulate
from megaspeed.pipeline.visits import holds_of, visits_of
from megaspeed.units import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
HELD, REDUCED = "parameters of the chunk are held", "its gradients are reduced"
_IDLE, _REST = "0.95", "0.82"
_LARGEST_INCHES = 24.0
_POINTS_PER_INCH, _FONT_POINTS, _POINTS_PER_DIGIT = 72, 7.0, 4.5


class Line(NamedTuple):
    """A time in which something is true of a chunk."""

    chunk: int
    start: float
    end: float
    label: str  # what is true; in the colour of the chunk if it is ``HELD``, otherwise in black


class Panel(NamedTuple):
    """A drawing of one step, whose first forward begins at 0."""

    title: str
    timeline: SimulatedStep
    lines: Sequence[Sequence[Line]] = ()  # of each pipeline stage
    end: float = 0.0  # of the step, if it continues after the last backward


def draw_schedule(pipeline: Pipeline, *, sums_visits: bool) -> "Figure":
    """Draw the timetable of a step in ticks: chunks are equal, nothing else takes time.

    Args:
        pipeline: the shape of the step.
        sums_visits: whether gradients are reduced in the last backward of each visit.
    """
    timeline, stages = simulate(pipeline), range(pipeline.stages)
    most = max(peak_in_flight(pipeline, stage) for stage in stages)
    title = f"{pipeline.schedule}: {counted(pipeline.stages, 'pipeline stage')}, "
    of_a_chunk = " of a chunk" if pipeline.chunks > 1 else ""
    if pipeline.chunks > 1:
        title += f"v = {pipeline.chunks} chunks each, k = {counted(pipeline.groups, 'group')} of "
    title += (
        f"M = {counted(pipeline.micro_batches, 'micro-batch')}\n"
        f"bubble: {pipeline.ideal_bubble:.1%} of the step; "
        f"peak in flight: {counted(most, 'forward')}{of_a_chunk}"
    )
    unit = f"time (1: a forward{of_a_chunk} over a micro-batch)"
    lines: list[list[Line]] = []
    for stage, spans in enumerate(timeline.computes):
        holds, visits = holds_of(pipeline, stage), visits_of(pipeline, stage)
        # A gather starts when the computation before it has ended.
        ends = [0.0, *(span.end for span in spans)]
        held = [Line(h.chunk, ends[h.first], ends[h.last + 1], HELD) for h in holds]
        last = [spans[visit.last] for visit in visits if not visit.forward]
        reduced = [Line(s.instruction.chunk, s.start, s.end, REDUCED) for s in last]
        lines.append(held + reduced * sums_visits)
    return draw(pipeline, [Panel(title, timeline, lines)], unit)


def draw(pipeline: Pipeline, panels: Sequence[Panel], unit: str, title: str = "") -> "Figure":
    """Draw panels, one below the other. ``unit`` is that of the times, and written below them."""
    # Imported here: matplotlib takes long to import.
    from matplotlib.figure import Figure
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    width = min(_LARGEST_INCHES, max(9.0, 1.2 + 0.33 * len(panels[0].timeline.computes[0])))
    row = min(0.25 + 0.02 * width, _LARGEST_INCHES / pipeline.stages / len(panels))  # in inches
    height = 1.2 + len(panels) * (0.6 + row * pipeline.stages)
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=10, parse_math=False)  # a "$" in the run's name is no formula
    end = max(max(panel.timeline.length, panel.end) for panel in panels)
    points = _POINTS_PER_INCH * (width - 1.2) / end  # of one unit of time
    for axes, panel in zip(figure.subplots(len(panels), squeeze=False).flat, panels, strict=True):
        _draw_panel(axes, pipeline, panel, points, _POINTS_PER_INCH * row)
        axes.set(xlim=(0, end), ylim=(pipeline.stages - 0.4, -0.6), yticks=range(pipeline.stages))
        axes.set_title(panel.title, fontsize=9, loc="left")
        axes.set_ylabel("pipeline stage", fontsize=8)
        axes.tick_params(labelsize=8, left=False)
        axes.spines[["top", "left", "right"]].set_visible(False)
    axes.set_xlabel(unit, fontsize=8)

    labels: dict[str, Any] = {}
    for chunk in range(pipeline.chunks):
        name = f"chunk {chunk}: " if pipeline.chunks > 1 else ""
        pair = tuple(Patch(color=_colour(chunk, kind)) for kind in (Forward, Backward))
        labels[f"{name}forward, backward"] = pair
    for line in (line for panel in panels for lines in panel.lines for line in lines):
        if line.label not in labels:
            labels[line.label] = axes.plot([], [], color="0.6" if line.label == HELD else "k")[0]
    if any(panel.end for panel in panels):
        labels["rest of the step"] = Patch(color=_REST)
    figure.legend(
        labels.values(),
        labels.keys(),
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="outside lower center",
        ncols=min(len(labels), int(width / 2.2)),
        fontsize=8,
        frameon=False,
    )
    return figure


def _draw_panel(
    axes: Any, pipeline: Pipeline, panel: Panel, points_per_unit: float, points_per_row: float
) -> None:
    top, bottom = -0.42, 0.2 if any(panel.lines) else 0.42  # of the boxes; 0 is the row's middle
    lane = (0.46 - bottom) / pipeline.chunks
    bars: defaultdict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
    for stage, spans in enumerate(panel.timeline.computes):
        bars[stage + top, bottom - top, _IDLE].append((0, panel.timeline.length))
        for span in spans:
            compute, length = span.instruction, span.end - span.start
            colour = _colour(compute.chunk, type(compute))
            bars[stage + top, bottom - top, colour].append((span.start, length))
            text = str(compute.micro_batch)
            needs = 2 + _POINTS_PER_DIGIT * len(text)
            if points_per_unit * length > needs and points_per_row > 2 * _FONT_POINTS:
                axes.text(
                    span.start + length / 2,
                    stage + (top + bottom) / 2,
                    text,
                    color="w" if isinstance(compute, Backward) else "k",
                    fontsize=_FONT_POINTS,
                    ha="center",
                    va="center_baseline",
                )
        for line in panel.lines[stage] if panel.lines else ():
            held = line.label == HELD
            colour = _colour(line.chunk, Backward) if held else "k"
            middle = stage + bottom + lane * (line.chunk + 0.6)
            thickness = lane * (0.8 if held else 0.4)
            place = (middle - thickness / 2, thickness, colour)
            bars[place].append((line.start, line.end - line.start))
    for (y, thickness, colour), ranges in bars.items():
        is_box = thickness == bottom - top
        edge = min(0.6, 0.1 * points_per_unit * min(length for _, length in ranges)) * is_box
        axes.broken_barh(ranges, (y, thickness), facecolor=colour, edgecolor="w", linewidth=edge)
    if panel.end:
        axes.axvspan(panel.timeline.length, panel.end, color=_REST, linewidth=0)


def _colour(chunk: int, kind: type[Compute]) -> Any:
    """The light or the dark colour of a chunk. Those of ten chunks differ."""
    from matplotlib import colormaps

    # This map has ten pairs of a dark and a light colour.
    return colormaps["tab20"](2 * (chunk % 10) + (kind is Forward))


def save(figure: "Figure", file: Path) -> None:
    """Write a figure in the format of the file's suffix, which is one of ``SUFFIXES``."""
    suffix = file.suffix[1:].lower()
    write_file(file, lambda stream: figure.savefig(stream, format=suffix, dpi=160))

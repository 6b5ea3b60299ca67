"""Charts of numbers over steps, as SVG inside an HTML page.

matplotlib draws in black, which becomes the colour of the page's text (``currentColor``), so a
chart can be read in dark mode too. Invisible circles with a ``<title>`` are drawn over the lines. A
browser shows the title, which is the exact number, on hover, without a script.
"""

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from megaspeed.reports.run_record import RunRecord

# Readable on white and on black.
COLOURS = ("#3b82f6", "#f07818", "#16a34a", "#d946ef", "#0ea5b7", "#ef4444", "#8b7cf6", "#a08000")
_INCHES = (5.2, 2.9)
_POINTS_PER_INCH = 72
_MOST_DRAWN, _MOST_HOVERED = 800, 120


class Chart(NamedTuple):
    """The curves of one picture, and what is written around them."""

    title: str
    unit: str
    curves: tuple[str, ...]  # how the names of its curves begin
    caption: str = ""
    scale: float = 1.0  # a value of 1 in the unit of the chart
    logarithmic: bool = False
    for_each_run: bool = False  # whether each run has a chart of its own


CHARTS = (
    Chart("Loss", "nats per token", ("loss", "validation_loss"), "dots: validation"),
    Chart("Gradient norm", "before clipping", ("grad_norm",), logarithmic=True),
    Chart("Learning rate", "", ("learning_rate",)),
    Chart("Throughput", "tokens/s, all ranks", ("tokens_per_second",)),
    Chart("Operations", "TFLOP/s a rank", ("tflops_per_rank",)),
    Chart("MFU", "share of the dense peak", ("mfu",)),
    Chart(
        "Parts of a step",
        "ms, mean over the ranks",
        ("parts_seconds/",),
        caption="tensor, data, pipeline: time in which computation waits for that axis",
        scale=1000.0,
        for_each_run=True,
    ),
    Chart("Peak memory of a rank", "MiB", ("peak_memory_bytes/",), scale=2.0**-20),
)


class Line(NamedTuple):
    """One line of a chart."""

    run: str
    label: str  # what distinguishes it from other lines of its run; may be empty
    colour: str
    width: float  # if two lines are equal, the wider one below stays visible
    steps: np.ndarray  # of finite values, at least one
    values: np.ndarray


def draw_charts(runs: Mapping[str, RunRecord]) -> Iterator[tuple[str, str, str]]:
    """Yield title, caption and ``<svg>`` element of each chart that has a line."""
    restarts = {step for run in runs.values() for step in run.resumptions}
    one_by_one = {f", {name}": {name: run} for name, run in runs.items()}
    for chart in CHARTS:
        for suffix, shown in (one_by_one if chart.for_each_run else {"": runs}).items():
            lines = list(_lines(chart, shown))
            if lines:
                yield chart.title + suffix, chart.caption, draw(chart, lines, sorted(restarts))


def _lines(chart: Chart, runs: Mapping[str, RunRecord]) -> Iterator[Line]:
    """Yield the lines of a chart. If it shows one run, each line has its own colour."""
    for place, (name, run) in enumerate(runs.items()):
        width = 1.3 + 1.2 * min(len(runs) - 1 - place, 3)
        for index, curve in enumerate(run.names_of(*chart.curves)):
            steps, values = run.curves[curve]
            drawable = np.isfinite(values) & ((values > 0) | (not chart.logarithmic))
            if drawable.any():
                colour = COLOURS[(index if len(runs) == 1 else place) % len(COLOURS)]
                points = steps[drawable], values[drawable] * chart.scale
                yield Line(name, _label(curve), colour, width, *points)


def _label(curve: str) -> str:
    quantity, _, part = curve.partition("/")
    labels = {
        "validation_loss": "validation",
        "peak_memory_bytes": f"pipeline stage {part}",
        "parts_seconds": part.replace("_", " "),
    }
    return labels.get(quantity, "")


def draw(chart: Chart, lines: Sequence[Line], restarts: Sequence[int] = ()) -> str:
    """Return the ``<svg>`` element of a chart, with a dashed line at each step of ``restarts``."""
    # Imported here: matplotlib takes long to import, and other commands do not need it.
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    # Text stays text, and the same chart has the same ids.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "megaspeed", "font.size": 9}):
        figure = Figure(figsize=_INCHES, dpi=_POINTS_PER_INCH, layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel=chart.unit)
        axes.patch.set_visible(False)
        for line in lines:
            steps, values = _thinned(line.steps), _thinned(line.values)
            few = len(steps) == 1 or line.label == "validation"
            width, dots = (0.8, "o") if few else (line.width, None)
            axes.plot(steps, values, color=line.colour, lw=width, marker=dots, ms=2 + line.width)
        if len(lines) > 1 and len({line.run for line in lines}) == 1:
            labels = [line.label or "training" for line in lines]
            figure.legend(axes.lines, labels, loc="outside lower center", ncols=4, frameon=False)
        for step in restarts:
            axes.axvline(step, color="black", lw=0.8, ls=(0, (2, 3)), alpha=0.6)
        if chart.logarithmic:
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            decades = LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,))
            axes.yaxis.set_major_locator(MaxNLocator(5) if high < 10 * low else decades)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(color="black", alpha=0.15)
        axes.spines[["top", "right"]].set_visible(False)
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True)
        circles = [_circles(line, axes.transData.transform) for line in lines]
    svg = written.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r' id="[a-z_]+_\d+"', "", svg)  # one page holds several charts
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg role="img" viewBox="\1">', svg)
    body = svg.replace("#000000", "currentColor").rstrip().removesuffix("</svg>")
    return f'{body}<g class="hover">{"".join(circles)}</g></svg>'


def _thinned(numbers: np.ndarray) -> np.ndarray:
    """Return at most ``_MOST_DRAWN`` numbers, each the mean of equally many neighbours."""
    size = -(-len(numbers) // _MOST_DRAWN)
    groups = np.split(numbers, range(size, len(numbers), size))
    return np.array([group.mean() for group in groups])


def _circles(line: Line, to_display: Callable[[np.ndarray], np.ndarray]) -> str:
    """Return circles over some of the points, evenly spaced, and always over the last."""
    every = -(-len(line.steps) // _MOST_HOVERED)
    shown = [*range(0, len(line.steps) - 1, every), -1]
    steps, values = line.steps[shown], line.values[shown]
    places = to_display(np.column_stack((steps, values)))
    name = f"{line.run}, {line.label}" if line.label else line.run
    top = _INCHES[1] * _POINTS_PER_INCH
    return "".join(
        f'<circle cx="{x:.1f}" cy="{top - y:.1f}" r="5">'
        f"<title>{escape(name)}, step {step:,}: {value:.8g}</title></circle>"
        for (x, y), step, value in zip(places, steps, values, strict=True)
    )

"""Charts of numbers over steps, as SVG inside an HTML page.

matplotlib draws. Its text and axes take the colour of the page's text (``currentColor``), so a
chart can be read in dark mode too. Invisible circles with a ``<title>`` are drawn over the lines. A
browser shows the title, which is the exact number, on hover, without a script.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_INCHES = (5.2, 2.9)
_POINTS_PER_INCH = 72
_MOST_DRAWN = 800
_MOST_HOVERED = 120
_TEXT_COLOUR = "#010203"
"""A placeholder for the colour of the page's text."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a chart."""

    name: str  # shown on hover
    colour: str  # as CSS writes it
    points: Sequence[tuple[int, float]]  # (step, value), in the order of their steps
    width: float = 1.3  # if two lines are equal, the wider one below stays visible
    dotted: bool = False  # whether the values are drawn as dots with a thin line between them


@dataclass(frozen=True, kw_only=True)
class Chart:
    """The lines of one picture, and what is written around them."""

    title: str
    unit: str  # of the values
    series: Sequence[Series]
    logarithmic: bool = False  # whether the axis of the values is logarithmic
    caption: str = ""  # further text beside the title
    legend: bool = False  # whether the lines are named below the chart


def draw(chart: Chart, restarts: Sequence[int] = ()) -> str:
    """The ``<svg>`` element of a chart, with a dashed line at each step of ``restarts``."""
    # Imported here: matplotlib takes long to import, and other commands do not need it.
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    style = {
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": chart.title,  # ids depend only on the chart's title
        "text.color": _TEXT_COLOUR,
        "axes.labelcolor": _TEXT_COLOUR,
        "axes.edgecolor": _TEXT_COLOUR,
        "xtick.color": _TEXT_COLOUR,
        "ytick.color": _TEXT_COLOUR,
        "grid.color": _TEXT_COLOUR,
        "font.size": 9,
    }
    with rc_context(style):
        figure = Figure(figsize=_INCHES, dpi=_POINTS_PER_INCH, layout="constrained")
        axes = figure.add_subplot()
        axes.patch.set_visible(False)
        if chart.logarithmic:
            axes.set_yscale("log")
        for series in chart.series:
            steps, values = zip(*_thinned(series.points), strict=True)
            few = series.dotted or len(values) == 1
            axes.plot(
                steps,
                values,
                color=series.colour,
                lw=0.8 if few else series.width,
                marker="o" if few else None,
                markersize=2.5 + series.width,
                label=series.name,
            )
        if chart.legend:
            figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
        for step in restarts:
            axes.axvline(step, color=_TEXT_COLOUR, lw=0.8, ls=(0, (2, 3)), alpha=0.6)
        if chart.logarithmic:
            low, high = axes.get_ylim()
            labels = LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,))
            axes.yaxis.set_major_locator(MaxNLocator(5) if high < 10 * low else labels)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("step")
        axes.set_ylabel(chart.unit)
        axes.grid(alpha=0.15)
        axes.spines[["top", "right"]].set_visible(False)
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True)
        height = _INCHES[1] * _POINTS_PER_INCH
        hovers = [
            (x, height - y, f"{series.name}, step {step:,}: {value:.8g}")
            for series in chart.series
            for step, value in _spaced(series.points)
            for x, y in [axes.transData.transform((step, value))]
        ]
    return _inline(written.getvalue(), chart.title, hovers)


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """At most ``_MOST_DRAWN`` points, each the mean of equally many neighbours."""
    size = -(-len(points) // _MOST_DRAWN)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group))
        for group in groups
    ]


def _spaced(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Some of the points, evenly spaced, and always the last."""
    every = -(-len(points) // _MOST_HOVERED)
    return [*points[:-1:every], points[-1]]


def _inline(svg: str, title: str, hovers: Sequence[tuple[float, float, str]]) -> str:
    """The SVG as an element of an HTML page, with the circles for hover on top."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[a-z_]+_\d+"', "", svg)  # one page holds several charts
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg role="img" viewBox="\1">', svg)
    svg = svg.replace(_TEXT_COLOUR, "currentColor")
    circles = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{escape(text)}</title></circle>'
        for x, y, text in hovers
    )
    label = f"<title>{escape(title)}</title>"
    body = svg.rstrip().removesuffix("</svg>").replace(">", f">{label}", 1)
    return f'{body}<g class="hover">{circles}</g></svg>'

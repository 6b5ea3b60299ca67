"""What memory costs in traffic: each row a point, its peak over the bytes that it sends."""

from pathlib import Path
from typing import Any

from megaspeed.analysis.compare.heading import chart_title
from megaspeed.analysis.compare.result import ComparisonResult
from megaspeed.analysis.compare.variants import Engine
from megaspeed.analysis.units import memory_unit

_STYLES: dict[Engine, tuple[str, str, str]] = {
    "zero": ("o", "#0072B2", "megaspeed"),
    "ddp": ("s", "#D55E00", "torch DDP"),
    "fsdp": ("D", "#009E73", "torch FSDP2"),
}
# Where a label may stand, as seen from its point, the first that is free: in points of the page.
_PLACES = [
    (dx, dy, align)
    for distance in (0, 9, 18, 27)
    for dx, dy, align in (
        (8, -3 + distance, "left"),
        (8, -3 - distance, "left"),
        (-8, -3 + distance, "right"),
        (-8, -3 - distance, "right"),
        (0, 9 + distance, "center"),
        (0, -15 - distance, "center"),
    )
]


def draw_trade_off_chart(result: ComparisonResult, picture: Path) -> None:
    """Writes a PNG: measured peak of the fullest rank over counted bytes of the busiest one."""
    # Imported here: drawing comes last, and matplotlib takes long to import.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = result.done
    memory = memory_unit(row.highest.peak_bytes for row in rows)
    traffic = memory_unit(row.busiest.traffic_bytes for row in rows)
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    points = []
    shown: set[Engine] = set()
    for row in rows:
        engine = row.variant.engine
        marker, colour, name = _STYLES[engine]
        x, y = row.busiest.traffic_bytes / traffic.size, row.highest.peak_bytes / memory.size
        label = None if engine in shown else name
        axes.plot(x, y, marker, color=colour, markersize=7, label=label, zorder=3)
        points.append((x, y, row.variant.label))
        shown.add(engine)
    axes.set_xlabel(f"sent by the busiest rank in one step ({traffic.name})")
    axes.set_ylabel(f"peak of the fullest rank ({memory.name})")
    # A "$" in the run's name is no formula.
    axes.set_title(chart_title(result), fontsize=7.5, loc="left", parse_math=False)
    axes.margins(0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    if len(shown) > 1:
        axes.legend(fontsize=8, frameon=False)
    canvas.draw()  # fixes where the points are on the page, which the labels must know
    _label(axes, canvas.get_renderer(), points)
    figure.savefig(picture, dpi=160)


def _label(axes: Any, renderer: Any, points: list[tuple[float, float, str]]) -> None:
    """Names each point, so that no name covers a point or another name."""
    from matplotlib.transforms import Bbox

    pixels = [axes.transData.transform(point[:2]) for point in points]
    size = renderer.points_to_pixels(9.0)
    taken = [Bbox.from_bounds(x - size / 2, y - size / 2, size, size) for x, y in pixels]
    for x, y, name in points:
        for dx, dy, align in _PLACES:
            text = axes.annotate(
                name,
                (x, y),
                xytext=(dx, dy),
                textcoords="offset points",
                ha=align,
                fontsize=8,
            )
            box = text.get_window_extent(renderer)
            inside = axes.bbox.x0 <= box.x0 and box.x1 <= axes.figure.bbox.x1
            if inside and not any(box.overlaps(other) for other in taken):
                break
            text.remove()
        else:
            text = axes.annotate(
                name, (x, y), xytext=(8, -3), textcoords="offset points", fontsize=8
            )
            box = text.get_window_extent(renderer)
        taken.append(box)

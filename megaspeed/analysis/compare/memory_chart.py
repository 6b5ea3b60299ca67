"""The peak of each row as two stacked bars, predicted beside measured, by category."""

from pathlib import Path

from megaspeed.analysis.compare.heading import chart_title
from megaspeed.analysis.compare.result import ComparisonResult
from megaspeed.analysis.costs.memory import MemoryBytes
from megaspeed.analysis.units import memory_unit

# Okabe & Ito's palette, told apart by every kind of eye and in print.
_COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer_states": "#009E73",
    "activations": "#CC79A7",
    "communication_buffers": "#56B4E9",
}
_BAR_WIDTH = 0.38
_HALF_A_PAIR = _BAR_WIDTH / 2 + 0.01
_ROW_INCHES, _MARGIN_INCHES, _HEIGHT_INCHES = 0.95, 0.8, 4.8
_LEAST_INCHES = 6.4  # what heading and legend need


def draw_memory_chart(result: ComparisonResult, picture: Path) -> None:
    """Writes a PNG: for each row that has figures, its fullest pipeline stage's peak."""
    # Imported here: drawing comes last, and matplotlib takes long to import.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows = result.done
    unit = memory_unit(row.highest.peak_bytes for row in rows)
    figure = Figure(
        figsize=(max(_LEAST_INCHES, _MARGIN_INCHES + _ROW_INCHES * len(rows)), _HEIGHT_INCHES),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    on_gpu = False
    for index, row in enumerate(rows):
        stage = row.highest
        right = float(index) if stage.predicted is None else index + _HALF_A_PAIR
        _stack(axes, right, stage.peak, unit.size, predicted=False)
        if stage.predicted is not None:
            _stack(axes, index - _HALF_A_PAIR, stage.predicted.peak, unit.size, predicted=True)
        if stage.allocator_peak_bytes is not None:
            on_gpu = True
            level = stage.allocator_peak_bytes / unit.size
            ends = right - _BAR_WIDTH / 2, right + _BAR_WIDTH / 2
            axes.hlines(level, *ends, color="black", lw=1.5)
    axes.set_xticks(
        range(len(rows)), [row.variant.label.replace(" ", "\n") for row in rows], fontsize=7.5
    )
    axes.set_ylabel(f"peak of the fullest rank ({unit.name})")
    # A "$" in the run's name is no formula.
    axes.set_title(chart_title(result), fontsize=7.5, loc="left", parse_math=False)
    axes.margins(x=0.02)
    axes.set_ylim(top=axes.get_ylim()[1] * 1.04)  # room for the numbers above the bars
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="y", alpha=0.3)
    handles: list[Patch | Line2D] = [
        Patch(color=colour, label=name.replace("_", " ")) for name, colour in _COLOURS.items()
    ]
    handles.append(
        Patch(facecolor="white", edgecolor="0.3", hatch="////", label="predicted (left)")
    )
    handles.append(Patch(facecolor="0.6", edgecolor="0.3", label="measured (right)"))
    if on_gpu:
        handles.append(Line2D([], [], color="black", lw=1.5, label="CUDA allocator's peak"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(picture, dpi=160)


def _stack(axes: object, x: float, memory: MemoryBytes, unit: int, *, predicted: bool) -> None:
    bottom = 0.0
    for name, colour in _COLOURS.items():
        height = getattr(memory, name) / unit
        axes.bar(  # type: ignore[attr-defined]
            x,
            height,
            _BAR_WIDTH,
            bottom=bottom,
            color=colour,
            alpha=0.55 if predicted else 1.0,
            hatch="////" if predicted else None,
            edgecolor="white",
            linewidth=0.4,
        )
        bottom += height
    axes.text(  # type: ignore[attr-defined]
        x, bottom, _three_digits(bottom), ha="center", va="bottom", fontsize=7
    )


def _three_digits(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"

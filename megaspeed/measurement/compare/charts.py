"""Two pictures of a comparison: the memory of each row, and memory against bytes sent."""

from pathlib import Path
from typing import Any

from megaspeed.measurement.compare.result import ComparisonResult
from megaspeed.units import memory_unit, three_digits

# The palette of Okabe & Ito: distinguishable with any colour vision, and in print.
_CATEGORIES = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer_states": "#009E73",
    "activations": "#CC79A7",
    "communication_buffers": "#56B4E9",
}
_MARKERS = "osD^vphP*X<>"
_BAR_WIDTH = 0.38


def draw_memory_chart(result: ComparisonResult, picture: Path) -> None:
    """Writes a PNG: the peak of each row's fullest stage by category, predicted beside measured."""
    rows = result.watched
    unit = memory_unit(row.highest.measured.peak_bytes for row in rows)
    figure, axes = _new_figure(result, max(6.4, 0.8 + 0.95 * len(rows)))
    # (place, memory, predicted) of each bar; a row without prediction has one bar.
    bars = []
    for index, row in enumerate(rows):
        stage = row.highest
        shift = 0.0 if stage.predicted is None else _BAR_WIDTH / 2 + 0.01
        bars.append((index + shift, stage.measured.peak, False))
        if stage.predicted is not None:
            bars.append((index - shift, stage.predicted.peak, True))
        if stage.measured.allocator_peak_bytes is not None:
            axes.hlines(
                stage.measured.allocator_peak_bytes / unit.size,
                index + shift - _BAR_WIDTH / 2,
                index + shift + _BAR_WIDTH / 2,
                color="black",
                label="CUDA allocator's peak" if index == 0 else None,
            )
    for x, memory, predicted in bars:
        bottom = 0.0
        for name, colour in _CATEGORIES.items():
            height = getattr(memory, name) / unit.size
            style = {"alpha": 0.55, "hatch": "////"} if predicted else {}
            style |= {"edgecolor": "white", "linewidth": 0.4}
            axes.bar(x, height, _BAR_WIDTH, bottom=bottom, color=colour, **style)
            bottom += height
        axes.text(x, bottom, three_digits(bottom), ha="center", va="bottom", fontsize=7)
    for name, colour in _CATEGORIES.items():
        axes.bar(0, 0, color=colour, label=name.replace("_", " "))
    axes.bar(0, 0, color="white", edgecolor="0.3", hatch="////", label="predicted (left)")
    axes.bar(0, 0, color="0.6", edgecolor="0.3", label="measured (right)")
    axes.set_xticks(range(len(rows)), [row.label.replace(" ", "\n") for row in rows], fontsize=7.5)
    axes.set_ylabel(f"peak of the fullest rank ({unit.name})")
    axes.margins(x=0.02)
    axes.set_ylim(top=axes.get_ylim()[1] * 1.04)  # space for the numbers above the bars
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(picture, dpi=160)


def draw_trade_off_chart(result: ComparisonResult, picture: Path) -> None:
    """Writes a PNG: the peak of each row's fullest rank against the bytes its busiest rank sends.

    Markers are hollow and of different shapes, so all rows at the same point can be seen.
    """
    peaks = {row.label: row.highest.measured.peak_bytes for row in result.watched}
    sent = {row.label: row.busiest.measured.sent_bytes for row in result.watched}
    memory, traffic = memory_unit(peaks.values()), memory_unit(sent.values())
    figure, axes = _new_figure(result, 7.6)
    for index, label in enumerate(peaks):
        axes.plot(
            sent[label] / traffic.size,
            peaks[label] / memory.size,
            _MARKERS[index % len(_MARKERS)],
            color=f"C{index % 10}",
            fillstyle="none",
            markersize=11,
            label=label,
        )
    axes.set_xlabel(f"sent by the busiest rank in one step ({traffic.name})")
    axes.set_ylabel(f"peak of the fullest rank ({memory.name})")
    axes.margins(0.15)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False, labelspacing=1.2)
    figure.savefig(picture, dpi=160)


def _new_figure(result: ComparisonResult, width: float) -> tuple[Any, Any]:
    """A figure and its axes, with the layout, the batch and the model as the title."""
    # Imported here: matplotlib takes long to import.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.8), layout="constrained")
    axes = figure.add_subplot()
    # parse_math is off because a "$" in the run's name is not a formula.
    axes.set_title("\n".join(result.heading), fontsize=7.5, loc="left", parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    return figure, axes

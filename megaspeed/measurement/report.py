"""The report of a measurement: text for the terminal, Markdown, JSON and one picture.

    parts    str                a paragraph, or a heading if it begins with "#"
             list of str        bullets
             Table              a Markdown table

Every line but a heading fits 80 columns.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megaspeed.config.resolve import Run
from megaspeed.files.durable import write_file
from megaspeed.measurement.turns import Device
from megaspeed.model.parameters import parameters_of
from megaspeed.units import markdown_table, wrapped

NOTHING = "-"
_BAR_WIDTH = 0.38
# The palette of Okabe & Ito, and greys: distinguishable with any colour vision, and in print.
_COLOURS = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442"),
    *("#BBBBBB", "#777777", "#333333"),
)


@dataclass(frozen=True)
class Table:
    """A table whose first column holds words."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


Part = str | list[str] | Table


def markdown(parts: Iterable[Part]) -> str:
    """The parts with empty lines between them."""
    blocks = []
    for part in parts:
        if isinstance(part, Table):
            lines = list(markdown_table(part.headings, part.rows))
        elif isinstance(part, list):
            lines = [line for text in part for line in wrapped(f"- {text}", indent="  ")]
        else:
            lines = [part] if part.startswith("#") else wrapped(part)
        blocks.append("\n".join(lines))
    return "\n\n".join(block for block in blocks if block)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar of a picture. Its parts stand on each other."""

    label: str
    parts: Mapping[str, float]
    predicted: Mapping[str, float] | None = None  # the parts of a second, hatched bar
    line: float | None = None  # a line across the bar, such as a median
    quartiles: tuple[float, float] | None = None
    text: str  # above the bar


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Bars side by side, with one unit."""

    title: str
    unit: str
    bars: Sequence[Bar]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a command shows and writes."""

    parts: Sequence[Part]  # for the terminal and the Markdown file
    details: Sequence[Part] = ()  # for the Markdown file only
    title: str  # of the Markdown file
    figures: Mapping[str, Any]  # for the JSON file
    panels: Sequence[Panel]  # of the picture; without them, there is none
    succeeded: bool

    @property
    def on_screen(self) -> str:
        """The text for the terminal."""
        return markdown(self.parts)

    def write(self, folder: Path, name: str) -> list[Path]:
        """Write NAME.json, NAME.md and NAME.png to a folder that exists. Return the files."""
        files = [folder / f"{name}.{suffix}" for suffix in ("json", "md", "png")]
        texts = [json.dumps(self.figures, indent=2)]
        texts.append(markdown([f"# {self.title}", *self.parts, *self.details]))
        if self.panels:
            texts[1] += f"\n\n![{name}]({name}.png)"
        for file, text in zip(files, texts, strict=False):
            _write(file, text)
        if not self.panels:
            return files[:2]
        draw(self.panels, files[2])  # last, so that an error in drawing loses no figures
        return files


def _write(file: Path, text: str) -> None:
    write_file(file, lambda stream: stream.write(f"{text}\n".encode()))


def describe_run(run: Run, device: Device | None) -> list[str]:
    """Return bullets: layout, batch and model. The device is omitted if it is None."""
    grid, batch, model = run.grid, run.batch, run.config.model
    elements = sum(parameter.elements for parameter in parameters_of(model).values())
    on_device = f" ({device.name})" if device else ""
    return [
        f"{run.name}: pp {grid.pp} x dp {grid.dp} x tp {grid.tp} = {grid.world_size} "
        f"ranks{on_device}, {run.precision}",
        f"{batch.train_batch_size} samples of {run.config.data.sequence_length:,} tokens a "
        f"step in {batch.gradient_accumulation_steps} micro-batches of "
        f"{batch.micro_batch_size}",
        f"{model.architecture}: {elements:,} parameters, {model.num_hidden_layers} blocks x "
        f"{model.hidden_size:,}, {model.num_attention_heads} heads, vocabulary "
        f"{model.vocab_size:,} ({'tied' if model.tie_word_embeddings else 'untied'})",
    ]


def finite(value: float) -> float | None:
    """The value for JSON, which has neither infinity nor NaN."""
    return value if math.isfinite(value) else None


def draw(panels: Sequence[Panel], picture: Path) -> None:
    """Draw the panels side by side, and write them as a picture."""
    # Imported here: matplotlib takes long to import.
    from matplotlib.figure import Figure

    widths = [max(3.2, 0.8 + 0.95 * len(panel.bars)) for panel in panels]
    figure = Figure(figsize=(max(6.4, sum(widths)), 4.8), layout="constrained")
    places = figure.subplots(1, len(panels), squeeze=False, width_ratios=widths)[0]
    for axes, panel in zip(places, panels, strict=True):
        _draw_panel(axes, panel)
    handles, labels = places[0].get_legend_handles_labels()
    if len(labels) > 1:
        style = {"ncols": 4, "fontsize": 8, "frameon": False}
        figure.legend(handles, labels, loc="outside lower center", **style)
    figure.savefig(picture, dpi=160)


def _draw_panel(axes: Any, panel: Panel) -> None:
    places, predicts = np.arange(len(panel.bars)), any(bar.predicted for bar in panel.bars)
    right = places + (_BAR_WIDTH / 2 if predicts else 0.0)
    tops = _stack(axes, right, [bar.parts for bar in panel.bars], labelled=True)
    if predicts:
        predicted = [bar.predicted or {} for bar in panel.bars]
        tops = np.maximum(tops, _stack(axes, places - _BAR_WIDTH / 2, predicted, labelled=False))
    for place, bar, top in zip(right, panel.bars, tops, strict=True):
        if bar.line is not None:
            axes.hlines(bar.line, place - _BAR_WIDTH / 2, place + _BAR_WIDTH / 2, color="black")
        if bar.quartiles is not None:
            axes.vlines(place, *bar.quartiles, color="black")
        above = (place, max(top, bar.line or 0.0, *(bar.quartiles or ())))
        offset = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center"}
        axes.annotate(bar.text, above, **offset, fontsize=7)
    axes.set_xticks(places, [bar.label for bar in panel.bars], fontsize=7.5)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_ylabel(panel.unit + ("; hatched: predicted" if predicts else ""), fontsize=8)
    # parse_math is off because a "$" in the run's name is not a formula.
    axes.set_title(panel.title, fontsize=7.5, loc="left", parse_math=False)
    axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.1)  # space for the text above the bars
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="y", alpha=0.3)


def _stack(axes: Any, places: Any, stacks: Sequence[Mapping[str, float]], *, labelled: bool) -> Any:
    """Draw a bar at each place, and return their heights."""
    bottom = np.zeros(len(places))
    style = {} if labelled else {"alpha": 0.55, "hatch": "////"}
    names = dict.fromkeys(name for parts in stacks for name in parts)
    for name, colour in zip(names, _COLOURS, strict=False):
        heights = np.array([parts.get(name, 0.0) for parts in stacks])
        label = name if labelled else None
        axes.bar(
            places, heights, _BAR_WIDTH, bottom, color=colour, label=label, edgecolor="w", **style
        )
        bottom += heights
    return bottom

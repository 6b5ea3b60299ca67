"""The report of a measurement: text for the terminal, Markdown, JSON and one picture.

    parts    str                a paragraph
             list of str        bullets
             Table              its columns are functions of a row, for the text and for JSON

Every line but a table's fits 80 columns.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megaspeed.config.resolve import Run
from megaspeed.files.durable import write_bytes
from megaspeed.files.json_values import json_value
from megaspeed.measurement.turns import Device, Result
from megaspeed.model.parameters import parameters_in_words
from megaspeed.units import markdown_table, wrapped

NOTHING = "-"
_BAR_WIDTH = 0.38
# The palette of Okabe & Ito, and greys: distinguishable with any colour vision, and in print.
_COLOURS = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442"),
    *("#BBBBBB", "#777777", "#333333"),
)


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    key: str  # in the JSON file
    value: Callable[[Any], Any]  # of a row, for JSON; None if it is not known
    heading: str = ""  # if omitted, the column is only in the JSON file
    text: Callable[[Any], str] = str  # of a value


@dataclass(frozen=True)
class Table:
    """A table whose first column holds words."""

    key: str  # in the JSON file
    columns: Sequence[Column]
    rows: Sequence[Any]

    def lines(self) -> list[str]:
        """Return the lines of the table in Markdown."""
        shown = [column for column in self.columns if column.heading]
        cells = [
            [NOTHING if (value := each.value(row)) is None else each.text(value) for each in shown]
            for row in self.rows
        ]
        return list(markdown_table([column.heading for column in shown], cells))

    def figures(self) -> list[dict[str, Any]]:
        """Return the rows as JSON values."""
        return [{each.key: each.value(row) for each in self.columns} for row in self.rows]


ReportPart = str | list[str] | Table


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar of a picture. Its parts stand on each other."""

    label: str
    parts: Mapping[str, float]
    predicted: Mapping[str, float] | None = None  # the parts of a second, hatched bar
    text: str  # above the bar


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a command shows and writes."""

    title: str
    run: Run  # described below the title
    result: Result[Any]  # its notes come next
    parts: Sequence[ReportPart]
    facts: Mapping[str, Any]  # what the JSON file has beside the result's facts and the tables
    unit: str  # of the picture
    bars: Sequence[Bar]  # of the picture; without them, there is none

    @property
    def text(self) -> str:
        """The text for the terminal."""
        blocks = []
        described = describe_run(self.run, self.result.device)
        for part in (described, list(self.result.notes), *self.parts):
            if isinstance(part, Table):
                lines = part.lines()
            elif isinstance(part, list):
                lines = [line for text in part for line in wrapped(f"- {text}", indent="  ")]
            else:
                lines = wrapped(part)
            blocks.append("\n".join(lines))
        return "\n\n".join(block for block in blocks if block)

    @property
    def figures(self) -> dict[str, Any]:
        """The figures as JSON values, in bytes and seconds. A number that is not finite is null."""
        tables = {part.key: part.figures() for part in self.parts if isinstance(part, Table)}
        result = self.result
        figures: dict[str, Any] = {
            "name": self.run.name,
            "device": result.device and result.device.name,
            "run": self.run.as_json(),
            "turns": result.turns,
            "steps": result.steps,
            "notes": list(result.notes),
            "failures": {row.label: row.failure for row in result.rows if row.failure},
            **self.facts,
            **tables,
        }
        return {key: json_value(value) for key, value in figures.items()}

    def write(self, folder: Path, name: str) -> list[Path]:
        """Write NAME.json, NAME.md and NAME.png to a folder that exists. Return the files."""
        files = [folder / f"{name}.{suffix}" for suffix in ("json", "md", "png")]
        text = f"# {self.title}\n\n{self.text}\n"
        if self.bars:
            text += f"\n![{name}]({name}.png)\n"
        write_bytes(files[0], (json.dumps(self.figures, indent=2) + "\n").encode())
        write_bytes(files[1], text.encode())
        if not self.bars:
            return files[:2]
        self._draw(files[2])  # last, so that an error in drawing loses no figures
        return files

    def _draw(self, picture: Path) -> None:
        # Imported here: matplotlib takes long to import.
        from matplotlib.figure import Figure

        places, predicts = np.arange(len(self.bars)), any(bar.predicted for bar in self.bars)
        figure = Figure(figsize=(max(6.4, 0.8 + 0.95 * len(places)), 4.8), layout="constrained")
        axes = figure.subplots()
        right = places + (_BAR_WIDTH / 2 if predicts else 0.0)
        tops = _stack(axes, right, [bar.parts for bar in self.bars], labelled=True)
        if predicts:
            predicted = [bar.predicted or {} for bar in self.bars]
            _stack(axes, places - _BAR_WIDTH / 2, predicted, labelled=False)
        for place, bar, top in zip(right, self.bars, tops, strict=True):
            axes.text(place, top, bar.text, ha="center", va="bottom", fontsize=7)
        axes.set_xticks(places, [bar.label.replace(" ", "\n") for bar in self.bars], fontsize=7.5)
        axes.set_ylabel(self.unit + ("; hatched: predicted" if predicts else ""), fontsize=8)
        axes.margins(y=0.1)  # space for the text above the bars
        # parse_math is off because a "$" in the run's name is not a formula.
        title = "\n".join(describe_run(self.run, self.result.device))
        axes.set_title(title, fontsize=7.5, loc="left", parse_math=False)
        figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
        figure.savefig(picture, dpi=160)


def describe_run(run: Run, device: Device | None) -> list[str]:
    """Return bullets: layout, batch and model. The device is omitted if it is None."""
    grid, batch, model = run.grid, run.batch, run.config.model
    on_device = f" ({device.name})" if device else ""
    return [
        f"{run.name}: {grid} = {grid.world_size} ranks{on_device}, {run.precision}",
        f"{batch.train_batch_size} samples of {run.config.data.sequence_length:,} tokens a "
        f"step in {batch.gradient_accumulation_steps} micro-batches of "
        f"{batch.micro_batch_size}",
        f"{model.architecture}: {parameters_in_words(model)}, {model.num_hidden_layers} blocks x "
        f"{model.hidden_size:,}, {model.num_attention_heads} heads, vocabulary "
        f"{model.vocab_size:,} ({'tied' if model.tie_word_embeddings else 'untied'})",
    ]


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

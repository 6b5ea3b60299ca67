"""Make an HTML page of one or several runs. It needs no network, no script and no other file.

    heading       the runs and their colours
    summary       a column for each run
    charts        loss, gradient norm, learning rate, throughput, memory; all runs in each chart,
                  with a dashed line at each resumption; a map of loads for each run with experts
    tables        for each run: its spikes, the phases of its batch, the loads of its experts
    profile       for each run: where the time of its last profiled steps went
    samples       for each run: the continuations of its prompts, the newest first
    configuration the keys that differ between the runs, and all keys of each run

``run_page.html`` is the template. It escapes all text from a run, and the page's content security
policy blocks scripts and other files. matplotlib draws in black, which becomes the colour of the
page's text (``currentColor``), so a chart can be read in dark mode too.
"""

import io
import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np

from megaspeed.reports.run_record import RunRecord, config_differences
from megaspeed.units import readable_memory

# Readable on white and on black.
COLOURS = ("#3b82f6", "#f07818", "#16a34a", "#d946ef", "#0ea5b7", "#ef4444", "#8b7cf6", "#a08000")
_MOST_DRAWN = 800  # points of a line
_MOST_ROWS, _MOST_SPIKES = 200, 20  # of a table
_MOST_PROMPTS, _MOST_SAMPLES = 20, 20  # of a run, and of a prompt; the template cuts long texts
_LARGEST_TABLE, _LARGEST_PICTURE = 10**4, 2**20  # bytes, of a profile
# HTML may not have control characters, so Unicode's pictures of them replace them.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
_SIZE = (5.2, 2.9)  # of a chart, in inches


class Chart(NamedTuple):
    """The curves of one picture, and what is written around them."""

    title: str
    unit: str
    curves: tuple[str, ...]  # how the names of its curves begin
    scale: float = 1.0  # a value of 1 in the unit of the chart
    logarithmic: bool = False


CHARTS = (
    Chart("Loss (dots: validation)", "nats per token", ("loss", "validation_loss", "spike")),
    Chart("Gradient norm", "before clipping", ("grad_norm",), logarithmic=True),
    Chart("Learning rate", "", ("learning_rate",)),
    Chart("Throughput", "tokens/s, all ranks", ("tokens_per_second",)),
    Chart("z-loss", "mean of log(Z)^2", ("z_loss",)),
    Chart("Auxiliary loss of the experts", "sum over blocks", ("auxiliary_loss",)),
    Chart("Largest load of an expert, in any block", "x the block's mean", ("load_factor",)),
    Chart("Peak memory by pipeline stage", "MiB", ("peak_memory_bytes/",), scale=2.0**-20),
)


class Line(NamedTuple):
    """One line of a chart."""

    curve: str
    colour: str
    steps: np.ndarray  # of finite values, at least one
    values: np.ndarray


def page(records: Sequence[RunRecord]) -> str:
    """Return the HTML page of these runs, at least one."""
    names = [run.folder.resolve().name for run in records]
    if len(set(names)) < len(names):
        names = [str(run.folder) for run in records]
    runs = dict(zip(names, records, strict=True))
    figures = [_figures(run) for run in records]
    restarts = sorted({step for run in records for step in run.resumptions})
    drawn = ((chart, list(_lines(chart, records))) for chart in CHARTS)
    charts = [(chart.title, draw(chart, lines, restarts)) for chart, lines in drawn if lines]
    loads = {name: run.loads for name, run in runs.items() if run.loads is not None}
    charts += [
        (f"Loads of the experts, last timed step: {name}", draw_loads(each))
        for name, each in loads.items()
    ]
    tables = [
        (f"{title}: {name}", headings, shown)
        for name, run in runs.items()
        for title, headings, rows in _tables(run)
        if (shown := [*islice(rows, _MOST_ROWS)])
    ]
    template = Path(__file__).with_name("run_page.html").read_text(encoding="utf-8")
    text = jinja2.Template(template, autoescape=True, trim_blocks=True).render(
        runs=runs,
        colours=COLOURS,
        restarts=restarts,
        summary=[(name, *(column[name] for column in figures)) for name in figures[0]],
        charts=charts,
        tables=tables,
        profiles={name: _profile(run.profile) for name, run in runs.items() if run.profile},
        samples={name: [*_samples(run)] for name, run in runs.items() if run.samples},
        differences=[(key, *values) for key, values in config_differences(records)],
        configurations={name: json.dumps(run.config, indent=2) for name, run in runs.items()},
    )
    return text.translate(_VISIBLE)


def _figures(run: RunRecord) -> dict[str, str]:
    def figure(curve: str, form: str, of: Callable[[np.ndarray], float] = _last) -> str:
        values = run.curves[curve].values
        return _text(of(values) if len(values) else np.nan, form)

    # With training.tokens, the number of steps depends on the batch, which may change.
    planned, target = (run.settings.get(f"training.{key}") for key in ("steps", "tokens"))
    planned_steps = f" of {planned:,}" if isinstance(planned, int) and target is None else ""
    planned_tokens = f" of {target:,}" if isinstance(target, int) else ""
    peaks = [_last(run.curves[name].values) for name in run.names_of("peak_memory_bytes/")]
    return {
        "step": f"{run.last_step:,}{planned_steps}",
        "loss": figure("loss", ".4f"),
        "validation loss": figure("validation_loss", ".4f"),
        "tokens": figure("tokens", ",.0f") + planned_tokens,
        "tokens/s (median)": figure("tokens_per_second", ",.0f", np.median),
        "seconds of its steps": figure("step_time_seconds", ",.1f", np.sum),
        "peak memory by pipeline stage": ", ".join(
            readable_memory(int(peak)) for peak in peaks if np.isfinite(peak)
        ),
        "skipped steps": f"{np.count_nonzero(run.curves['skipped'].values == 1):,}",
        "resumptions": f"{len(run.resumptions):,}",
    }


def _last(values: np.ndarray) -> float:
    return float(values[-1])


def _text(value: float, form: str) -> str:
    return format(value, form) if np.isfinite(value) else "-"


def _largest_spikes(run: RunRecord) -> np.ndarray:
    """Return the places of the largest spikes in the curves of steps, the largest first."""
    spikes = run.curves["spike"].values
    order = np.argsort(-spikes, kind="stable")  # NaN comes last
    return order[: min(_MOST_SPIKES, np.isfinite(spikes).sum())]


_Row = tuple[str, ...]


def _tables(run: RunRecord) -> Iterator[tuple[str, _Row, Iterator[_Row]]]:
    """Yield the title, the headings and the rows of each table of a run."""
    headings: _Row = ("step", "deviations above the mean", "loss", "gradient norm", "")
    yield "Largest spikes (crosses in the chart)", headings, _spikes(run)
    yield "Batch", ("from step", "to step", "samples a step", "tokens"), _phases(run)
    headings = ("block", "least loaded expert", "most loaded expert")
    yield "Loads of the experts, x the block's mean", headings, _extreme_loads(run)


def _spikes(run: RunRecord) -> Iterator[_Row]:
    columns = {"spike": ".1f", "loss": ".4f", "grad_norm": ".4g"}
    for place in _largest_spikes(run):
        skipped = run.curves["skipped"].values[place] == 1
        numbers = (_text(run.curves[name].values[place], form) for name, form in columns.items())
        yield f"{run.steps[place]:,}", *numbers, "skipped" if skipped else ""


def _phases(run: RunRecord) -> Iterator[_Row]:
    """Yield the phases of the batch; none if it does not change."""
    batch, after = run.curves["train_batch_size"].values, run.curves["tokens"].values
    columns = (run.steps, batch, after, np.array([0.0, *after])[:-1])
    steps, batch, after, before = (column[np.isfinite(batch)] for column in columns)
    changes = np.flatnonzero(np.diff(batch)) + 1
    for first, end in pairwise([0, *changes, len(batch)] if len(changes) else []):
        tokens = _text(after[end - 1] - before[first], ",.0f")
        yield f"{steps[first]:,}", f"{steps[end - 1]:,}", f"{batch[first]:,.0f}", tokens


def _extreme_loads(run: RunRecord) -> Iterator[_Row]:
    for block, loads in enumerate(() if run.loads is None else run.loads):
        relative = loads / max(loads.mean(), 1e-9)
        experts = (int(loads.argmin()), int(loads.argmax()))
        yield str(block), *(f"{expert} ({relative[expert]:.2f} x)" for expert in experts)


def _profile(table: Path) -> tuple[str, str, str]:
    """Return the table of a profile, its picture as a data URL, and a note if one is missing."""
    text, address, picture = "", "", table.with_suffix(".png")
    try:
        text = table.read_bytes()[:_LARGEST_TABLE].decode(errors="replace")
        size = picture.stat().st_size if picture.is_file() else 0
        if size > _LARGEST_PICTURE:
            return text, "", f"The picture is large, so it is not on this page: {picture}"
        if size:
            address = f"data:image/png;base64,{b64encode(picture.read_bytes()).decode()}"
    except OSError as error:
        return text, "", f"{error.filename} cannot be read: {error.strerror}"
    return text, address, ""


def _samples(run: RunRecord) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """Yield the newest prompts, each with its newest continuations and the first one."""
    newest = sorted(run.samples.items(), key=lambda item: -max(item[1]))
    for (_, prompt), by_step in newest[:_MOST_PROMPTS]:
        rows = sorted(by_step.items(), reverse=True)
        yield prompt, rows[:_MOST_SAMPLES] + rows[_MOST_SAMPLES:][-1:]


def _lines(chart: Chart, runs: Sequence[RunRecord]) -> Iterator[Line]:
    """Yield the lines of a chart. If it shows one run, each line has its own colour."""
    for place, run in enumerate(runs):
        for index, curve in enumerate(run.names_of(*chart.curves)):
            steps, values = run.curves[curve]
            if curve == "spike":
                places = _largest_spikes(run)
                steps, values = steps[places], run.curves["loss"].values[places]
            drawable = np.isfinite(values) & ((values > 0) | (not chart.logarithmic))
            if drawable.any():
                colour = COLOURS[(index if len(runs) == 1 else place) % len(COLOURS)]
                yield Line(curve, colour, steps[drawable], values[drawable] * chart.scale)


def draw(chart: Chart, lines: Sequence[Line], restarts: Sequence[int] = ()) -> str:
    """Return the ``<svg>`` element of a chart, with a dashed line at each step of ``restarts``."""
    # Imported here: matplotlib takes long to import, and other commands do not need it.
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    with _style():
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel=chart.unit)
        axes.patch.set_visible(False)
        for line in lines:
            steps, values = _thinned(line.steps), _thinned(line.values)
            is_spike = line.curve == "spike"
            has_dots = len(steps) == 1 or line.curve == "validation_loss"
            marker = "x" if is_spike else "o" if has_dots else None
            axes.plot(steps, values, color=line.colour, lw=1.3 * (not is_spike), marker=marker)
        if len(lines) > 1 and len({line.curve for line in lines}) == len(lines):
            labels = [line.curve.replace("peak_memory_bytes/", "stage ") for line in lines]
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
        return _svg(figure)


def draw_loads(loads: np.ndarray) -> str:
    """Return the ``<svg>`` element of a map of ``loads`` (blocks, experts) / mean of the block."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with _style():
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.add_subplot(xlabel="expert", ylabel="block")
        relative = loads / np.maximum(loads.mean(axis=1, keepdims=True), 1e-9)
        colours = colormaps["RdBu_r"].resampled(16)
        # An image: as vectors, a cell would take 190 bytes, and there may be thousands.
        cells = axes.imshow(
            relative, cmap=colours, vmin=0, vmax=2, aspect="auto", interpolation="nearest"
        )
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(cells, label="tokens / mean of the block", extend="max")
        return _svg(figure)


def _style() -> AbstractContextManager[None]:
    """The style of all charts: text stays text, and the same chart has the same ids."""
    from matplotlib import rc_context

    return rc_context({"svg.fonttype": "none", "svg.hashsalt": "megaspeed", "font.size": 9})


def _svg(figure: Any) -> str:
    written = io.StringIO()
    figure.savefig(written, format="svg", transparent=True, dpi=200)  # of images in it
    svg = written.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r' id="[a-z_]+_\d+"', "", svg)  # one page holds several charts
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg role="img" viewBox="\1">', svg)
    return svg.replace("#000000", "currentColor")


def _thinned(numbers: np.ndarray) -> np.ndarray:
    """Return at most ``_MOST_DRAWN`` numbers, each the mean of equally many neighbours."""
    size = -(-len(numbers) // _MOST_DRAWN)
    groups = np.split(numbers, range(size, len(numbers), size))
    return np.array([group.mean() for group in groups])

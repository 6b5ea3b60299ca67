"""Makes an HTML page of one or several runs. It needs no network, no script and no other file.

    heading       the runs and their colours
    summary       a column for each run
    charts        loss, gradient norm, learning rate, throughput, memory, ...; all runs in each
                  chart, with a dashed line at each resumption
    predictions   bubble, traffic, peak memory
    starts        when and on which layout a run was started and resumed
    configuration the keys that differ between the runs, and all keys of each run

All text from a run is escaped, and the page's content security policy blocks scripts.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import chain, cycle
from statistics import median

from megaspeed.config.errors import ConfigError
from megaspeed.config.loading import parse_config
from megaspeed.config.resolve import Run, resolve_recorded
from megaspeed.planning.prediction import ideal_bubble, predict, predict_peaks, sent_along
from megaspeed.reports.run_charts import Chart, Series, draw
from megaspeed.reports.run_record import Recorded, RunRecord, config_differences, number
from megaspeed.topology.activity import PARTS
from megaspeed.units import readable_memory, traffic_unit

# Readable on white and on black.
_COLOURS = ("#3b82f6", "#f07818", "#16a34a", "#d946ef", "#0ea5b7", "#ef4444", "#8b7cf6", "#a08000")
_MEBIBYTE = 2**20

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 75rem;
  background: Canvas; color: CanvasText; }
h1 { font-size: 1.35rem; margin: .3rem 0; }
h2 { font-size: 1.05rem; margin: 1.6rem 0 .5rem; }
.runs { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; margin: .3rem 0;
  list-style: none; overflow-wrap: anywhere; }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 50%;
  margin-right: .4em; }
.charts { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; padding: .5rem; border: 1px solid var(--line); border-radius: .5rem;
  min-width: 0; }
figcaption { font-weight: 600; }
figcaption small { font-weight: normal; opacity: .75; }
svg { width: 100%; height: auto; display: block; }
svg text { font-family: system-ui, sans-serif !important; }
.hover circle { fill: transparent; }
.hover circle:hover { fill: currentColor; fill-opacity: .5; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
th { font-weight: 600; }
pre { background: var(--soft); padding: .6rem; overflow-x: auto; border-radius: .5rem; }
.note { opacity: .8; margin: .2rem 0; }
""".strip()


@dataclass(frozen=True)
class _Shown:
    """A run on the page."""

    run: RunRecord
    name: str  # different for every run
    line: Series  # its name, colour and width; without points


def page(runs: Sequence[RunRecord]) -> str:
    """The HTML page of these runs, at least one."""
    shown = _named(runs)
    title = " and ".join(each.name for each in shown)
    parts = (_heading, _summary, _charts, _predictions, _starts, _configurations)
    body = "\n".join(line for part in parts for line in part(shown))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
{body}
</body>
</html>
"""


def _named(runs: Sequence[RunRecord]) -> list[_Shown]:
    """Assigns names, colours and widths. If folders have the same name, their paths are used."""
    names = [run.folder.resolve().name for run in runs]
    shown = []
    for index, run in enumerate(runs):
        name = names[index] if names.count(names[index]) == 1 else str(run.folder)
        width = 1.3 + 1.2 * min(len(runs) - 1 - index, 3)
        colour = _COLOURS[index % len(_COLOURS)]
        shown.append(_Shown(run, name, Series(name=name, colour=colour, points=(), width=width)))
    return shown


def _heading(shown: Sequence[_Shown]) -> Iterator[str]:
    yield "<h1>megaspeed report</h1>"
    yield '<ul class="runs">'
    for each in shown:
        swatch = f'<span class="swatch" style="background:{each.line.colour}"></span>'
        yield f"<li>{swatch}{escape(each.name)}</li>"
    yield "</ul>"
    for each in shown:
        for note in each.run.notes:
            yield f'<p class="note">{escape(each.name)}: {escape(note)}</p>'


def _summary(shown: Sequence[_Shown]) -> Iterator[str]:
    """A column for each run."""
    columns = [_figures(each.run) for each in shown]
    yield "<h2>Summary</h2>"
    yield _table(
        ["", *(each.name for each in shown)],
        [[name, *(column[name] for column in columns)] for name in columns[0]],
    )


def _figures(run: RunRecord) -> dict[str, str]:
    """The figures of a run in the summary."""
    steps = list(run.steps.values())
    last = steps[-1] if steps else Recorded()
    seconds = [value for _, value in _points(run, "step_time_seconds")]
    rates = [value for _, value in _points(run, "tokens_per_second")]
    losses = [value for _, value in _points(run, "validation_loss")]
    peaks = last.peak_memory_bytes
    tokens, loss = number(last.tokens), number(last.loss)
    progress = f"{run.last_step:,}"
    if run.planned_steps is not None:
        ended = "" if run.last_step >= run.planned_steps else ", under way or interrupted"
        progress = f"{run.last_step:,} of {run.planned_steps:,}{ended}"
    return {
        "step": progress,
        "loss": "-" if loss is None else f"{loss:.4f}",
        "validation loss": f"{losses[-1]:.4f}" if losses else "-",
        "tokens": "-" if tokens is None else f"{tokens:,.0f}",
        "tokens/s (median)": f"{median(rates):,.0f}" if rates else "-",
        "time of its steps": f"{sum(seconds):,.1f} s" if seconds else "-",
        "peak memory by pipeline stage": ", ".join(readable_memory(int(peak)) for peak in peaks)
        or "-",
        "skipped steps": f"{sum(step.skipped is True for step in steps):,}",
        "resumptions": f"{len(_resumptions(run)):,}",
    }


def _resumptions(run: RunRecord) -> list[int]:
    return [start.step for start in run.starts if start.step > 0]


def _points(run: RunRecord, name: str) -> list[tuple[int, float]]:
    records = run.validations if name == "validation_loss" else run.steps
    found = ((step, number(getattr(record, name))) for step, record in records.items())
    return [(step, value) for step, value in found if value is not None]


def _charts(shown: Sequence[_Shown]) -> Iterator[str]:
    yield "<h2>Steps</h2>"
    restarts = sorted({step for each in shown for step in _resumptions(each.run)})
    figures = []
    # Charts are large (a point for each step), so only one at a time is in memory.
    for chart in chain(_step_charts(shown), _part_charts(shown), _memory_charts(shown)):
        lines = [series for series in chart.series if series.points]
        if not lines:
            continue
        drawn = draw(replace(chart, series=lines), restarts)
        caption = f" <small>{escape(chart.caption)}</small>" if chart.caption else ""
        figures.append(
            f"<figure><figcaption>{escape(chart.title)}{caption}</figcaption>{drawn}</figure>"
        )
    if figures:
        yield f'<div class="charts">{"".join(figures)}</div>'
        if restarts:
            yield '<p class="note">A dashed line marks a step from which a run was resumed.</p>'
    else:
        yield '<p class="note">No step is recorded yet.</p>'


def _step_charts(shown: Sequence[_Shown]) -> Iterator[Chart]:
    losses = []
    for each in shown:
        losses.append(replace(each.line, points=_points(each.run, "loss")))
        name, points = f"{each.name}, validation", _points(each.run, "validation_loss")
        losses.append(replace(each.line, name=name, points=points, dotted=True))
    yield Chart(
        title="Loss",
        unit="nats per token",
        series=losses,
        caption="line: training; dots: validation",
    )
    for title, unit, name in (
        ("Gradient norm", "before clipping", "grad_norm"),
        ("Learning rate", "", "learning_rate"),
        ("Throughput", "tokens/s, all ranks", "tokens_per_second"),
        ("Operations", "TFLOP/s a rank", "tflops_per_rank"),
        ("MFU", "share of the dense peak", "mfu"),
    ):
        logarithmic = name == "grad_norm"
        lines = []
        for each in shown:
            points = [p for p in _points(each.run, name) if p[1] > 0 or not logarithmic]
            lines.append(replace(each.line, points=points))
        yield Chart(title=title, unit=unit, series=lines, logarithmic=logarithmic)


def _part_charts(shown: Sequence[_Shown]) -> Iterator[Chart]:
    """The time of each part of a step: a chart for each run, a line for each part."""
    for each in shown:
        of_steps = each.run.parts
        names = [name for name in PARTS if any(parts.get(name) for parts in of_steps.values())]
        lines = []
        for name, colour in zip(names, cycle(_COLOURS), strict=False):
            points = [(s, 1000 * parts[name]) for s, parts in of_steps.items() if name in parts]
            words = name.replace("_", " ")
            lines.append(replace(each.line, name=words, colour=colour, points=points))
        yield Chart(
            title=f"Parts of a step, {each.name}",
            unit="ms, mean over the ranks",
            series=lines,
            caption="tensor, data, pipeline: time in which computation waits for that axis",
            legend=True,
        )


def _memory_charts(shown: Sequence[_Shown]) -> Iterator[Chart]:
    """A line for each pipeline stage. If there is one run, each stage has its own colour."""
    lines = []
    for each in shown:
        held = [(step, record.peak_memory_bytes) for step, record in each.run.steps.items()]
        for stage in range(max((len(peaks) for _, peaks in held), default=0)):
            colour = _COLOURS[stage % len(_COLOURS)] if len(shown) == 1 else each.line.colour
            points = [(s, peaks[stage] / _MEBIBYTE) for s, peaks in held if stage < len(peaks)]
            name = f"{each.name}, pipeline stage {stage}"
            lines.append(replace(each.line, name=name, colour=colour, points=points))
    caption = "a line for each pipeline stage" if len(lines) > len(shown) else ""
    yield Chart(title="Peak memory of a rank", unit="MiB", series=lines, caption=caption)


def _predictions(shown: Sequence[_Shown]) -> Iterator[str]:
    rows = []
    for each in shown:
        run = _resolved(each)
        if run is None:
            continue
        traffic = predict(run).busiest.traffic
        totals = {axis: sent_along(traffic, (axis,)) for axis, _ in traffic}
        sent = ", ".join(
            f"{axis} {traffic_unit((total,)).named(total)}" for axis, total in totals.items()
        )
        peaks = [readable_memory(peak) for peak in predict_peaks(run)]
        rows.append(
            [
                each.name,
                f"{run.grid}, ZeRO-{run.zero_stage}, {run.precision}",
                f"{ideal_bubble(run):.1%}",
                sent or "nothing",
                ", ".join(peaks[:8]) + (", ..." if len(peaks) > 8 else ""),
            ]
        )
    if rows:
        yield "<h2>Predicted</h2>"
        headings = ["", "layout", "bubble", "sent in a step", "peak by pipeline stage"]
        yield _table(headings, rows)
        yield (
            '<p class="note">Predicted from config.json, as by megaspeed plan: the bubble if '
            "pipeline stages cost the same; what the busiest rank sends, by axis; the memory of "
            "tensors only, while a measured peak on a CPU includes the whole process.</p>"
        )


def _resolved(shown: _Shown) -> Run | None:
    """The resolved run of the recorded configuration; None if this version does not accept it."""
    try:
        config = parse_config(shown.run.config)
        return resolve_recorded(config, name=shown.name, source="config.json", device_type="cuda")
    except (ConfigError, OSError):
        return None


def _starts(shown: Sequence[_Shown]) -> Iterator[str]:
    rows = [
        [each.name, f"{start.step:,}", start.time.replace("T", " "), start.layout]
        for each in shown
        for start in each.run.starts
    ]
    if rows:
        yield "<h2>Starts</h2>"
        yield _table(["", "after step", "at", "layout"], rows)


def _configurations(shown: Sequence[_Shown]) -> Iterator[str]:
    yield "<h2>Configuration</h2>"
    if len(shown) > 1:
        rows = [[key, *values] for key, values in config_differences([s.run for s in shown])]
        if rows:
            yield _table(["differs", *(each.name for each in shown)], rows)
        else:
            yield '<p class="note">The runs have the same configuration.</p>'
    for each in shown:
        text = json.dumps(each.run.config, indent=2)
        yield (
            f"<details><summary>{escape(each.name)}</summary><pre>{escape(text)}</pre></details>"
        )


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="wide"><table>{line(headings, "th")}{body}</table></div>'

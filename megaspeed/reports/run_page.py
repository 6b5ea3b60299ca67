"""Make an HTML page of one or several runs. It needs no network, no script and no other file.

    heading       the runs and their colours
    summary       a column for each run
    charts        loss, gradient norm, learning rate, throughput, memory, ...; all runs in each
                  chart, with a dashed line at each resumption
    predictions   bubble, traffic, peak memory
    starts        when and on which layout a run was started and resumed
    configuration the keys that differ between the runs, and all keys of each run

``run_page.html`` is the template. It escapes all text from a run, and the page's content security
policy blocks scripts.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from megaspeed.config.errors import ConfigError
from megaspeed.config.loading import parse_config
from megaspeed.config.resolve import resolve_recorded
from megaspeed.planning.costs.traffic import axis_totals
from megaspeed.planning.prediction import ideal_bubble, predict, predict_peaks
from megaspeed.reports.run_charts import COLOURS, draw_charts
from megaspeed.reports.run_record import RunRecord, config_differences
from megaspeed.units import readable_memory, traffic_unit


def page(records: Sequence[RunRecord]) -> str:
    """Return the HTML page of these runs, at least one."""
    names = [run.folder.resolve().name for run in records]
    if len(set(names)) < len(names):
        names = [str(run.folder) for run in records]
    runs = dict(zip(names, records, strict=True))
    figures = [_figures(run) for run in records]
    template = Path(__file__).with_name("run_page.html").read_text(encoding="utf-8")
    return jinja2.Template(template, autoescape=True, trim_blocks=True).render(
        runs=runs,
        colours=COLOURS,
        summary=[(name, *(column[name] for column in figures)) for name in figures[0]],
        charts=list(draw_charts(runs)),
        predictions=[row for name, run in runs.items() for row in _predictions(name, run)],
        starts=[row for name, run in runs.items() for row in _starts(name, run)],
        differences=[(key, *values) for key, values in config_differences(records)],
        configurations={name: json.dumps(run.config, indent=2) for name, run in runs.items()},
    )


def _figures(run: RunRecord) -> dict[str, str]:
    """Return the figures of a run in the summary."""

    def figure(curve: str, form: str, of: Callable[[np.ndarray], float] = _last) -> str:
        values = run.curves[curve].values
        value = of(values) if len(values) else np.nan
        return format(value, form) if np.isfinite(value) else "-"

    planned = run.settings.get("training.steps")
    progress = f"{run.last_step:,}"
    if isinstance(planned, int):
        ended = "" if run.last_step >= planned else ", under way or interrupted"
        progress = f"{run.last_step:,} of {planned:,}{ended}"
    peaks = [_last(run.curves[name].values) for name in run.names_of("peak_memory_bytes/")]
    return {
        "step": progress,
        "loss": figure("loss", ".4f"),
        "validation loss": figure("validation_loss", ".4f"),
        "tokens": figure("tokens", ",.0f"),
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


def _predictions(name: str, recorded: RunRecord) -> Iterator[tuple[str, ...]]:
    """Yield the row of a run, unless this version does not accept its configuration."""
    try:
        config = parse_config(recorded.config)
        run = resolve_recorded(config, name=name, source="config.json", device_type="cuda")
    except (ConfigError, OSError):
        run = None
    if run is None:
        return
    totals = axis_totals(predict(run).busiest.traffic)
    sent = [f"{axis} {traffic_unit((total,)).named(total)}" for axis, total in totals.items()]
    peaks = [readable_memory(peak) for peak in predict_peaks(run)]
    yield (
        name,
        f"{run.grid}, ZeRO-{run.zero_stage}, {run.precision}",
        f"{ideal_bubble(run):.1%}",
        ", ".join(sent) or "nothing",
        ", ".join(peaks[:8]) + (", ..." if len(peaks) > 8 else ""),
    )


def _starts(name: str, run: RunRecord) -> Iterator[tuple[Any, ...]]:
    for start in run.starts:
        degrees = " x ".join(f"{axis} {start.get(axis, '?')}" for axis in ("pp", "dp", "tp"))
        time = str(start.get("time", "")).replace("T", " ")
        yield name, f"{start['step']:,}", time, f"{degrees}, ZeRO-{start.get('zero_stage', '?')}"

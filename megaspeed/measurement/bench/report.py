"""The figures of a benchmark as Markdown that fits 80 columns, as JSON, and as a picture."""

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megaspeed.measurement.bench.contest import HOST_BOUND, RUN
from megaspeed.measurement.bench.result import BenchResult, Row, flops_per_token
from megaspeed.measurement.bench.turn import WARM_UP_STEPS
from megaspeed.measurement.compare.result import describe_run
from megaspeed.units import (
    Spread,
    counted,
    markdown_table,
    memory_unit,
    three_digits,
    wrapped,
)

_NOTHING = "-"
_SETTINGS = {None: "", "defaults": "its defaults", "guide": "the settings of its guide"}
_TITLES = {
    RUN: "The run",
    HOST_BOUND: "Host-bound: the same depth, so narrow that the host sets the pace",
}


def as_markdown(result: BenchResult, picture: str | None) -> str:
    """The result as Markdown, with a link to the picture, which is in the same folder."""
    lines = [f"# {result.run.name}: megaspeed beside its peers", ""]
    lines += wrapped(
        f"{counted(result.turns, 'turn')} of {counted(result.steps, 'step')} each, after "
        f"{WARM_UP_STEPS} that warm up. Contestants take turns, and each turn starts new "
        "processes. A step lasts on rank 0 from the end of the step before until its loss is read "
        "and its records are written. Ratio: the peer's step time / megaspeed's in the same turn, "
        "median and quartiles over the turns; above 1, megaspeed is faster."
    )
    for warning in result.warnings:
        lines += ["", *wrapped(f"**Warning: {warning}**")]
    for peer, reason in result.not_run.items():
        lines += ["", *wrapped(f"{peer} was not run: {reason}.")]
    for workload in result.workloads:
        lines += ["", *_section(result, workload)]
    if picture is not None:
        lines += ["", f"![step times]({picture})"]
    return "\n".join(lines) + "\n"


def _section(result: BenchResult, workload: str) -> Iterator[str]:
    run, rows = result.runs[workload], result.rows(workload)
    yield f"## {_TITLES[workload]}"
    yield ""
    for line in describe_run(run, result.device.name if result.device else None):
        yield from wrapped(f"- {line}", indent="  ")
    if not rows:
        yield from ("", "No contestant finished a turn.")
        return
    yield ""
    slow = max(row.step_seconds.median for row in rows) >= 10
    scale, seconds = (1.0, "s") if slow else (1e3, "ms")
    yield from markdown_table(
        ("contestant", f"step {seconds}", "quartiles", "ratio", "quartiles", "tokens/s"),
        [
            (
                row.name,
                three_digits(scale * row.step_seconds.median),
                _quartiles(row.step_seconds, scale),
                _NOTHING if row.ratio is None else f"{row.ratio.median:.2f}",
                _NOTHING if row.ratio is None else _quartiles(row.ratio),
                f"{row.tokens_per_second:,.0f}",
            )
            for row in rows
        ],
    )
    for line in _settings(result, workload):
        yield from ("", *wrapped(line))
    yield ""
    unit = memory_unit(row.peak_bytes for row in rows)
    share = "MFU" if result.device and result.device.peak_flops is not None else "of matmul"
    yield from markdown_table(
        ("contestant", f"peak {unit.name}", "TFLOP/s", share, "causal", "loss of step 1"),
        [
            (
                row.name,
                unit.of(row.peak_bytes),
                f"{row.flops / 1e12:.3g}",
                _share(row.flops, result),
                _share(row.causal_flops, result),
                f"{row.first_loss:.6f}",
            )
            for row in rows
        ],
    )
    yield ""
    yield from wrapped(" ".join(_formula(result, workload)))


def _settings(result: BenchResult, workload: str) -> Iterator[str]:
    """Which settings each row has, and how much longer a step takes with the others."""
    for row in result.rows(workload):
        for other in result.all_rows(workload):
            if other.name == row.name and other.settings != row.settings:
                yield (
                    f"{row.name}: with {_SETTINGS[row.settings]}. With {_SETTINGS[other.settings]} "
                    f"a step takes {other.compared / row.compared:.2f} times as long."
                )


def _formula(result: BenchResult, workload: str) -> Iterator[str]:
    run, device, peak = result.runs[workload], result.device, result.peak_flops
    assert device is not None and peak is not None, "a row has figures"
    model, length = run.config.model, run.config.data.sequence_length
    flops, attention = flops_per_token(run)
    weights, width = (flops - attention) / 6, model.num_attention_heads * model.head_dim
    yield (
        f"FLOPs a token = 3 x (2 x {weights:,.0f} weights of matrices + 4 x {length:,} tokens x "
        f"{width:,} head elements x {model.num_hidden_layers} blocks) = {flops:.4g}. TFLOP/s = "
        f"FLOPs a token x tokens/s / {counted(run.grid.world_size, 'rank')} / 10^12."
    )
    if device.peak_flops is None:
        yield (
            f"Of matmul = TFLOP/s / {peak / 1e12:.4g}, which a large {run.precision} matmul "
            "reaches on all ranks in the same processes; the peak of the device is not known."
        )
    else:
        yield f"MFU = TFLOP/s / {peak / 1e12:.4g}, the device's peak in {run.precision}."
    yield f"Causal: attention counts half, so {flops - attention / 2:.4g} FLOPs a token."
    if device.name == "CPU":
        yield "The peak memory is that of the resident set, which includes all libraries."


def _share(flops: float, result: BenchResult) -> str:
    assert result.peak_flops is not None, "a row has figures"
    return f"{flops / result.peak_flops:.1%}"


def _quartiles(spread: Spread, scale: float = 1.0) -> str:
    return f"{three_digits(scale * spread.lower)}-{three_digits(scale * spread.upper)}"


def as_json(result: BenchResult) -> dict[str, Any]:
    """Every figure, in bytes and seconds. A loss that is not finite becomes null."""
    run, device = result.run, result.device
    return {
        "name": run.name,
        "device": None if device is None else asdict(device),
        "degrees": asdict(run.grid),
        "zero_stage": run.zero_stage,
        "precision": run.precision,
        "turns": result.turns,
        "steps": result.steps,
        "warm_up_steps": WARM_UP_STEPS,
        "warnings": list(result.warnings),
        "not_run": dict(result.not_run),
        "workloads": {name: _workload_as_json(result, name) for name in result.workloads},
    }


def _workload_as_json(result: BenchResult, workload: str) -> dict[str, Any]:
    run, peak = result.runs[workload], result.peak_flops
    flops, attention = flops_per_token(run)
    rows = result.rows(workload)
    others = [row for row in result.all_rows(workload) if row not in rows]

    def contestant(row: Row) -> dict[str, Any]:
        turns = next(
            each.turns[workload]
            for each in result.contestants
            if (each.name, each.settings) == (row.name, row.settings)
        )
        assert peak is not None, "a row has figures"
        return {
            **asdict(row),
            "first_loss": row.first_loss if math.isfinite(row.first_loss) else None,
            "share_of_peak": row.flops / peak,
            "causal_share_of_peak": row.causal_flops / peak,
            "turns": [list(turn[0].step_seconds) for turn in turns],
        }

    return {
        "batch": asdict(run.batch),
        "sequence_length": run.config.data.sequence_length,
        "model": run.config.model.model_dump(mode="json", exclude_none=True),
        "flops_per_token": flops,
        "causal_flops_per_token": flops - attention / 2,
        "contestants": [contestant(row) for row in rows],
        "other_settings": [contestant(row) for row in others],
    }


def draw_chart(result: BenchResult, picture: Path) -> None:
    """Writes a PNG: for each workload, the median step of each turn, and its median as a line."""
    # Imported here: matplotlib takes long to import.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    places = figure.subplots(1, len(result.workloads), squeeze=False)[0]
    for axes, workload in zip(places, result.workloads, strict=True):
        rows = result.rows(workload)
        for x, row in enumerate(rows):
            times, colour = row.step_seconds, f"C{x}"
            axes.vlines(x, 1e3 * times.lower, 1e3 * times.upper, color=colour, linewidth=3)
            axes.hlines(1e3 * times.median, x - 0.3, x + 0.3, color=colour, linewidth=2)
            ratio = "" if row.ratio is None else f", ratio {row.ratio.median:.2f}"
            text = f"{three_digits(1e3 * times.median)} ms{ratio}"
            place = (x, 1e3 * times.upper)
            offset = {"xytext": (0, 4), "textcoords": "offset points"}
            axes.annotate(text, place, **offset, ha="center", fontsize=7.5)
        axes.set_xticks(range(len(rows)), [row.name.replace("-", "-\n") for row in rows])
        axes.tick_params(labelsize=8)
        axes.set_ylabel("milliseconds a step: median and quartiles", fontsize=8)
        axes.margins(x=0.25, y=0.15)
        axes.set_ylim(bottom=0)
        # parse_math is off because a "$" in the run's name is not a formula.
        title = "\n".join([workload, *describe_run(result.runs[workload], None)[1:]])
        axes.set_title(title, fontsize=7.5, loc="left", parse_math=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(describe_run(result.run, None)[0], fontsize=9, parse_math=False)
    figure.savefig(picture, dpi=160)

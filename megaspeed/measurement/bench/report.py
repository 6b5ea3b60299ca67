"""The figures of a benchmark as text, JSON and a picture of the step times."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from megaspeed.measurement.bench.contest import HOST_BOUND, RUN
from megaspeed.measurement.bench.result import BenchResult, Figures, flops_per_token
from megaspeed.measurement.report import (
    NOTHING,
    Bar,
    Panel,
    Part,
    Report,
    Table,
    describe_run,
    finite,
)
from megaspeed.measurement.timed_steps import WARM_UP_STEPS
from megaspeed.units import Spread, counted, memory_unit, three_digits

_SETTINGS = {None: "", "defaults": "its defaults", "guide": "the settings of its guide"}
_TITLES = {
    RUN: "The run",
    HOST_BOUND: "Host-bound: the same depth, so narrow that the host sets the pace",
}


def report(result: BenchResult) -> Report:
    """Return the report: for each workload, the figures of each contestant."""
    parts: list[Part] = [
        f"{counted(result.turns, 'turn')} of {counted(result.steps, 'step')} each, after "
        f"{WARM_UP_STEPS} that warm up. Contestants take turns, and each turn starts new "
        "processes. A step lasts on rank 0 from the end of the step before until its loss is read "
        "and its records are written. Ratio: the peer's step time / megaspeed's in the same turn, "
        "median and quartiles over the turns; above 1, megaspeed is faster.",
        *(f"**Warning: {note}**" for note in result.notes),
        *(f"{peer} was not run: {reason}." for peer, reason in result.not_run.items()),
    ]
    for workload in result.runs:
        parts += _section(result, workload)
    trained = [workload for workload in result.runs if result.better(workload)]
    return Report(
        title=f"{result.runs[RUN].name}: megaspeed beside its peers",
        parts=parts,
        figures=_figures(result),
        panels=[_panel(result, workload) for workload in trained],
        succeeded=result.succeeded,
    )


def _section(result: BenchResult, workload: str) -> Iterator[Part]:
    rows = result.better(workload)
    yield f"## {_TITLES[workload]}"
    yield describe_run(result.runs[workload], result.device)
    if not rows:
        yield "No contestant finished a turn."
        return
    scale, seconds = _unit_of_steps(rows)
    yield Table(
        ("contestant", f"step {seconds}", "quartiles", "ratio", "quartiles", "tokens/s"),
        [
            (
                row.name,
                three_digits(scale * row.step_seconds.median),
                _quartiles(row.step_seconds, scale),
                NOTHING if row.ratio is None else f"{row.ratio.median:.2f}",
                NOTHING if row.ratio is None else _quartiles(row.ratio),
                f"{row.tokens_per_second:,.0f}",
            )
            for row in rows
        ],
    )
    for row in rows:
        for other in result.figures(workload):
            if other.name == row.name and other.settings != row.settings:
                yield (
                    f"{row.name}: with {_SETTINGS[row.settings]}. With {_SETTINGS[other.settings]} "
                    f"a step takes {other.compared / row.compared:.2f} times as long."
                )
    unit = memory_unit(row.peak_bytes for row in rows)
    share = "of matmul" if result.known_peak_flops is None else "MFU"
    yield Table(
        ("contestant", f"peak {unit.name}", "TFLOP/s", share, "causal", "loss of step 1"),
        [
            (
                row.name,
                unit.of(row.peak_bytes),
                f"{row.flops / 1e12:.3g}",
                f"{row.share_of_peak:.1%}",
                f"{row.causal_share_of_peak:.1%}",
                f"{row.first_loss:.6f}",
            )
            for row in rows
        ],
    )
    yield " ".join(_formula(result, workload))


def _formula(result: BenchResult, workload: str) -> Iterator[str]:
    run, peak = result.runs[workload], result.peak_flops
    assert result.device is not None and peak is not None, "a row has figures"
    model, length = run.config.model, run.config.data.sequence_length
    flops, attention = flops_per_token(run)
    weights, width = (flops - attention) / 6, model.num_attention_heads * model.head_dim
    yield (
        f"FLOPs a token = 3 x (2 x {weights:,.0f} weights of matrices + 4 x {length:,} tokens x "
        f"{width:,} head elements x {model.num_hidden_layers} blocks) = {flops:.4g}. TFLOP/s = "
        f"FLOPs a token x tokens/s / {counted(run.grid.world_size, 'rank')} / 10^12."
    )
    if result.known_peak_flops is None:
        yield (
            f"Of matmul = TFLOP/s / {peak / 1e12:.4g}, which a large {run.precision} matmul "
            "reaches on all ranks in the same processes; the peak of the device is not known."
        )
    else:
        yield f"MFU = TFLOP/s / {peak / 1e12:.4g}, the device's peak in {run.precision}."
    yield f"Causal: attention counts half, so {flops - attention / 2:.4g} FLOPs a token."
    if result.device.name == "CPU":
        yield "The peak memory is that of the resident set, which includes all libraries."


def _unit_of_steps(rows: list[Figures]) -> tuple[float, str]:
    slow = max(row.step_seconds.median for row in rows) >= 10
    return (1.0, "s") if slow else (1e3, "ms")


def _quartiles(spread: Spread, scale: float = 1.0) -> str:
    return f"{three_digits(scale * spread.lower)}-{three_digits(scale * spread.upper)}"


def _panel(result: BenchResult, workload: str) -> Panel:
    """The median step of each contestant, with its quartiles."""
    rows = result.better(workload)
    scale, unit = _unit_of_steps(rows)

    def bar(row: Figures) -> Bar:
        seconds = row.step_seconds
        ratio = "" if row.ratio is None else f"\nratio {row.ratio.median:.2f}"
        return Bar(
            label=row.name.replace("-", "-\n"),
            parts={"step": scale * seconds.median},
            quartiles=(scale * seconds.lower, scale * seconds.upper),
            text=f"{three_digits(scale * seconds.median)} {unit}{ratio}",
        )

    return Panel(
        title="\n".join([workload, *describe_run(result.runs[workload], None)]),
        unit=f"a step in {unit}: median and quartiles",
        bars=[bar(row) for row in rows],
    )


def _figures(result: BenchResult) -> dict[str, Any]:
    """Every figure, in bytes and seconds. A loss that is not finite becomes null."""
    run, device = result.runs[RUN], None
    if result.device is not None:
        device = {
            "name": result.device.name,
            "peak_flops": result.known_peak_flops,
            "matmul_flops": result.matmul_flops,
        }
    return {
        "name": run.name,
        "device": device,
        "degrees": asdict(run.grid),
        "zero_stage": run.zero_stage,
        "precision": run.precision,
        "turns": result.turns,
        "steps": result.steps,
        "warm_up_steps": WARM_UP_STEPS,
        "warnings": list(result.notes),
        "not_run": dict(result.not_run),
        "workloads": {name: _workload_figures(result, name) for name in result.runs},
    }


def _workload_figures(result: BenchResult, workload: str) -> dict[str, Any]:
    run, better = result.runs[workload], result.better(workload)
    flops, attention = flops_per_token(run)

    def as_json(row: Figures) -> dict[str, Any]:
        return {**asdict(row), "first_loss": finite(row.first_loss)}

    return {
        "batch": asdict(run.batch),
        "sequence_length": run.config.data.sequence_length,
        "model": run.config.model.model_dump(mode="json", exclude_none=True),
        "flops_per_token": flops,
        "causal_flops_per_token": flops - attention / 2,
        "contestants": [as_json(row) for row in better],
        "other_settings": [as_json(row) for row in result.figures(workload) if row not in better],
    }

"""The figures of a scaling as text, JSON and a picture of the parts of a step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from megaspeed.measurement.report import (
    NOTHING,
    Bar,
    Panel,
    Part,
    Report,
    Table,
    describe_run,
)
from megaspeed.measurement.scaling import (
    LABELS,
    NOT_PREDICTED,
    ScaledRow,
    ScalingResult,
    StepParts,
)
from megaspeed.measurement.timed_steps import WARM_UP_STEPS
from megaspeed.units import counted, three_digits

_COLUMNS = 5  # numbers of ranks in a table of parts
_BATCH = {
    "strong": "train_batch_size stays, so each data rank has fewer micro-batches",
    "weak": "each data rank keeps its micro-batches, so train_batch_size grows",
}


def report(result: ScalingResult) -> Report:
    """Return the report: a line for each number of ranks, and the parts of their steps."""
    run, ranks = result.rows[0].run, ", ".join(str(row.ranks) for row in result.rows)
    parts: list[Part] = [
        [
            *describe_run(run, result.device),
            f"{result.mode} scaling: {_BATCH[result.mode]}; parallel.pipeline and parallel.tensor "
            "stay, so the data degree (dp) grows. Batch = dp x micro-batches x samples of each",
            f"{counted(result.steps, 'step')} each after {WARM_UP_STEPS} that warm up; means over "
            "the middle half of the steps, and over the ranks",
        ],
        *(f"**{note}**" for note in result.notes),
        _summary(result),
    ]
    if result.done:
        parts += [_meaning(result), *_tables(result)]
    return Report(
        title=f"{run.name}: {result.mode} scaling over {ranks} ranks",
        parts=parts,
        figures=_figures(result),
        panels=[_panel(result)] if result.done else [],
        succeeded=result.succeeded,
    )


def _summary(result: ScalingResult) -> Table:
    predicts = bool(result.done) and result.base.predicted is not None
    limited = result.is_limited
    headings = ["ranks", "batch", "step ms", "tokens/s", "efficiency"]
    headings += ["predicted"] * predicts + ["at most"] * limited

    def cells(row: ScaledRow) -> Iterator[str]:
        batch = row.run.batch
        yield str(row.ranks)
        yield f"{row.run.grid.dp} x {batch.gradient_accumulation_steps} x {batch.micro_batch_size}"
        if not row.done:
            yield "failed"
            yield from [NOTHING] * (len(headings) - 3)
            return
        step = row.measured
        yield three_digits(1e3 * step.seconds)
        yield f"{step.tokens_per_second:,.0f}"
        yield f"{step.efficiency(result.base.measured):.1%}"
        if predicts:
            efficiency = _efficiency(row.predicted, result.base.predicted)
            yield NOTHING if efficiency is None else f"{efficiency:.1%}"
        if limited:
            yield f"{result.most_efficiency(row):.1%}"

    return Table(headings, [list(cells(row)) for row in result.rows])


def _meaning(result: ScalingResult) -> str:
    base, run = result.base.label, result.done[-1].run
    text = (
        f"Efficiency = tokens/s of a rank / tokens/s of a rank with {base}. A part loses the "
        f"time by which it is longer than with {base}, for each token of a rank. Imbalance is the "
        "time for which ranks wait for slower ones."
    )
    if run.zero_stage in (1, 2) and run.grid.dp > 1:  # the gather is within DeepSpeed's step
        text += (
            f" With ZeRO-{run.zero_stage}, the optimizer includes the gather of the updated "
            "weights over dp, which the prediction counts as communication."
        )
    return text


def _tables(result: ScalingResult) -> Iterator[Table]:
    """What each part has lost of a step, and how long it takes. Predictions are in brackets."""

    def shares(step: StepParts, base: StepParts) -> dict[str, float]:
        lost = {part: 100 * share for part, share in step.lost(base).items()}
        return {"efficiency": 100 * step.efficiency(base), **lost}

    def times(step: StepParts, base: StepParts) -> dict[str, float]:
        parts = {part: 1e3 * seconds for part, seconds in step.parts.items()}
        return {**parts, "step": 1e3 * step.seconds}

    for start in range(0, len(result.done), _COLUMNS):
        rows = result.done[start : start + _COLUMNS]
        yield _table(result, rows, "efficiency and losses, %", shares, "{:.1f}".format)
        yield _table(result, rows, "ms of a step", times, three_digits)


def _table(
    result: ScalingResult,
    rows: Sequence[ScaledRow],
    title: str,
    figures: Callable[[StepParts, StepParts], dict[str, float]],
    text: Callable[[float], str],
) -> Table:
    """A column for each row. Parts of axes with one rank are omitted."""
    base, predicted_base = result.base.measured, result.base.predicted
    omitted = set(LABELS) - set(_used_parts(result))
    lines: dict[str, list[str]] = {}
    for row in rows:
        measured, predicted = figures(row.measured, base), {}
        if row.predicted is not None and predicted_base is not None:
            predicted = figures(row.predicted, predicted_base)
        for part in measured.keys() - omitted:
            known = part in predicted and part not in NOT_PREDICTED
            bracket = f" ({text(predicted[part])})" if known else ""
            lines.setdefault(part, []).append(text(measured[part]) + bracket)
    order = [part for part in ("efficiency", *LABELS, "step") if part in lines]
    return Table(
        [title, *(row.label for row in rows)],
        [[LABELS.get(part, part), *lines[part]] for part in order],
    )


def _used_parts(result: ScalingResult) -> list[str]:
    """The parts without those of axes that have one rank."""
    grid = result.rows[-1].run.grid
    ranks = {"tensor": grid.tp, "data": grid.dp, "pipeline": grid.pp, "bubble": grid.pp}
    return [part for part in LABELS if ranks.get(part, 2) > 1]


def _efficiency(step: StepParts | None, base: StepParts | None) -> float | None:
    return None if step is None or base is None else step.efficiency(base)


def _panel(result: ScalingResult) -> Panel:
    """The parts of the time that a token takes of a rank. Without loss, all bars are equally high,
    in strong and in weak scaling.
    """
    run, used, base = result.rows[0].run, _used_parts(result), result.base.measured

    def parts(step: StepParts) -> dict[str, float]:
        return {LABELS[part]: 1e6 * step.ranks / step.tokens * step.parts[part] for part in used}

    def bar(row: ScaledRow) -> Bar:
        step = row.measured
        return Bar(
            label=row.label,
            parts=parts(step),
            predicted=None if row.predicted is None else parts(row.predicted),
            text=f"{step.tokens_per_second:,.0f} tokens/s\n{step.efficiency(base):.0%}",
        )

    return Panel(
        title=f"{run.name}: {result.mode} scaling, pp {run.grid.pp} x tp {run.grid.tp}",
        unit="microseconds of a rank for each token",
        bars=[bar(row) for row in result.done],
    )


def _figures(result: ScalingResult) -> dict[str, Any]:
    """Every figure, in seconds and as fractions."""
    return {
        "name": result.rows[0].run.name,
        "mode": result.mode,
        "steps": result.steps,
        "warm_up_steps": WARM_UP_STEPS,
        "processors": result.processors,
        "base_ranks": result.base.ranks if result.done else None,
        "notes": list(result.notes),
        "rows": [_row_figures(result, row) for row in result.rows],
    }


def _row_figures(result: ScalingResult, row: ScaledRow) -> dict[str, Any]:
    head = {
        "ranks": row.ranks,
        "degrees": asdict(row.run.grid),
        "batch": asdict(row.run.batch),
        "status": "done" if row.done else "failed",
    }
    if not row.done:
        return {**head, "reason": row.failure or row.no_extras}
    first = row.turns[0][0]
    return {
        **head,
        "device": first.device.name,
        "threads": first.device.threads,
        "skipped_steps": first.skipped_steps,
        "wall_seconds": first.step_seconds,
        "most_efficiency": result.most_efficiency(row),
        "measured": _step_figures(row.measured, result.base.measured),
        "predicted": _step_figures(row.predicted, result.base.predicted),
        "not_predicted": row.not_predicted,
    }


def _step_figures(step: StepParts | None, base: StepParts | None) -> dict[str, Any] | None:
    if step is None:
        return None
    return {
        "step_seconds": step.seconds,
        "parts_seconds": dict(step.parts),
        "tokens_per_second": step.tokens_per_second,
        "efficiency": _efficiency(step, base),
        "lost": None if base is None else step.lost(base),
    }

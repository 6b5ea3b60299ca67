"""The figures of a scaling as Markdown that fits 80 columns, as JSON, and as a picture."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megaspeed.measurement.compare.result import describe_run
from megaspeed.measurement.scaling import (
    LABELS,
    NOT_PREDICTED,
    WARM_UP_STEPS,
    Row,
    ScalingResult,
    StepParts,
)
from megaspeed.units import counted, markdown_table, three_digits, wrapped

_NOTHING = "-"
_COLUMNS = 5  # numbers of ranks in a table of parts
_PREDICTED = "  predicted"
_BATCH = {
    "strong": "train_batch_size stays, so each data rank has fewer micro-batches",
    "weak": "each data rank keeps its micro-batches, so train_batch_size grows",
}
# The palette of Okabe & Ito, and greys: distinguishable with any colour vision, and in print.
_COLOURS: Mapping[str, str] = {
    "compute": "#BBBBBB",
    "tensor": "#56B4E9",
    "data": "#0072B2",
    "pipeline": "#F0E442",
    "bubble": "#E69F00",
    "world": "#999999",
    "imbalance": "#D55E00",
    "data_loading": "#CC79A7",
    "optimizer": "#009E73",
    "host": "#555555",
}


def as_markdown(result: ScalingResult, picture: str | None) -> str:
    """The result as Markdown, with a link to the picture, which is in the same folder."""
    name, ranks = result.rows[0].run.name, ", ".join(str(row.ranks) for row in result.rows)
    lines = [f"# {name}: {result.mode} scaling over {ranks} ranks", ""]
    device = None
    if result.base is not None and result.base.record is not None:
        device = result.base.record.device
    for line in describe_run(result.rows[0].run, device):
        lines += wrapped(f"- {line}", indent="  ")
    lines += wrapped(
        f"- {result.mode} scaling: {_BATCH[result.mode]}; parallel.pipeline and parallel.tensor "
        "stay, so the data degree (dp) grows. Batch = dp x micro-batches x samples of each",
        indent="  ",
    )
    lines += wrapped(
        f"- {counted(result.steps, 'step')} each after {WARM_UP_STEPS} that warm up; means over "
        "the middle half of the steps, and over the ranks",
        indent="  ",
    )
    for note in result.notes:
        lines += ["", *wrapped(f"**{note}**")]
    lines += ["", *_summary(result)]
    if result.base is not None:
        lines += ["", *_meaning(result)]
        lines += ["", *_share_tables(result), *_time_tables(result)]
    if picture is not None:
        lines += [f"![scaling]({picture})", ""]
    return "\n".join(lines).rstrip() + "\n"


def _summary(result: ScalingResult) -> Iterator[str]:
    headings = ["ranks", "batch", "step ms", "tokens/s", "efficiency"]
    base_prediction = _base_prediction(result)
    headings += ["predicted"] if base_prediction is not None else []
    headings += ["at most"] if result.is_limited else []

    def cells(row: Row) -> list[str]:
        step, base = row.measured, None if result.base is None else result.base.measured
        batch = row.run.batch
        micro_batches = f"{batch.gradient_accumulation_steps} x {batch.micro_batch_size}"
        first = [str(row.ranks), f"{row.run.grid.dp} x {micro_batches}"]
        if step is None or base is None:
            return [*first, "failed", *[_NOTHING] * (len(headings) - 3)]
        figures = [three_digits(1e3 * step.seconds), f"{step.tokens_per_second:,.0f}"]
        figures.append(_percent(step.efficiency(base)))
        if base_prediction is not None:
            predicted = row.predicted and _percent(row.predicted.efficiency(base_prediction))
            figures.append(predicted or _NOTHING)
        if result.is_limited:
            figures.append(_percent(result.most_efficiency(row)))
        return [*first, *figures]

    yield from markdown_table(headings, [cells(row) for row in result.rows])


def _meaning(result: ScalingResult) -> list[str]:
    assert result.base is not None, "a row has figures"
    base, run = counted(result.base.ranks, "rank"), result.done[-1].run
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
    return wrapped(text)


def _share_tables(result: ScalingResult) -> Iterator[str]:
    """Efficiency and what each part has lost, as percentages of the step."""
    assert result.base is not None, "a row has figures"
    base, predicted_base = result.base.measured, _base_prediction(result)

    def lost(step: StepParts | None, of: StepParts | None) -> dict[str, str]:
        if step is None or of is None:
            return {}
        shares = {part: f"{100 * share:.1f}" for part, share in step.lost(of).items()}
        return {"efficiency": f"{100 * step.efficiency(of):.1f}", **shares}

    yield from _tables(
        result,
        "% of the step",
        {"efficiency": "efficiency", **{part: f"lost: {text}" for part, text in LABELS.items()}},
        lambda row: (lost(row.measured, base), lost(row.predicted, predicted_base)),
    )


def _time_tables(result: ScalingResult) -> Iterator[str]:
    """The milliseconds of each part of a step."""

    def times(step: StepParts | None) -> dict[str, str]:
        if step is None:
            return {}
        parts = {part: three_digits(1e3 * seconds) for part, seconds in step.parts.items()}
        return {**parts, "step": three_digits(1e3 * step.seconds)}

    yield from _tables(
        result,
        "ms of a step",
        {**LABELS, "step": "step"},
        lambda row: (times(row.measured), times(row.predicted)),
    )


def _tables(
    result: ScalingResult,
    title: str,
    labels: Mapping[str, str],
    cells: Callable[[Row], tuple[Mapping[str, str], Mapping[str, str]]],
) -> Iterator[str]:
    """A line for each part and one for its prediction, and a column for each number of ranks.

    Parts of axes with one rank are omitted.
    """
    used, predicts = _used_parts(result), any(row.predicted for row in result.done)
    for start in range(0, len(result.done), _COLUMNS):
        rows = result.done[start : start + _COLUMNS]
        columns = [cells(row) for row in rows]
        lines = []
        for part, label in labels.items():
            if part in LABELS and part not in used:
                continue
            for name, which in ((label, 0), (_PREDICTED, 1)):
                found = [column[which].get(part, _NOTHING) for column in columns]
                if which == 0 or (predicts and part not in NOT_PREDICTED):
                    lines.append([name, *found])
        yield from markdown_table([title, *(counted(row.ranks, "rank") for row in rows)], lines)
        yield ""


def _used_parts(result: ScalingResult) -> list[str]:
    """The parts without those of axes that have one rank."""
    grid = result.rows[-1].run.grid
    ranks = {"tensor": grid.tp, "data": grid.dp, "pipeline": grid.pp, "bubble": grid.pp}
    return [part for part in LABELS if ranks.get(part, 2) > 1]


def _base_prediction(result: ScalingResult) -> StepParts | None:
    return None if result.base is None else result.base.predicted


def _percent(share: float) -> str:
    return f"{share:.1%}"


def as_json(result: ScalingResult) -> dict[str, Any]:
    """Every figure, in seconds and as fractions."""
    base = result.base
    return {
        "name": result.rows[0].run.name,
        "mode": result.mode,
        "steps": result.steps,
        "warm_up_steps": WARM_UP_STEPS,
        "processors": result.processors,
        "base_ranks": None if base is None else base.ranks,
        "notes": list(result.notes),
        "rows": [_row_as_json(result, row) for row in result.rows],
    }


def _row_as_json(result: ScalingResult, row: Row) -> dict[str, Any]:
    head = {
        "ranks": row.ranks,
        "degrees": asdict(row.run.grid),
        "batch": asdict(row.run.batch),
        "status": "failed" if row.record is None else "done",
    }
    if row.record is None or result.base is None:
        return {**head, "reason": row.reason}
    return {
        **head,
        "device": row.record.device,
        "threads": row.record.threads,
        "skipped_steps": row.record.skipped_steps,
        "wall_seconds": list(row.record.wall_seconds),
        "most_efficiency": result.most_efficiency(row),
        "measured": _step_as_json(row.measured, result.base.measured),
        "predicted": _step_as_json(row.predicted, result.base.predicted),
        "not_predicted": row.not_predicted,
    }


def _step_as_json(step: StepParts | None, base: StepParts | None) -> dict[str, Any] | None:
    if step is None:
        return None
    return {
        "step_seconds": step.seconds,
        "parts_seconds": dict(step.parts),
        "tokens_per_second": step.tokens_per_second,
        "efficiency": None if base is None else step.efficiency(base),
        "lost": None if base is None else step.lost(base),
    }


def draw_chart(result: ScalingResult, picture: Path) -> None:
    """Writes a PNG: tokens/s over ranks, and the parts of the time that a token takes of a rank.

    Without loss, the bars are equally high, in strong and in weak scaling.
    """
    # Imported here: matplotlib takes long to import.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_speeds(result, left)
    _draw_parts(result, right)
    for axes in (left, right):
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
        axes.grid(axis="y", alpha=0.3)
        axes.set_ylim(bottom=0)
    run = result.rows[0].run
    title = f"{run.name}: {result.mode} scaling, pp {run.grid.pp} x tp {run.grid.tp}"
    figure.suptitle(title, fontsize=9, parse_math=False)  # a "$" in the name is no formula
    figure.savefig(picture, dpi=160)


def _draw_speeds(result: ScalingResult, axes: Any) -> None:
    assert result.base is not None and result.base.measured is not None, "a row has figures"
    base, ranks = result.base.measured, [row.ranks for row in result.done]
    ideal = [base.tokens_per_second * each / base.ranks for each in ranks]
    axes.plot(ranks, ideal, "--", color="0.5", linewidth=1, label="efficiency 100 %")
    if result.is_limited:
        limits = [
            speed * result.most_efficiency(row)
            for speed, row in zip(ideal, result.done, strict=True)
        ]
        text = f"at most, with {result.processors} processors"
        axes.plot(ranks, limits, ":", color="0.2", linewidth=1, label=text)
    predicted = [row.predicted for row in result.done if row.predicted]
    if predicted:
        x, y = [step.ranks for step in predicted], [step.tokens_per_second for step in predicted]
        axes.plot(x, y, "s", color="#E69F00", fillstyle="none", label="predicted")
    measured = [row.measured for row in result.done if row.measured]
    speeds = [step.tokens_per_second for step in measured]
    axes.plot(ranks, speeds, "o-", color="#0072B2", label="measured")
    for step in measured:
        place, offset = (step.ranks, step.tokens_per_second), (4, -11)
        text = f"{step.efficiency(base):.0%}"
        axes.annotate(text, place, offset, textcoords="offset points", fontsize=7.5)
    axes.set_xticks(ranks)
    axes.set_xlabel("ranks", fontsize=8)
    axes.set_ylabel("tokens/s, and efficiency", fontsize=8)
    axes.legend(fontsize=7.5, frameon=False)


def _draw_parts(result: ScalingResult, axes: Any) -> None:
    width, used = 0.38, _used_parts(result)
    for index, row in enumerate(result.done):
        both: Sequence[tuple[StepParts | None, float, dict[str, Any]]] = (
            (row.measured, 0.0 if row.predicted is None else -width / 2 - 0.01, {}),
            (row.predicted, width / 2 + 0.01, {"alpha": 0.55, "hatch": "////"}),
        )
        for step, shift, style in both:
            if step is None:
                continue
            bottom, scale = 0.0, 1e6 * step.ranks / step.tokens
            for part in used:
                height = scale * step.parts[part]
                axes.bar(
                    index + shift,
                    height,
                    width,
                    bottom=bottom,
                    color=_COLOURS[part],
                    edgecolor="white",
                    linewidth=0.4,
                    label=LABELS[part] if index == 0 and not style else None,
                    **style,
                )
                bottom += height
    axes.set_xticks(range(len(result.done)), [str(row.ranks) for row in result.done])
    hatched = "; hatched: predicted" if _base_prediction(result) else ""
    axes.set_xlabel(f"ranks{hatched}", fontsize=8)
    axes.set_ylabel("microseconds of a rank for each token", fontsize=8)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1],
        labels[::-1],
        fontsize=7.5,
        frameon=False,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
    )

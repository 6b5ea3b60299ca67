"""The figures of a comparison as tables in the terminal, as Markdown, and as JSON."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.text import Text

from megaspeed.analysis.compare.result import (
    ComparisonResult,
    Row,
    Stage,
    StageBytes,
    verdict,
)
from megaspeed.analysis.costs.memory import MemoryBytes
from megaspeed.analysis.costs.traffic import Traffic, by_axis
from megaspeed.analysis.units import Unit, memory_unit, table_of

NOTHING = "-"
_REPORTS = "world"  # gradient norm and loss: a few bytes, shown only in the total


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table of text. A cell may have several lines."""

    title: str  # what is shown, and in which unit
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]  # the cells of each row
    names: int  # number of columns, from the left, with words; the others have numbers


def summary_grid(result: ComparisonResult) -> Grid:
    """A line for each row, including those without figures."""
    memory = memory_unit(row.peak_bytes for row in result.done)
    traffic = memory_unit(row.sent_bytes for row in result.done)

    def cells(row: Row) -> list[str]:
        if row.status != "done":
            return [_label(f"{row.label} {row.status}"), *[NOTHING] * 6]
        names, peak = _stacked("measured", row.highest, lambda stage: [stage.peak_bytes], memory)
        _, sent = _stacked("measured", row.busiest, lambda stage: [stage.sent_bytes], traffic)
        time = f"{row.step_time.median_ms}\n{row.step_time.quartiles_ms}"
        tokens, loss = f"{row.tokens_per_second:,.0f}", f"{row.loss:.6f}"
        return [_label(row.label), names, peak, sent, time, tokens, loss]

    figures = (f"peak\n{memory.name}", f"sent\n{traffic.name}", "step ms\nmedian\nquartiles")
    return Grid(
        title="summary: peak of the fullest rank, and what the busiest rank sends in one step",
        headings=("row", "", *figures, "tokens/s", "loss"),
        rows=[cells(row) for row in result.rows],
        names=2,
    )


def memory_grid(result: ComparisonResult) -> Grid:
    """Memory by category. "states": parameters, gradients, optimizer states between micro-batches.

    On a GPU, the categories are sums of tensors, and the peak is the allocator's.
    """
    unit = memory_unit(row.peak_bytes for row in result.done)

    def sizes(stage: StageBytes) -> list[int]:
        states = stage.states
        held = states.parameters + states.gradients + states.optimizer_states
        return [*asdict(stage.peak).values(), stage.peak_bytes, held]

    return _stage_grid(
        result,
        f"memory of a rank at its peak, {unit.name}; ratio: predicted / measured",
        ("params", "grads", "optim.", "activ.", "buffers", "peak", "states"),
        lambda stage: _stacked("measured", stage, sizes, unit),
    )


def traffic_grid(result: ComparisonResult) -> Grid:
    """Traffic by axis and collective. The total includes the traffic among all ranks."""
    unit = memory_unit(row.sent_bytes for row in result.done)
    found = {key for row in result.done for stage in row.stages for key in stage.measured.traffic}
    kinds = sorted(key for key in found if key[0] != _REPORTS)

    def sizes(stage: StageBytes) -> list[int]:
        return [*(stage.traffic.get(kind, 0) for kind in kinds), stage.sent_bytes]

    headings = [f"{axis}\n{collective.replace('_', chr(10))}" for axis, collective in kinds]
    return _stage_grid(
        result,
        f"sent by a rank in one step, {unit.name}; ratio: predicted / counted",
        (*headings, "total"),
        lambda stage: _stacked("counted", stage, sizes, unit),
    )


def _stage_grid(
    result: ComparisonResult,
    title: str,
    headings: Sequence[str],
    cells: Callable[[Stage], list[str]],
) -> Grid:
    """A line for each row and pipeline stage. Without a pipeline, stages have no column."""
    has_pipeline = result.run.grid.pp > 1
    rows = [
        [
            _label(row.label) if stage.pipeline_stage == 0 else "",
            *([str(stage.pipeline_stage)] if has_pipeline else []),
            *cells(stage),
        ]
        for row in result.done
        for stage in row.stages
    ]
    names = ("row", "pp\nrank", "") if has_pipeline else ("row", "")
    return Grid(title=title, headings=(*names, *headings), rows=rows, names=len(names))


def _stacked(
    found: str, stage: Stage, sizes: Callable[[StageBytes], Sequence[int]], unit: Unit
) -> list[str]:
    """Cells of three lines: what was found, what was predicted, and the ratio."""
    measured = sizes(stage.measured)
    if stage.predicted is None:
        return [found, *map(unit.of, measured)]
    cells = [f"{found}\npredicted\nratio"]
    for one, two in zip(measured, sizes(stage.predicted), strict=True):
        ratio = _ratio(one, two)
        text = NOTHING if ratio is None else f"{ratio:.2f}"
        cells.append(f"{unit.of(one)}\n{unit.of(two)}\n{text}")
    return cells


def _ratio(found: int, predicted: int) -> float | None:
    """Predicted / found; None if nothing was found."""
    return predicted / found if found else None


def _label(text: str) -> str:
    """The label, in two lines if it names a setting of gradient_reduction."""
    return text.replace(" ", "\n", 1)


def notes(result: ComparisonResult) -> Iterator[str]:
    """A line for each thing that went wrong, and one if losses cannot be compared."""
    if result.run.config.parallel.gradient_compression != "none":
        yield "gradients are compressed, so the losses agree only approximately"
    for text in result.disagreements:
        yield f"THE LOSSES DISAGREE: {text}"
    for row in result.rows:
        label = row.label
        if row.status == "failed":
            yield f"{label} FAILED: {row.reason}"
        elif row.status == "refused":
            yield f"{label} was not run: {row.reason}"
        elif skipped := row.ranks[0].skipped_steps:
            yield (
                f"{label} skipped {skipped} of {result.steps + 1} steps, because the loss or the "
                "gradient norm was not finite"
            )


def show(result: ComparisonResult, console: Console) -> None:
    """Prints layout, batch, model, tables, and what went wrong."""
    for line in result.heading:
        console.print(line, highlight=False, markup=False)
    for make_grid in (traffic_grid, memory_grid, summary_grid) if result.done else (summary_grid,):
        for part in _parts(make_grid(result), console.width):
            console.print()
            console.print(Text(part.title, style="italic"))
            table = table_of(left=part.headings[: part.names], right=part.headings[part.names :])
            table.padding = 0  # the box puts one space between columns
            for cells in part.rows:
                table.add_row(*cells)
            console.print(table)
    console.print()
    for note in notes(result):
        style = "red" if "DISAGREE" in note or "FAILED" in note else ""
        console.print(Text(note, style=style), soft_wrap=True)


def _parts(grid: Grid, width: int) -> Iterator[Grid]:
    """The grid. If it is too wide, several grids, each with the names and some of the columns."""
    columns = list(zip(grid.headings, *grid.rows, strict=True))
    widths = [
        1 + max(len(line) for cell in column for line in cell.split("\n")) for column in columns
    ]
    free = width + 1 - sum(widths[: grid.names])
    parts: list[list[int]] = [[]]
    for index in range(grid.names, len(columns)):
        if parts[-1] and sum(widths[i] for i in (*parts[-1], index)) > free:
            parts.append([])
        parts[-1].append(index)
    for part in parts:
        headings, *rows = zip(*(columns[i] for i in (*range(grid.names), *part)), strict=True)
        yield replace(grid, headings=headings, rows=rows)


def as_markdown(result: ComparisonResult, pictures: Sequence[str]) -> str:
    """The result as Markdown, with links to the pictures, which are in the same folder."""
    lines = [f"## {result.run.name}: ZeRO stages compared", ""]
    lines += [f"- {line}" for line in result.heading]
    lines.append("- ratio: predicted / measured. Baselines have no prediction.")
    lines += [f"- **{note}**" for note in notes(result)]
    for grid in (summary_grid(result), memory_grid(result), traffic_grid(result)):
        rules = [":--" if index < grid.names else "--:" for index in range(len(grid.headings))]
        lines += ["", f"**{grid.title[0].upper()}{grid.title[1:]}**", ""]
        for cells in (grid.headings, rules, *grid.rows):
            texts = [cell.strip().replace("|", "\\|").replace("\n", "<br>") for cell in cells]
            lines.append(f"| {' | '.join(texts)} |")
    for picture in pictures:
        lines += ["", f"![{picture}]({picture})"]
    lines += ["", f"**Verdict: {verdict(result)}**"]
    return "\n".join(lines) + "\n"


def as_json(result: ComparisonResult) -> dict[str, Any]:
    """Every figure, in bytes and seconds. A loss or norm that is not finite becomes null."""
    run = result.run
    return {
        "name": run.name,
        "device": result.device,
        "device_memory_bytes": result.device_memory_bytes,
        "degrees": asdict(run.grid),
        "precision": run.precision,
        "batch": asdict(run.batch),
        "sequence_length": run.config.data.sequence_length,
        "model": run.config.model.model_dump(mode="json", exclude_none=True),
        "steps": result.steps,
        "losses_agree": not result.disagreements,
        "disagreements": result.disagreements,
        "verdict": verdict(result),
        "rows": [_row_as_json(row) for row in result.rows],
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    head = {"label": row.label, "engine": row.engine, "status": row.status}
    if row.status != "done" or row.run is None:
        return {**head, "reason": row.reason}
    return {
        **head,
        "zero_stage": row.run.zero_stage if row.engine == "zero" else None,
        "gradient_reduction": row.run.gradient_reduction,
        "step_time_seconds": row.step_time.median,
        "step_time_quartiles_seconds": [row.step_time.lower, row.step_time.upper],
        "tokens_per_second": row.tokens_per_second,
        "loss": _finite(row.loss),
        "grad_norm": _finite(row.ranks[0].grad_norm),
        "skipped_steps": row.ranks[0].skipped_steps,
        "pipeline_stages": [_stage_as_json(stage) for stage in row.stages],
        "ranks": [
            {
                "rank": rank.rank,
                "pipeline_stage": rank.pipeline_stage,
                "losses": [_finite(loss) for loss in rank.losses],
                "step_times_seconds": list(rank.step_times_seconds),
                "states_bytes": _memory(rank.states),
                "peak_bytes": _memory(rank.peak),
                "allocator_peak_bytes": rank.allocator_peak_bytes,
                "traffic_bytes": _traffic(rank.traffic),
            }
            for rank in row.ranks
        ],
    }


def _stage_as_json(stage: Stage) -> dict[str, Any]:
    measured, predicted = stage.measured, stage.predicted

    def compared(sizes: Callable[[StageBytes], dict[str, int]]) -> dict[str, Any]:
        found = sizes(measured)
        if predicted is None:
            return {"measured": found, "predicted": None, "predicted_over_measured": None}
        expected = sizes(predicted)
        ratios = {name: _ratio(found[name], expected[name]) for name in found}
        return {"measured": found, "predicted": expected, "predicted_over_measured": ratios}

    sent_ratio = predicted and _ratio(measured.sent_bytes, predicted.sent_bytes)
    return {
        "pipeline_stage": stage.pipeline_stage,
        "states_bytes": compared(lambda each: _memory(each.states)),
        "peak_bytes": compared(lambda each: _memory(each.peak)),
        "allocator_peak_bytes": measured.allocator_peak_bytes,
        "traffic_bytes": {
            "counted": _traffic(measured.traffic),
            "predicted": predicted and _traffic(predicted.traffic),
            "predicted_over_counted": sent_ratio,
        },
    }


def _memory(memory: MemoryBytes) -> dict[str, int]:
    return {**asdict(memory), "total": memory.total}


def _traffic(traffic: Traffic) -> dict[str, Any]:
    """axis -> collective -> bytes, and the total."""
    return {**by_axis(traffic), "total": sum(traffic.values())}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

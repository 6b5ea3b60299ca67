"""The figures of a comparison as Markdown, whose first part goes to the terminal, and as JSON."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from megaspeed.measurement.compare.result import ComparisonResult, Row, Stage, StageBytes, verdict
from megaspeed.measurement.turns import busy_warning
from megaspeed.planning.costs.memory import MemoryBytes
from megaspeed.planning.costs.traffic import Traffic, by_axis
from megaspeed.units import (
    Unit,
    counted,
    markdown_table,
    memory_unit,
    three_digits,
    wrapped,
)

NOTHING = "-"
_REPORTS = "world"  # gradient norm and loss: a few bytes, shown only in the total


Table = tuple[list[str], list[list[str]]]
"""Headings, and the cells of each row. The first column holds words."""


def memory_table(result: ComparisonResult) -> Table:
    """Memory by category. "states": parameters, gradients, optimizer states between micro-batches.

    On a GPU, the categories are sums of tensors, and the peak is the allocator's.
    """

    def sizes(stage: StageBytes) -> list[int]:
        states = stage.states
        held = states.parameters + states.gradients + states.optimizer_states
        return [*asdict(stage.peak).values(), stage.peak_bytes, held]

    headings = ["params", "grads", "optim.", "activ.", "buffers", "peak", "states"]
    return _stage_table(result, headings, sizes, _units(result)[0])


def traffic_table(result: ComparisonResult) -> Table:
    """Traffic by axis and collective. The total includes the traffic among all ranks."""
    stages = [stage for row in result.watched for stage in row.stages]
    found = {kind for stage in stages for kind in stage.measured.traffic}
    kinds = sorted(kind for kind in found if kind[0] != _REPORTS)

    def sizes(stage: StageBytes) -> list[int]:
        return [*(stage.traffic.get(kind, 0) for kind in kinds), stage.sent_bytes]

    headings = [*(f"{axis} {collective}" for axis, collective in kinds), "total"]
    return _stage_table(result, headings, sizes, _units(result)[1])


def _stage_table(
    result: ComparisonResult,
    headings: Sequence[str],
    sizes: Callable[[StageBytes], Sequence[int]],
    unit: Unit,
) -> Table:
    """A line for each row and pipeline stage: what was found and, if not 0, predicted / found."""

    def cells(stage: Stage) -> Iterator[str]:
        predicted = None if stage.predicted is None else sizes(stage.predicted)
        for index, found in enumerate(sizes(stage.measured)):
            ratio = None if predicted is None else _ratio(found, predicted[index])
            yield unit.of(found) + ("" if ratio is None else f" ({ratio:.2f})")

    return ["row", "stage", *headings], [
        [row.label, str(stage.pipeline_stage), *cells(stage)]
        for row in result.watched
        for stage in row.stages
    ]


def _units(result: ComparisonResult) -> tuple[Unit, Unit]:
    """Of memory and of traffic."""
    peaks = (row.peak_bytes or 0 for row in result.done)
    return memory_unit(peaks), memory_unit(row.sent_bytes or 0 for row in result.done)


def _ratio(found: int, predicted: int) -> float | None:
    """Predicted / found; None if nothing was found."""
    return predicted / found if found else None


def notes(result: ComparisonResult) -> Iterator[str]:
    """A line for each thing that went wrong, and for what limits the figures."""
    for text in result.disagreements:
        yield f"THE LOSSES DISAGREE: {text}"
    yield from busy_warning(result.share_of_others)
    for row in result.rows:
        label = row.label
        if row.status == "failed":
            yield f"{label} FAILED: {row.reason}"
        elif skipped := row.turns[0][0].skipped_steps:
            yield (
                f"{label} skipped {skipped} of {1 + result.steps} steps, because the loss or the "
                "gradient norm was not finite"
            )
        if row.unwatched is not None:
            yield f"{label}: memory and traffic could not be counted: {row.unwatched}"
    if result.run.config.parallel.gradient_compression != "none":
        yield "gradients are compressed, so the losses agree only approximately"
    device_type = "cpu" if result.device == "CPU" else "cuda"
    if result.watched and result.run.config.training.compiles_on(device_type):
        yield "memory by category and traffic are those of a step without compilation"


def on_screen(result: ComparisonResult, most_lines: int = 36) -> str:
    """Verdict, summary and notes, in at most this number of lines."""
    lines = [line for text in result.heading for line in wrapped(f"- {text}", indent="  ")]
    lines += ["", *wrapped(f"verdict: {verdict(result)}"), ""]
    lines += [*wrapped(_describe_noise(result)), "", *markdown_table(*_summary(result)), ""]
    noted = [line for note in notes(result) for line in wrapped(f"- {note}", indent="  ")]
    if len(lines) + len(noted) > most_lines:
        noted = [*noted[: most_lines - len(lines) - 1], "... compare.md has all notes"]
    return "\n".join([*lines, *noted]).rstrip()


def _describe_noise(result: ComparisonResult) -> str:
    text = f"{counted(result.turns, 'turn')} of {counted(result.steps, 'timed step')} each. "
    if result.noise is None:
        return text + "The noise is not known, so all rows count as tied: raise --turns."
    noise = f"{result.noise:.1%}" if result.noise < 1 else "over 100%"
    return text + (
        f"The noise is {noise}: equally fast rows differ by less in 99 of 100 comparisons. Rows "
        "that are slower than the fastest by less are tied. More --turns lower the noise."
    )


def _summary(result: ComparisonResult) -> Table:
    """A line for each row, also for those without figures."""
    memory, traffic = _units(result)
    fastest = min(result.done, key=lambda row: row.step_seconds, default=None)

    def cells(row: Row) -> list[str]:
        if row.status != "done" or fastest is None:
            return [row.label, row.status, *[NOTHING] * 4]
        tied = "tied" if result.is_tied(row, fastest) else f"+{result.slower(row, fastest):.1%}"
        return [
            row.label,
            three_digits(1e3 * row.step_seconds),
            "fastest" if row is fastest else tied,
            f"{row.tokens_per_second:,.0f}",
            NOTHING if row.peak_bytes is None else memory.of(row.peak_bytes),
            NOTHING if row.sent_bytes is None else traffic.of(row.sent_bytes),
        ]

    headings = ["row", "step ms", "slower", "tokens/s"]
    headings += [f"peak {memory.name}", f"sent {traffic.name}"]
    return headings, [*map(cells, result.rows)]


def as_markdown(result: ComparisonResult, pictures: Sequence[str]) -> str:
    """The result as Markdown, with links to the pictures, which are in the same folder."""
    lines = [f"# {result.run.name}: ZeRO stages compared", "", on_screen(result, sys.maxsize)]
    lines += ["", "Peak: of the fullest rank. Sent: by the busiest rank in one step."]
    if result.watched:
        lines += ["", "Memory of a rank at its peak, in the unit above (predicted / measured)", ""]
        lines += markdown_table(*memory_table(result))
        lines += ["", "Sent by a rank in one step, in the unit above (predicted / counted)", ""]
        lines += markdown_table(*traffic_table(result))
    for picture in pictures:
        lines += ["", f"![{picture}]({picture})"]
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
        "turns": result.turns,
        "steps": result.steps,
        "noise": result.noise,
        "share_of_others": result.share_of_others,
        "losses_agree": not result.disagreements,
        "disagreements": result.disagreements,
        "verdict": verdict(result),
        "rows": [_row_as_json(row) for row in result.rows],
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    head = {"label": row.label, "engine": row.engine, "status": row.status}
    if row.status != "done":
        return {**head, "reason": row.reason}
    return {
        **head,
        "zero_stage": row.run.zero_stage if row.engine == "zero" else None,
        "gradient_reduction": row.run.gradient_reduction,
        "step_time_seconds": row.step_seconds,
        "turn_seconds": row.turn_seconds,
        "tokens_per_second": row.tokens_per_second,
        "loss": _finite(row.loss),
        "grad_norm": _finite(row.turns[0][0].grad_norm),
        "skipped_steps": row.turns[0][0].skipped_steps,
        "peak_bytes": row.peak_bytes,
        "unwatched": row.unwatched,
        "pipeline_stages": [_stage_as_json(stage) for stage in row.stages],
        "losses": [_finite(loss) for loss in row.turns[0][0].losses],
        "turns": [[list(rank.step_seconds) for rank in turn] for turn in row.turns],
        "ranks": [
            {
                "rank": rank.rank,
                "pipeline_stage": rank.pipeline_stage,
                "states_bytes": _memory(rank.states),
                "peak_bytes": _memory(rank.peak),
                "traffic_bytes": _traffic(rank.traffic),
            }
            for rank in row.watched
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

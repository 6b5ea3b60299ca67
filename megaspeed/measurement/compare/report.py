"""The figures of a comparison as text, JSON and a picture of the rows' memory."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from megaspeed.measurement.compare.result import ComparisonResult, verdict
from megaspeed.measurement.compare.rows import ComparedRow, StageBytes
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
from megaspeed.planning.costs.memory import MemoryBytes
from megaspeed.planning.costs.traffic import Traffic, by_axis
from megaspeed.units import Unit, counted, memory_unit, three_digits


def report(result: ComparisonResult) -> Report:
    """Return the report. The terminal shows the verdict, a line for each row, and what failed."""
    noted = list(notes(result))
    parts: list[Part] = [
        describe_run(result.run, result.device),
        f"verdict: {verdict(result)}",
        _describe_noise(result),
        _summary(result),
        *([noted] if noted else []),
    ]
    details: list[Part] = ["Peak: of the fullest rank. Sent: by the busiest rank in one step."]
    if result.watched:
        details += [
            "By pipeline stage, with predicted / measured in brackets:",
            stage_table(result),
        ]
    return Report(
        title=f"{result.run.name}: ZeRO stages compared",
        parts=parts,
        details=details,
        figures=_figures(result),
        panels=[_memory_panel(result)] if result.watched else [],
        succeeded=result.succeeded,
    )


def stage_table(result: ComparisonResult) -> Table:
    """Return a line for each row and pipeline stage: measured and, in brackets, predicted /
    measured. "states" are those of the model between micro-batches.
    """
    memory, traffic = _units(result)

    def cells(found: StageBytes, predicted: StageBytes | None) -> Iterator[str]:
        for unit, size in (
            (memory, lambda stage: stage.states.total),
            (memory, lambda stage: stage.peak_bytes),
            (traffic, lambda stage: stage.sent_bytes),
        ):
            ratio = None if predicted is None else _ratio(size(found), size(predicted))
            yield unit.of(size(found)) + ("" if ratio is None else f" ({ratio:.2f})")

    lines = [
        [row.label, str(stage), *cells(*pair)]
        for row in result.done
        for stage, pair in enumerate(_stages(row))
    ]
    headings = [f"states {memory.name}", f"peak {memory.name}", f"sent {traffic.name}"]
    return Table(["row", "stage", *headings], lines)


def _stages(row: ComparedRow) -> Iterator[tuple[StageBytes, StageBytes | None]]:
    """By pipeline stage, what was measured and what was predicted."""
    for stage, measured in enumerate(row.measured):
        yield measured, None if row.predicted is None else row.predicted[stage]


def _units(result: ComparisonResult) -> tuple[Unit, Unit]:
    """Of memory and of traffic."""
    peaks = (row.peak_bytes or 0 for row in result.done)
    return memory_unit(peaks), memory_unit(row.sent_bytes or 0 for row in result.done)


def _ratio(found: int, predicted: int) -> float | None:
    """Predicted / found; None if nothing was found."""
    return predicted / found if found else None


def notes(result: ComparisonResult) -> Iterator[str]:
    """Yield what went wrong, and what limits the figures."""
    for text in result.disagreements:
        yield f"THE LOSSES DISAGREE: {text}"
    yield from result.notes
    if result.run.config.parallel.gradient_compression != "none":
        yield "gradients are compressed, so the losses agree only approximately"
    on_cpu = result.device is not None and result.device.name == "CPU"
    if result.watched and result.run.config.training.compiles_on("cpu" if on_cpu else "cuda"):
        yield "memory by category and traffic are those of a step without compilation"


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

    def cells(row: ComparedRow) -> list[str]:
        if not row.done or fastest is None:
            return [row.label, "failed", *[NOTHING] * 4]
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
    return Table(headings, [*map(cells, result.rows)])


def _memory_panel(result: ComparisonResult) -> Panel:
    """The peak of each row's fullest stage by category, predicted beside measured."""
    unit = _units(result)[0]

    def in_unit(memory: MemoryBytes) -> dict[str, float]:
        return {name.replace("_", " "): size / unit.size for name, size in asdict(memory).items()}

    def bar(row: ComparedRow) -> Bar:
        measured, predicted = list(_stages(row))[row.fullest_stage]
        allocated = measured.allocator_peak_bytes
        return Bar(
            label=row.label.replace(" ", "\n"),
            parts=in_unit(measured.peak),
            predicted=None if predicted is None else in_unit(predicted.peak),
            line=None if allocated is None else allocated / unit.size,
            text=three_digits(measured.peak_bytes / unit.size),
        )

    return Panel(
        title="\n".join(describe_run(result.run, result.device)),
        unit=f"peak of the fullest rank ({unit.name}); line: allocator",
        bars=[bar(row) for row in result.watched],
    )


def _figures(result: ComparisonResult) -> dict[str, Any]:
    """Every figure, in bytes and seconds. A loss or norm that is not finite becomes null."""
    run = result.run
    return {
        "name": run.name,
        "device": result.device and result.device.name,
        "device_memory_bytes": result.device and result.device.memory_bytes,
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
        "rows": [_row_figures(row) for row in result.rows],
    }


def _row_figures(row: ComparedRow) -> dict[str, Any]:
    if not row.done:
        head = {"label": row.label, "engine": row.engine, "status": "failed"}
        return {**head, "reason": row.failure}
    first = row.turns[0][0]
    return {
        "label": row.label,
        "engine": row.engine,
        "status": "done",
        "zero_stage": row.run.zero_stage if row.engine == "zero" else None,
        "gradient_reduction": row.run.gradient_reduction,
        "step_time_seconds": row.step_seconds,
        "turn_seconds": row.turn_seconds,
        "tokens_per_second": row.tokens_per_second,
        "loss": finite(row.loss),
        "grad_norm": finite(first.grad_norm),
        "skipped_steps": first.skipped_steps,
        "peak_bytes": row.peak_bytes,
        "unwatched": row.no_extras,
        "pipeline_stages": [
            {"pipeline_stage": stage, **_stage_figures(*pair)}
            for stage, pair in enumerate(_stages(row))
        ],
        "losses": [finite(loss) for loss in row.losses],
        "turns": [
            [[*rank.warm_up_seconds, *rank.step_seconds] for rank in turn] for turn in row.turns
        ],
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


def _stage_figures(measured: StageBytes, predicted: StageBytes | None) -> dict[str, Any]:
    def compared(sizes: Callable[[StageBytes], dict[str, int]]) -> dict[str, Any]:
        found = sizes(measured)
        if predicted is None:
            return {"measured": found, "predicted": None, "predicted_over_measured": None}
        expected = sizes(predicted)
        ratios = {name: _ratio(found[name], expected[name]) for name in found}
        return {"measured": found, "predicted": expected, "predicted_over_measured": ratios}

    sent_ratio = predicted and _ratio(measured.sent_bytes, predicted.sent_bytes)
    return {
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

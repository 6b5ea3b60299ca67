"""A comparison as grids of text: what the terminal and Markdown show alike.

summary    a line for each row: peak, bytes sent, time, loss
memory     what is held at the peak, by category; two lines for each row and pipeline stage
traffic    what is sent in a step, by axis and collective; likewise
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megaspeed.analysis.compare.result import ComparisonResult, Row, StageFigures, ratio
from megaspeed.analysis.costs.memory import MemoryBytes
from megaspeed.analysis.costs.traffic import Traffic
from megaspeed.analysis.units import memory_unit

NOTHING = "-"
_SCALARS = "world"  # gradient norm and loss: a few bytes, counted in the total alone


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Headings over rows of as many cells.

    Attributes:
        title: what is shown, and in which unit.
        headings: of the columns.
        rows: cells.
        names: how many of the first columns hold words; the others hold numbers.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int


def summary_grid(result: ComparisonResult) -> Grid:
    """One line for each row, those without figures too."""
    done = result.done
    memory = memory_unit(row.highest.peak_bytes for row in done)
    traffic = memory_unit(row.busiest.traffic_bytes for row in done)
    return Grid(
        title="summary: the fullest rank's peak, and what the busiest rank sends in a step",
        headings=(
            "row",
            f"peak {memory.name}\npredicted",
            f"peak {memory.name}\nmeasured",
            "\nratio",
            f"sent {traffic.name}\npredicted",
            f"sent {traffic.name}\ncounted",
            "\nratio",
            "step\nms",
            "tokens/s",
            "loss",
        ),
        rows=[_summary_cells(row, memory.text, traffic.text) for row in result.rows],
        names=1,
    )


def memory_grid(result: ComparisonResult) -> Grid:
    """By category; "states" are parameters, gradients and optimizer states between micro-batches.

    On a GPU the peak's parts are the tensors' and its sum the allocator's.
    """
    unit = memory_unit(row.highest.peak_bytes for row in result.done)

    def cells(memory: MemoryBytes, peak: int, states: int) -> list[str]:
        parts = (
            memory.parameters,
            memory.gradients,
            memory.optimizer_states,
            memory.activations,
            memory.communication_buffers,
        )
        return [unit.text(part) for part in (*parts, peak, states)]

    def of_stage(stage: StageFigures) -> list[str]:
        held = model_states_bytes(stage.states)
        measured = cells(stage.peak, stage.peak_bytes, held)
        if stage.predicted is None:
            return ["measured", *measured, NOTHING, NOTHING]
        peak, states = stage.predicted.peak, model_states_bytes(stage.predicted.states)
        ratios = ratio(peak.total, stage.peak_bytes), ratio(states, held)
        predicted = cells(peak, peak.total, states)
        return ["measured\npredicted", *_stacked(measured, predicted), *map(ratio_text, ratios)]

    return _grid_by_stage(
        result,
        title=f"memory of a rank at its peak, {unit.name}",
        headings=(
            "",
            "params",
            "grads",
            "optim.",
            "activ.",
            "buffers",
            "peak",
            "states",
            "peak\nratio",
            "states\nratio",
        ),
        cells=of_stage,
    )


def traffic_grid(result: ComparisonResult) -> Grid:
    """By axis and collective; the total includes what all ranks agree on, a few numbers."""
    unit = memory_unit(row.busiest.traffic_bytes for row in result.done)
    found = {key for row in result.done for stage in row.stages for key in stage.traffic}
    kinds = sorted(key for key in found if key[0] != _SCALARS)

    def cells(traffic: Traffic) -> list[str]:
        total = sum(traffic.values())
        return [unit.text(size) for size in (*(traffic.get(kind, 0) for kind in kinds), total)]

    def of_stage(stage: StageFigures) -> list[str]:
        counted = cells(stage.traffic)
        if stage.predicted is None:
            return ["counted", *counted, NOTHING]
        expected = stage.predicted.traffic
        total = ratio_text(ratio(sum(expected.values()), stage.traffic_bytes))
        return ["counted\npredicted", *_stacked(counted, cells(expected)), total]

    return _grid_by_stage(
        result,
        title=f"sent by a rank in one step, {unit.name}",
        headings=(
            "",
            *(f"{axis}\n{collective.replace('_', chr(10))}" for axis, collective in kinds),
            "total",
            "ratio",
        ),
        cells=of_stage,
    )


def model_states_bytes(memory: MemoryBytes) -> int:
    """What ZeRO partitions: parameters, gradients, optimizer states."""
    return memory.parameters + memory.gradients + memory.optimizer_states


def ratio_text(value: float | None) -> str:
    """Predicted over measured."""
    return NOTHING if value is None else f"{value:.2f}"


def _summary_cells(
    row: Row, memory: Callable[[int], str], traffic: Callable[[int], str]
) -> list[str]:
    if row.status != "done":
        return [_label(f"{row.variant.label} {row.status}"), *[NOTHING] * 9]
    highest, busiest = row.highest, row.busiest
    return [
        _label(row.variant.label),
        *_predicted_and_found(
            None if highest.predicted is None else highest.predicted.peak.total,
            highest.peak_bytes,
            memory,
        ),
        *_predicted_and_found(
            None if busiest.predicted is None else sum(busiest.predicted.traffic.values()),
            busiest.traffic_bytes,
            traffic,
        ),
        f"{row.step_time_seconds * 1e3:,.0f}",
        f"{row.tokens_per_second:,.0f}",
        f"{row.loss:.6f}",
    ]


def _predicted_and_found(
    predicted: int | None, found: int, text: Callable[[int], str]
) -> tuple[str, str, str]:
    if predicted is None:
        return NOTHING, text(found), NOTHING
    return text(predicted), text(found), ratio_text(ratio(predicted, found))


def _grid_by_stage(
    result: ComparisonResult,
    *,
    title: str,
    headings: Sequence[str],
    cells: Callable[[StageFigures], list[str]],
) -> Grid:
    """A row is named with its first pipeline stage; without a pipeline stages have no column."""
    has_pipeline = result.run.grid.pp > 1
    rows = [
        [
            _label(row.variant.label) if stage is row.stages[0] else "",
            *([str(stage.pipeline_stage)] if has_pipeline else []),
            *cells(stage),
        ]
        for row in result.done
        for stage in row.stages
    ]
    names = ("row", "stage") if has_pipeline else ("row",)
    return Grid(title=title, headings=(*names, *headings), rows=rows, names=len(names) + 1)


def _label(text: str) -> str:
    """In two lines where there is a setting of gradient_reduction to name."""
    return text.replace(" ", "\n", 1)


def _stacked(above: Sequence[str], below: Sequence[str]) -> list[str]:
    return [f"{one}\n{other}" for one, other in zip(above, below, strict=True)]

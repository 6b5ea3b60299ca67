"""The content of a checkpoint, as lines and a table, and as JSON values."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from rich.table import Table

from megaspeed.checkpoint.inspection import Inspection
from megaspeed.checkpoint.run_state import RunState
from megaspeed.checkpoint.tensors import WEIGHTS, expected_shapes, shape_text
from megaspeed.model.parameters import Shape
from megaspeed.units import counted, short_count, traffic_unit

_DIGITS = 12  # shown of each fingerprint; the JSON has all digits


def report(inspection: Inspection) -> Iterator[str | Table]:
    """The lines and the table that describe a checkpoint without problems."""
    assert inspection.state is not None and inspection.model is not None, "it has problems"
    yield f"{inspection.checkpoint}: {size_text(inspection)}"
    yield from _state_lines(inspection.state)
    yield ""
    yield _tensor_table(expected_shapes(inspection.model), inspection.state.kinds)


def size_text(inspection: Inspection) -> str:
    """The size and the number of files of a checkpoint, without its manifest."""
    size_bytes = inspection.size_bytes
    size = traffic_unit((size_bytes,)).named(size_bytes)
    return f"{size}, {counted(len(inspection.files), 'file')}"


def show_as_json(inspection: Inspection) -> dict[str, Any]:
    """The figures of ``report``."""
    assert inspection.state is not None and inspection.model is not None, "it has problems"
    shapes = expected_shapes(inspection.model)
    return {
        "checkpoint": str(inspection.checkpoint),
        "size_bytes": inspection.size_bytes,
        "files": len(inspection.files),
        "parameters": _elements(shapes),
        "shapes": {name: list(shape) for name, shape in shapes.items()},
        "run_state": inspection.state.model_dump(mode="json"),
    }


def verify_as_json(inspection: Inspection) -> dict[str, Any]:
    """Whether one checkpoint is complete, and its problems."""
    return {
        "checkpoint": str(inspection.checkpoint),
        "whole": not inspection.problems,
        "problems": list(inspection.problems),
        "strays": list(inspection.strays),
        "size_bytes": inspection.size_bytes,
        "files": len(inspection.files),
    }


def _state_lines(state: RunState) -> Iterator[str]:
    software = "software: " + ", ".join(f"{name} {of}" for name, of in state.software.items())
    progress, layout, data = state.progress, state.layout, state.data
    if layout is None or data is None:
        yield f"{state.origin}, not trained since; starts a run at any layout"
        yield software
        return
    loss = "not finite" if progress.loss is None else f"{progress.loss:.4f}"
    skipped = progress.step - progress.steps_taken
    yield (
        f"step {progress.step:,}{f', {skipped:,} of them skipped' if skipped else ''}: "
        f"{counted(progress.samples, 'sample')}, {counted(progress.tokens, 'token')}, loss {loss}"
    )
    sequence = ", sequence parallelism" if layout.sequence_parallel else ""
    yield f"saved at {layout}, schedule {layout.schedule}{sequence}; resumes at any other"
    yield (
        f"data: corpus {data.corpus[:_DIGITS]}, tokenizer {data.tokenizer[:_DIGITS]}, "
        f"sequences of {data.sequence_length:,} tokens"
    )
    yield f"seeds: data {data.seed}, training {state.training_seed}"
    yield software


def _tensor_table(shapes: dict[str, Shape], kinds: Sequence[str]) -> Table:
    parameters = _elements(shapes)
    moments = " and ".join(kind for kind in kinds if kind != WEIGHTS)
    table = Table(
        title=f"{short_count(parameters)} parameters ({parameters:,}) in "
        f"{counted(len(shapes), 'tensor')}",
        caption=f"float32; with {moments} of each" if moments else "float32; weights alone",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("parameter", overflow="fold")
    table.add_column("shape", justify="right")
    table.add_column("elements", justify="right")
    for name, shape in shapes.items():
        table.add_row(name, shape_text(shape), f"{prod(shape):,}")
    return table


def _elements(shapes: dict[str, Shape]) -> int:
    return sum(prod(shape) for shape in shapes.values())

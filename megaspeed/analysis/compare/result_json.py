"""A comparison as JSON: every figure, in bytes and seconds, by row, pipeline stage and rank."""

import math
from dataclasses import asdict
from typing import Any

from megaspeed.analysis.compare.rank_record import RankRecord
from megaspeed.analysis.compare.result import ComparisonResult, Row, StageFigures, ratio
from megaspeed.analysis.costs.memory import MemoryBytes
from megaspeed.analysis.costs.traffic import Traffic, by_axis


def result_as_json(result: ComparisonResult) -> dict[str, Any]:
    """Plain values for a file; null for what JSON has no number for."""
    run = result.run
    return {
        "name": run.name,
        "device": result.device,
        "degrees": asdict(run.grid),
        "precision": run.precision,
        "batch": asdict(run.batch),
        "sequence_length": run.config.data.sequence_length,
        "model": run.config.model.model_dump(mode="json", exclude_none=True),
        "steps": result.steps,
        "losses_agree": not result.disagreements,
        "disagreements": result.disagreements,
        "rows": [_row_as_json(row) for row in result.rows],
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    run = row.variant.run
    head = {"label": row.variant.label, "engine": row.variant.engine, "status": row.status}
    if row.status != "done" or run is None:
        return {**head, "reason": row.reason or row.variant.refused}
    return {
        **head,
        "zero_stage": run.zero_stage if row.variant.engine == "zero" else None,
        "gradient_reduction": run.gradient_reduction,
        "step_time_seconds": row.step_time_seconds,
        "tokens_per_second": row.tokens_per_second,
        "loss": _finite(row.loss),
        "grad_norm": _finite(row.grad_norm),
        "skipped_steps": row.skipped_steps,
        "pipeline_stages": [_stage_as_json(stage) for stage in row.stages],
        "ranks": [_rank_as_json(record) for record in row.ranks],
    }


def _stage_as_json(stage: StageFigures) -> dict[str, Any]:
    predicted = stage.predicted
    return {
        "pipeline_stage": stage.pipeline_stage,
        "states_bytes": _compared(stage.states, None if predicted is None else predicted.states),
        "peak_bytes": _compared(stage.peak, None if predicted is None else predicted.peak),
        "allocator_peak_bytes": stage.allocator_peak_bytes,
        "traffic_bytes": _traffic_compared(
            stage.traffic, None if predicted is None else predicted.traffic
        ),
    }


def _compared(measured: MemoryBytes, predicted: MemoryBytes | None) -> dict[str, Any]:
    found = {**asdict(measured), "total": measured.total}
    if predicted is None:
        return {"measured": found, "predicted": None, "predicted_over_measured": None}
    expected = {**asdict(predicted), "total": predicted.total}
    return {
        "measured": found,
        "predicted": expected,
        "predicted_over_measured": {name: ratio(expected[name], found[name]) for name in found},
    }


def _traffic_compared(counted: Traffic, predicted: Traffic | None) -> dict[str, Any]:
    return {
        "counted": _traffic_as_json(counted),
        "predicted": None if predicted is None else _traffic_as_json(predicted),
        "predicted_over_counted": (
            None if predicted is None else ratio(sum(predicted.values()), sum(counted.values()))
        ),
    }


def _traffic_as_json(traffic: Traffic) -> dict[str, Any]:
    """axis -> collective -> bytes, and the total."""
    return {**by_axis(traffic), "total": sum(traffic.values())}


def _rank_as_json(record: RankRecord) -> dict[str, Any]:
    return {
        "rank": record.rank,
        "pipeline_stage": record.pipeline_stage,
        "losses": [_finite(loss) for loss in record.losses],
        "step_times_seconds": list(record.step_times_seconds),
        "states_bytes": {**asdict(record.states), "total": record.states.total},
        "peak_bytes": {**asdict(record.peak), "total": record.peak.total},
        "allocator_peak_bytes": record.allocator_peak_bytes,
        "traffic_bytes": _traffic_as_json(record.traffic),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

"""metrics.jsonl: one JSON object a line, always the same keys, no number that JSON lacks."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megaspeed.training.metrics import MetricsFile, StepMetrics, ValidationMetrics
from tests.training.metrics_of_steps import STEP_KEYS, VALIDATION_KEYS, step_metrics


def written(folder: Path, *metrics: StepMetrics | ValidationMetrics) -> list[dict[str, Any]]:
    with MetricsFile(folder / "metrics.jsonl") as file:
        for record in metrics:
            file.write(record)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def test_a_step_has_the_keys_of_every_step(tmp_path: Path) -> None:
    (record,) = written(tmp_path, step_metrics())
    assert list(record) == STEP_KEYS


def test_an_evaluation_has_the_keys_of_every_evaluation(tmp_path: Path) -> None:
    (record,) = written(tmp_path, ValidationMetrics.of(7, math.log(2.0)))
    assert list(record) == VALIDATION_KEYS
    assert record["validation_perplexity"] == pytest.approx(2.0)


def test_numbers_are_written_in_full_precision(tmp_path: Path) -> None:
    (record,) = written(tmp_path, step_metrics(loss=math.pi))
    assert record["loss"] == math.pi


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_written_as_null(tmp_path: Path, value: float) -> None:
    (record,) = written(tmp_path, step_metrics(loss=value, grad_norm=value, skipped=True))
    assert list(record) == STEP_KEYS
    assert record["loss"] is None and record["grad_norm"] is None
    assert record["skipped"] is True and record["step"] == 7


def test_a_perplexity_beyond_floats_is_written_as_null(tmp_path: Path) -> None:
    (record,) = written(tmp_path, ValidationMetrics.of(1, 5000.0))
    assert record == {"step": 1, "validation_loss": 5000.0, "validation_perplexity": None}


def test_a_step_can_be_read_before_the_run_is_over(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        file.write(step_metrics(step=1))
        assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 1

"""The loss curve is a PNG, whatever the run went through."""

import math
import struct
from pathlib import Path

import pytest

from megaspeed.training.loss_curve import draw_loss_curve
from megaspeed.training.metrics import MetricsFile, StepMetrics, ValidationMetrics
from tests.training.metrics_of_steps import step_metrics

LEARNING = [step_metrics(step=s, tokens=192 * s, loss=6.0 / s) for s in range(1, 20)]
SKIPPED = step_metrics(step=20, tokens=192 * 20, loss=math.nan, grad_norm=math.nan, skipped=True)


@pytest.mark.parametrize(
    "records",
    [
        [*LEARNING, ValidationMetrics.of(19, 0.4)],
        LEARNING,
        [*LEARNING, SKIPPED, ValidationMetrics.of(20, 0.4)],
        [SKIPPED, ValidationMetrics.of(20, math.nan)],
    ],
    ids=["validated", "never validated", "validated after a skipped step", "nothing but skipped"],
)
def test_draws_a_png(tmp_path: Path, records: list[StepMetrics | ValidationMetrics]) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        for record in records:
            file.write(record)
    picture = tmp_path / "loss.png"
    draw_loss_curve(tmp_path / "metrics.jsonl", picture, title="tiny")
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", content[16:24]) == (7 * 120, 4 * 120)

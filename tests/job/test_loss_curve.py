"""The loss curve is a PNG, for any history of the run."""

import math
import struct
from pathlib import Path

import matplotlib
import pytest

from megaspeed.job.reporting import draw_loss_curve, smoothed
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
    assert_is_the_picture(picture)


def test_the_name_of_a_run_is_no_formula(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        file.write(step_metrics())
    picture = tmp_path / "loss.png"
    draw_loss_curve(tmp_path / "metrics.jsonl", picture, title="cost_$5_vs_$10")
    assert_is_the_picture(picture)


def test_half_a_line_and_a_validation_without_its_step_are_left_out(tmp_path: Path) -> None:
    """A resumption drops the incomplete line of a killed run, but not the validation after it."""
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        for record in LEARNING:
            file.write(record)
    with (tmp_path / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 20, "lo\n\x00\n[20]\n{}\n')
        lines.write('{"step": 20, "validation_loss": 0.4, "validation_perplexity": 1.5}\n')
    picture, whole = tmp_path / "loss.png", tmp_path / "whole.png"
    draw_loss_curve(tmp_path / "metrics.jsonl", picture, title="tiny")
    with MetricsFile(tmp_path / "whole.jsonl") as file:
        for record in LEARNING:
            file.write(record)
    draw_loss_curve(tmp_path / "whole.jsonl", whole, title="tiny")
    assert picture.read_bytes() == whole.read_bytes()


def test_the_smoothed_loss_is_the_mean_of_the_steps_around_each_step() -> None:
    assert smoothed([1.0, 2.0, 6.0, 4.0], 1) == [1.5, 3.0, 4.0, 5.0]
    assert smoothed([1.0, 2.0], 0) == [1.0, 2.0] and smoothed([], 3) == []


def test_the_curve_names_the_smoothed_line_and_separates_thousands(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        for step in range(1, 101):
            file.write(step_metrics(step=step, tokens=4096 * step, loss=6.0 / step))
    picture = tmp_path / "loss.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw_loss_curve(tmp_path / "metrics.jsonl", picture, title="tiny")
    text = picture.read_text()
    assert "training, mean of 11 steps" in text and "200,000" in text and "200000" not in text


def assert_is_the_picture(picture: Path) -> None:
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", content[16:24]) == (7 * 120, 4 * 120)

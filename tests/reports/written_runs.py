"""Run folders as a run writes them, without training."""

import math
from pathlib import Path
from typing import Any

from megaspeed.checkpoint.folders import METRICS
from megaspeed.config.resolve import Run
from megaspeed.job.run_folder import continue_run_folder, start_run_folder
from megaspeed.training.metrics import MetricsFile, ValidationMetrics
from tests.support.tiny import merge, tiny_run
from tests.training.metrics_of_steps import step_metrics

TEXT = Path(__file__).parents[2] / "LICENSE"


def loss_at(step: int) -> float:
    """Return a loss that falls from 5 to 2, with seven digits after the point."""
    return round(2 + 3 * math.exp(-step / 30) + 0.05 * math.sin(step), 7)


def written_run(
    folder: Path,
    *,
    steps: int = 60,
    resumed_at: int | None = None,
    factor_from: tuple[int, float] = (10**9, 1.0),
    **changes: Any,
) -> Path:
    """Write a run of ``steps`` recorded steps of 60, with a validation every 20.

    Args:
        folder: the folder of the run.
        steps: the number of steps that it has taken.
        resumed_at: the step after which it was killed and resumed.
        factor_from: (step, factor). From this step on, the loss is multiplied by this factor.
        changes: keys of the JSON.
    """
    training = {"steps": 60, "run_dir": str(folder)}
    run = tiny_run(TEXT, **merge({"pp": 2, "dp": 2, "training": training}, changes))
    start_run_folder(run, "cpu")
    if resumed_at is not None:
        _write(run, range(1, resumed_at + 3), factor_from)
        continue_run_folder(run, resumed_at, "cpu")
    _write(run, range((resumed_at or 0) + 1, steps + 1), factor_from)
    return folder


def _write(run: Run, steps: range, factor_from: tuple[int, float]) -> None:
    first, factor = factor_from
    with MetricsFile(run.run_dir / METRICS) as file:
        for step in steps:
            loss = loss_at(step) * (factor if step >= first else 1.0)
            file.write(
                step_metrics(
                    step=step,
                    loss=loss,
                    grad_norm=loss / 4,
                    tokens=384 * step,
                    learning_rate=1e-3 * min(1.0, step / 20),
                )
            )
            if step % 20 == 0:
                file.write(ValidationMetrics.of(step, loss + 0.1))

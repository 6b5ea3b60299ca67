"""Goodput: the fraction of the wall-clock time of a long run in which it trains.

    goodput = validation x saves x restarts      the fraction that each of them leaves

    validation   a validation is the forward of ``eval_batches`` batches
    saves        the training waits for a save, or for the copy to host memory (``async_save``)
    restarts     a failure costs the time to restart, and the training since the last save

The plan also states the save interval that loses the least time (Young 1974, "A first order
approximation to the optimum checkpoint interval"):

    sqrt(2 x seconds of a save x mean time between failures)
"""

import math
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from megaspeed.config.resolve import Run
from megaspeed.config.section import Bandwidth, Section
from megaspeed.files.json_values import json_value
from megaspeed.pipeline.partition import parameters_of_stages

_SAVED_BYTES = 12
"""Bytes of a parameter in a checkpoint: master weight and two moments in fp32
(docs/checkpoints.md)."""

_FORWARD = 1 / 3
"""The fraction of a step that a forward takes: a backward has twice as many products."""


class Operations(Section):
    """Failures and storage of the machines: the object ``operations`` of a cluster."""

    failures_per_gpu_hour: float = Field(default=419 / (54 * 24 * 16_384), ge=0)
    """Rate of failures that end the run. Llama 3: 419 unexpected interruptions in 54 days on 16,384
    H100 (Dubey et al. 2024, section 3.3.4), one in 50,677 GPU-hours."""
    restart_seconds: float = Field(default=600.0, ge=0)
    """Seconds from a failure to the next step, without loading: the failure is noticed, a node is
    replaced, ranks start and compile. An assumption. A rank that does not respond is noticed after
    ``training.hang_timeout_seconds``, by default 300."""
    storage_bandwidth: Bandwidth = 10.0
    """GB/s at which all ranks together write or read a checkpoint. An assumption."""
    copy_bandwidth: Bandwidth = 20.0
    """GB/s from a GPU to host memory, over PCIe. An assumption: 16 lanes of PCIe 4 have 32."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Fractions of the wall-clock time, each between 0 and 1, and figures behind them."""

    validation: float  # the fraction that validations leave
    saves: float  # the fraction of it that saves leave
    restarts: float  # the fraction of that which failures leave
    save_seconds: float  # for which the training waits at each save
    hours_between_failures: float  # of all ranks, on average; infinite if there are none
    best_save_interval: int | None  # steps; None without failures

    @property
    def total(self) -> float:
        """The fraction of the time in which the run trains."""
        return self.validation * self.saves * self.restarts

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        return {**json_value(self), "total": self.total}


def predict_goodput(
    run: Run, step_seconds: float, operations: Operations | None = None, steps: int | None = None
) -> Goodput:
    """Return the goodput of a run with this step time.

    Args:
        run: the run, with its intervals, layout and model.
        step_seconds: of one training step.
        operations: failures and storage.
        steps: number of steps of the training. If omitted: ``training.steps``.

    An interval of 0, or one longer than the training, counts as the length of the training.
    """
    assert step_seconds > 0, "a step takes time"
    operations = operations or Operations()
    training = run.config.training
    steps = steps or training.steps

    def steps_between(interval: int) -> int:
        return min(interval or steps, steps)

    validates = run.config.data.validation is not None or run.config.data.validation_fraction > 0
    validation = validates * training.eval_batches * _FORWARD * step_seconds
    trained = steps_between(training.eval_interval) * step_seconds
    after_validation = trained / (trained + validation)

    step = step_seconds / after_validation
    between_saves = steps_between(training.save_interval) * step
    stored = _SAVED_BYTES * sum(parameters_of_stages(run))
    storage = stored / (1e9 * operations.storage_bandwidth)
    save = _blocking(run, storage, stored, between_saves, operations)
    interval = between_saves + save

    rate = operations.failures_per_gpu_hour * run.grid.world_size / 3600
    between_failures = 1 / rate if rate > 0 else math.inf
    return Goodput(
        validation=after_validation,
        saves=between_saves / interval,
        restarts=_without_failures(
            interval, between_failures, operations.restart_seconds + storage
        ),
        save_seconds=save,
        hours_between_failures=between_failures / 3600,
        best_save_interval=(
            max(1, round(math.sqrt(2 * save * between_failures) / step)) if rate > 0 else None
        ),
    )


def _blocking(
    run: Run, storage: float, stored: float, between_saves: float, operations: Operations
) -> float:
    """Return the seconds for which the training waits at a save.

    With ``async_save``, it waits while a rank copies its part to host memory. If the previous save
    is still in progress, it waits for that, too.
    """
    if not run.config.training.async_save:
        return storage
    grid = run.grid
    writers = grid.world_size if run.zero_stage > 0 else grid.pp * grid.tp
    copy = stored / writers / (1e9 * operations.copy_bandwidth)
    return copy + max(0.0, storage - between_saves)


def _without_failures(interval: float, between_failures: float, restart: float) -> float:
    """Return the time between two saves without failures, as a fraction of that with failures.

    If failures come at random, an interval of I seconds takes (M + R) (exp(I / M) - 1) seconds with
    a mean time M between failures and R seconds to restart (Daly 2006, "A higher order estimate
    of the optimum checkpoint interval", section 2). For short intervals this is I (1 + R/M)
    (1 + I / 2M): on average, half an interval is lost.
    """
    if math.isinf(between_failures):
        return 1.0
    ratio = interval / between_failures
    if ratio > 500:  # the exponential is too large for a number
        return 0.0
    return interval / ((between_failures + restart) * math.expm1(ratio))

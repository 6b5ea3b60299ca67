"""Spikes: steps whose loss or gradient norm lies far above those of the steps before.

    losses, norms of the last steps -> mean, standard deviation -> deviations of the new step

A spike may be skipped (``training.skip_spikes``), as by the skip-step optimizers of OLMo-core. The
steps before include skipped ones, so a lasting change of the level is soon accepted: of equally
high steps in a row, at most about window / (1 + deviations^2) are spikes (4 with the defaults).

All ranks compute this from numbers that they exchanged for the step, so all decide the same.
"""

import math
from collections import deque
from collections.abc import Sequence

from megaspeed.config.run import SpikeConfig

Recent = tuple[tuple[float, float], ...]
"""The loss and the gradient norm of each of the last steps, the newest last."""


def deviations_of_spike(
    config: SpikeConfig, recent: Recent, loss: float, norm: float
) -> float | None:
    """Return how many standard deviations the loss or the norm lies above the mean of ``recent``.

    The larger of the two counts. Returns None if the step is no spike, if a number is not finite,
    or if less than half a window is known.
    """
    recent = recent[-config.window :]
    if len(recent) < max(2, config.window // 2) or not math.isfinite(loss + norm):
        return None
    columns = zip(zip(*recent, strict=True), (loss, norm), strict=True)
    highest = max(_deviations(earlier, value) for earlier, value in columns)
    return highest if highest > config.deviations else None


def is_refused(config: SpikeConfig | None, recent: Recent, loss: float, norm: float) -> bool:
    """Return whether the step is skipped because it is a spike; never if config is None."""
    return config is not None and deviations_of_spike(config, recent, loss, norm) is not None


def with_step(config: SpikeConfig, recent: Recent, loss: float, norm: float) -> Recent:
    """Return ``recent`` with one more step, unless one of its numbers is not finite."""
    if not math.isfinite(loss + norm):
        return recent
    return (*recent, (loss, norm))[-config.window :]


def _deviations(earlier: Sequence[float], value: float) -> float:
    mean, deviation = _mean_and_deviation(earlier)
    # If all earlier values are equal, even rounding would lie infinitely far above them.
    return (value - mean) / deviation if deviation > 0.0 else 0.0


def _mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) * (value - mean) for value in values)  # ** could overflow
    return mean, math.sqrt(squares / (len(values) - 1))


class Divergence:
    """Reports once that the loss has risen and does not fall again.

    It compares the mean loss of the last 128 steps with the lowest such mean since this start. With
    fewer steps or deviations, noise would look like a rise.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=SpikeConfig().window)
        self._lowest: tuple[float, float, int] | None = None  # mean, standard deviation, step
        self._is_reported = False

    def sentence_after(self, step: int, loss: float) -> str | None:
        """Add a step. Return what to report if the run diverges; None if not, or if reported."""
        if math.isfinite(loss):
            self._losses.append(loss)
        if len(self._losses) < (self._losses.maxlen or 0) or self._is_reported:
            return None
        mean, deviation = _mean_and_deviation(self._losses)
        if self._lowest is None or mean < self._lowest[0]:
            self._lowest = mean, deviation, step
        lowest, spread, best_step = self._lowest
        self._is_reported = mean > lowest + SpikeConfig().deviations * spread
        if not self._is_reported:
            return None
        return (
            f"the run diverges: the mean loss of the last {len(self._losses)} steps is {mean:.4f}, "
            f"but it was {lowest:.4f} up to step {best_step}. The likely cause is a learning rate "
            "that is too high: lower it, lengthen its warmup, or set gradient_clipping, and "
            f"continue from a checkpoint of step {best_step} or earlier (--resume DIR)"
        )

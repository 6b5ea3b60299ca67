"""fp16's dynamic loss scale, read and taken up again as DeepSpeed's scaler counts it."""

from typing import Any

Counters = dict[str, float]
"""scale, iteration, last_overflow_iteration and hysteresis of DeepSpeed's scaler."""


def read_loss_scale(scaler: Any) -> Counters | None:
    """The state of DeepSpeed's scaler; None where the scale is a constant."""
    if not scaler.dynamic:
        return None
    return {
        "scale": float(scaler.cur_scale),
        "iteration": scaler.cur_iter,
        "last_overflow_iteration": scaler.last_overflow_iter,
        "hysteresis": scaler.cur_hysteresis,
    }


def load_loss_scale(scaler: Any, saved: Counters) -> None:
    """Lets a dynamic scaler go on from a saved state; a constant one stays as it is."""
    if not scaler.dynamic:
        return
    scaler.cur_scale = saved["scale"]
    scaler.cur_iter = saved["iteration"]
    scaler.last_overflow_iter = saved["last_overflow_iteration"]
    scaler.cur_hysteresis = saved["hysteresis"]

"""DeepSpeed 0.19.8, runtime/fp16/loss_scaler.py:257: once the dynamic loss scale of fp16 is at its
minimum, the next overflow raises a bare exception, on whichever rank comes first.

The run's own count of skipped steps (``training.max_skipped_steps``) ends such a run, on all ranks
together and naming the parameter; the scaler stays at its minimum until then.
"""

from typing import Any


def stay_at_the_smallest_scale(optimizer: Any) -> None:
    """Keeps a dynamic loss scaler from raising; other scalers have nothing to raise."""
    if hasattr(optimizer.loss_scaler, "raise_error_at_min_scale"):
        optimizer.loss_scaler.raise_error_at_min_scale = False

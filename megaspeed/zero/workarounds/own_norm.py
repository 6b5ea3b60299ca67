"""DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py:2648-2701, 2943-2960 and
runtime/zero/stage3.py:2419-2486, 2573-2584: the gradient norm is all-reduced over the
model-parallel group once for each parameter group, which hangs where pipeline stages have different
numbers of groups; stage 3 ignores the mark of tied copies; and which parameters count is
all-or-nothing, where key/value heads on several ranks need a part of one counted.

Both optimizers ask one method for the norm and then skip the step themselves where it is invalid
(negative), in every dtype. That method is replaced. The separate overflow check
(stage_1_and_2.py:3237-3249) is switched off: it finds nothing that the norm does not show, and the
host would read the device once more.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

INVALID_NORM = -1.0
"""What DeepSpeed takes for "not finite": the step is skipped and the gradients are dropped."""


def use_norm(optimizer: Any, norm: Callable[[], float]) -> None:
    """Makes a ZeRO optimizer clip by, report, and skip on ``norm()``.

    Args:
        optimizer: DeepSpeed's ZeRO optimizer.
        norm: the norm, multiplied by the loss scale; if it is not finite, the step is skipped.
    """

    def in_host_memory() -> Tensor:
        # DeepSpeed reads this tensor on the host and multiplies gradients on any device by it. If
        # it were on a GPU, the host would wait to make it and again to read it.
        value = norm()
        return torch.tensor(value if math.isfinite(value) else INVALID_NORM, device="cpu")

    optimizer.check_overflow = lambda *args, **kwargs: None
    # stage_1_and_2.py:3044 skips on an invalid norm in bf16 only where this is true.
    optimizer.check_grad_overflow = True
    if hasattr(optimizer, "scaled_global_norm"):
        optimizer.scaled_global_norm = in_host_memory
    else:
        optimizer._get_norm_groups = lambda: [in_host_memory()]


def stay_at_the_smallest_scale(optimizer: Any) -> None:
    """Keeps a dynamic loss scaler from raising; other scalers have nothing to raise.

    runtime/fp16/loss_scaler.py:257: once the dynamic loss scale of fp16 is at its minimum, the next
    overflow raises a bare exception, on whichever rank comes first. The run's own count of skipped
    steps (``training.max_skipped_steps``) ends such a run on all ranks together, and names the
    parameter.
    """
    if hasattr(optimizer.loss_scaler, "raise_error_at_min_scale"):
        optimizer.loss_scaler.raise_error_at_min_scale = False

"""DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py:1253-1254 and 3256-3280: the bucket in which
gradients are laid end to end before they are reduced has the parameters' dtype at stage 2, even
where gradients accumulate in fp32: a sum of micro-batches is rounded to bf16 once before it is
averaged.

The bucket gets the accumulation dtype at both stages.
"""

from typing import Any

import torch


def reduce_in(optimizer: Any, dtype: torch.dtype) -> None:
    """Makes the reduction bucket of a stage-1 or -2 optimizer hold ``dtype``."""
    optimizer._gradient_reduction_buffer_dtype = lambda: dtype

"""How ZeRO-1 and 2 of DeepSpeed 0.19.8 add up gradients (runtime/zero/stage_1_and_2.py).

1253-1254 and 3256-3280: the bucket in which gradients are laid end to end before they are reduced
has the parameters' dtype at stage 2, even if gradients accumulate in fp32. A sum of micro-batches
is then rounded to bf16 once before it is averaged.

396-404 and 1236-1246: if ZeRO-1 adds up in another dtype than the parameters', the sum is parked
beside each parameter (``grad_accum``) while the next backward fills ``grad`` again. Here ``grad``
has the accumulation dtype itself, so two complete fp32 gradients would stand side by side: 8 bytes
a parameter instead of 4.

1259-1266 and 1040-1050: unless gradients accumulate in another dtype than the parameters', stage 2
keeps between micro-batches the complete gradient of every parameter that touches its partition.
With one large embedding that is nearly the complete gradient on every rank. The other path
("compact" partition buffer) keeps exactly 1/dp in one flat tensor. It is right for equal dtypes
too. The flat tensor is also what norm, tied-weight reduction and inspection read.
"""

from typing import Any

import torch


def reduce_in(optimizer: Any, dtype: torch.dtype) -> None:
    """Makes the reduction bucket of a stage-1 or -2 optimizer hold ``dtype``."""
    optimizer._gradient_reduction_buffer_dtype = lambda: dtype


def add_up_in_place(optimizer: Any) -> None:
    """Makes a stage-1 or -2 optimizer reduce ``parameter.grad``, to which autograd adds."""
    optimizer.use_grad_accum_attribute = False


def keep_only_own_partition(optimizer: Any) -> None:
    """Makes a stage-1 or -2 optimizer accumulate into its flat gradient partition alone."""
    optimizer._use_compact_grad_partition_buffer = lambda group_index: True

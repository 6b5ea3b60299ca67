"""DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py:396-404 and 1236-1246: where ZeRO-1 adds up in
another dtype than the parameters', the sum is parked beside each parameter (``grad_accum``) while
the next backward fills ``grad`` again. Here ``grad`` has the accumulation dtype itself, so that two
whole fp32 gradients would stand side by side: 8 bytes a parameter where 4 do.

The sum stays in ``grad``, where autograd adds to it.
"""

from typing import Any


def add_up_in_place(optimizer: Any) -> None:
    """Makes a stage-1 or -2 optimizer reduce ``parameter.grad``."""
    optimizer.use_grad_accum_attribute = False

"""DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py:1259-1266 and 1040-1050: unless gradients
accumulate in another dtype than the parameters', stage 2 keeps between micro-batches the whole
gradient of every parameter that touches its partition, not the partition: with one large embedding
that is nearly the whole gradient on every rank.

The other path ("compact" partition buffer) keeps exactly 1/dp in one flat tensor. It is right for
equal dtypes too, and is switched on for all; the flat tensor is also what norm, tied-weight
reduction and inspection read.
"""

from typing import Any


def keep_only_own_partition(optimizer: Any) -> None:
    """Makes a stage-1 or -2 optimizer accumulate into its flat gradient partition alone."""
    optimizer._use_compact_grad_partition_buffer = lambda group_index: True

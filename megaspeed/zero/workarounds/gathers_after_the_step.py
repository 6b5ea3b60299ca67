"""DeepSpeed 0.19.8, runtime/zero/stage3.py:2858 and partitioned_param_coordinator.py:606: ZeRO-3's
optimizer step writes the parameters' partitions on the current stream. The next forward gathers
them on another stream, which does not wait for the writes. If there are persistent parameters,
DeepSpeed gathers them after the step and then synchronises the device
(partition_parameters.py:2128), which happens to order the two streams. Without persistent
parameters, a forward can gather weights that are still being written.

Here the stream of the gathers waits for the current stream after each write.
"""

from typing import Any

from deepspeed.accelerator import get_accelerator

from megaspeed.zero.fragments import partitions_parameters


def let_gathers_wait(optimizer: Any) -> None:
    """Makes later gathers of a ZeRO-3 optimizer wait for what the current stream has been given."""
    accelerator = get_accelerator()
    if partitions_parameters(optimizer) and not accelerator.resolves_data_dependency():
        gathers = optimizer.parameter_offload._DeepSpeedZeRoOffload__allgather_stream
        gathers.wait_stream(accelerator.current_stream())

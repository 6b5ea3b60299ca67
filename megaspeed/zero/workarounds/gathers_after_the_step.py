"""DeepSpeed 0.19.8, runtime/zero/stage3.py:2858 and partitioned_param_coordinator.py:606: ZeRO-3's
optimizer step writes the parameters' partitions on the current stream. The next forward gathers
them on another stream, which does not wait for the writes. They are in order by accident only: the
device is synchronised after persistent parameters are gathered (partition_parameters.py:2128), if
there are any. Otherwise a forward can gather weights that are still being written.

The stream of the gathers waits for the current one after each write.
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

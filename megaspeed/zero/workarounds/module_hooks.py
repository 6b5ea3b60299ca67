"""DeepSpeed 0.19.8, runtime/zero/parameter_offload.py:337-528: ZeRO-3 hooks every module, to gather
its parameters before its forward and its backward and to free them afterwards.

With several micro-batches in flight these hooks do the wrong thing. The counters that decide when a
backward has left a module belong to the last forward (parameter_offload.py:438), so the other
micro-batches' backwards free nothing. The order of modules never matches the one recorded
(partitioned_param_coordinator.py:202), so nothing is fetched ahead; and before each forward that
has no record, all ranks of the world compare their modules (partitioned_param_coordinator.py:260),
which never ends if they belong to different pipeline stages.

All these hooks are removed. ``layer_gathers`` gathers and frees parameters instead.
"""

from typing import Any


def remove_module_hooks(optimizer: Any) -> None:
    """Removes the hooks with which ZeRO-3 gathers parameters.

    It also empties DeepSpeed's list of the parameters that it gathers one by one after each step.
    """
    optimizer.parameter_offload._remove_module_hooks()
    optimizer.persistent_parameters = []

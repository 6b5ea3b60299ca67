"""DeepSpeed 0.19.8 reduces gradients in the middle of a backward pass (runtime/zero/
stage_1_and_2.py:2205 and stage3.py:1648), and does not report how long this takes. Here each call
of these two methods counts for the data axis, including the calls from DeepSpeed's hooks.
"""

from typing import Any

from megaspeed.topology.timeline import Timeline

_METHODS = ("reduce_ipg_grads", "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads")


def time_reductions(optimizer: Any, timeline: Timeline) -> None:
    """Make the reductions of a ZeRO optimizer count as communication over the data axis."""
    for name in _METHODS:
        reduce = getattr(optimizer, name, None)
        if reduce is not None:
            setattr(optimizer, name, _timed(reduce, timeline))


def _timed(reduce: Any, timeline: Timeline) -> Any:
    def timed(*arguments: Any, **options: Any) -> Any:
        with timeline.part("data"):
            return reduce(*arguments, **options)

    return timed

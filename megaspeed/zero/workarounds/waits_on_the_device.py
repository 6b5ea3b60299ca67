"""DeepSpeed 0.19.8 makes the host wait for the device where one stream could wait for another:

    runtime/zero/stage3.py:1414                     after every backward
    runtime/zero/stage_1_and_2.py:1028              after every backward, with overlap_comm
    runtime/zero/stage_1_and_2.py:2413              at every slice of a bucket, with overlap_comm
    runtime/engine.py:3307                          before every reduction, with overlap_comm

While the host waits, it launches nothing, so the device is idle afterwards. Here the current stream
waits for the reduction stream instead, and the host continues.

No memory is reused too early. Gradients are reduced in buckets that stay allocated; with
``overlap_comm`` the configuration requires such buckets. A gradient larger than a bucket is reduced
in place, so this file calls ``record_stream`` on it.

Waits for single events stay (stage3.py:1667): they limit how many gradients the host launches ahead
of their reduction. With offload all waits stay: the optimizer step runs on the
host and reads gradients that the device copies there.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.accelerator import get_accelerator
from torch import Tensor

from megaspeed.zero.fragments import partitions_parameters

_WAITING = ("average_tensor", "independent_gradient_partition_epilogue")


def wait_on_the_device(optimizer: Any) -> None:
    """Turns the waits of a ZeRO optimizer's training step into waits of the current stream."""
    accelerator = get_accelerator()
    if accelerator.resolves_data_dependency():
        return  # a CPU, where every call has done its work when it returns
    stage3 = partitions_parameters(optimizer)
    if optimizer.offload_optimizer if stage3 else optimizer.cpu_offload:
        return
    stream = optimizer.reduce_and_partition_stream if stage3 else optimizer.reduction_stream

    def join(*_: Any) -> None:
        accelerator.current_stream().wait_stream(stream)

    stream.synchronize = join
    for name in _WAITING:
        method = getattr(optimizer, name, None)
        if method is not None:
            setattr(optimizer, name, _joining(method, join))
    if not stage3 and optimizer.overlap_comm:
        _keep_until_reduced(optimizer, stream)


def _keep_until_reduced(optimizer: Any, stream: Any) -> None:
    average = optimizer.average_tensor

    def average_and_keep(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        average(tensor, *args, **kwargs)
        tensor.record_stream(stream)

    optimizer.average_tensor = average_and_keep


def _joining(method: Callable[..., Any], join: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _synchronize_replaced(join):
            return method(*args, **kwargs)

    return call


@contextmanager
def _synchronize_replaced(join: Callable[..., None]) -> Iterator[None]:
    accelerator = get_accelerator()
    before = accelerator.synchronize  # the epilogue calls average_tensor: this block is nested
    accelerator.synchronize = join
    try:
        yield
    finally:
        accelerator.synchronize = before

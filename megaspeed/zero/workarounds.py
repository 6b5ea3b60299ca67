"""Work-arounds for DeepSpeed 0.19.8, each with the line that it changes and the reason.

Each has a test that fails if the work-around is omitted, or if DeepSpeed no longer needs it.
"""

import functools
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed.ops
import deepspeed.utils.numa
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine
from torch import Tensor

from megaspeed.topology.activity import Timeline
from megaspeed.zero.fragments import partitions_parameters

# What DeepSpeed 0.19.8 does when it starts.
#
# comm/torch.py:47-53 and ops/__init__.py:16-33: starting the communication backend builds a C++
# extension (``deepspeed_shm_comm``, about half a minute with a compiler, an error without one) that
# only inference uses.
#
# comm/torch.py:47-200: collectives are called by names that torch 2.13 announces to rename. Each
# rank warns of it.
#
# accelerator/cpu_accelerator.py:70-79 and utils/numa.py:27: on a CPU every call that counts devices
# starts a ``numactl`` process, about ten times for each optimizer step and rank. It tries to do so
# even if ``numactl`` is not installed.


def declare_no_compiled_ops() -> None:
    """Declares that no operator can be compiled here, so that DeepSpeed never tries.

    The registry of compatible operators is filled on first use. An empty one means that there is
    nothing to build.
    """
    deepspeed.ops.__compatible_ops__ = {}


def hide_announced_renames() -> None:
    """Hides torch's FutureWarnings about its collectives; other warnings still come through."""
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.distributed.*")


def count_numa_nodes_once() -> None:
    """Caches the result of ``numactl``, because nodes do not change while a process runs."""
    if not hasattr(deepspeed.utils.numa.get_numa_cores, "cache_info"):
        deepspeed.utils.numa.get_numa_cores = functools.cache(deepspeed.utils.numa.get_numa_cores)


# DeepSpeed 0.19.8, runtime/zero/partition_parameters.py:1138, takes the device of partitioned
# parameters from LOCAL_RANK, which torchrun and deepspeed set, and other launchers do not.


def name_the_local_rank(device: torch.device, local_rank: int) -> None:
    """Sets LOCAL_RANK: on a GPU to its index, which differs from the launcher's where each process
    sees one GPU only. engine.py:1962 demands the same of Open MPI's variable where there is one.
    """
    number = str(local_rank if device.index is None else device.index)
    os.environ["LOCAL_RANK"] = number
    if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ:
        os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = number


# DeepSpeed 0.19.8, runtime/engine.py:2304-2310: bf16 parameters with fp32 gradient accumulation at
# ZeRO-1 select ``BF16_Optimizer``, whose gradients live elsewhere, which has no
# ``coalesce_grad_reduction``, and whose norm masks other parameters than the other stages' do.
#
# ``DeepSpeedZeroOptimizer`` does the same job (it is chosen when the optimizer is offloaded), so
# the choice is overruled and stages 1 and 2 are one code path.


@contextmanager
def always_the_zero_optimizer() -> Iterator[None]:
    """An engine built within this block takes ``DeepSpeedZeroOptimizer`` for stages 1 and 2."""
    original = DeepSpeedEngine._do_optimizer_sanity_check

    def choose(engine: DeepSpeedEngine, basic_optimizer: Any) -> Any:
        original(engine, basic_optimizer)
        return ZERO_OPTIMIZATION

    DeepSpeedEngine._do_optimizer_sanity_check = choose
    try:
        yield
    finally:
        DeepSpeedEngine._do_optimizer_sanity_check = original


# DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py:2648-2701, 2943-2960 and
# runtime/zero/stage3.py:2419-2486, 2573-2584: the gradient norm is all-reduced over the
# model-parallel group once for each parameter group, which hangs where pipeline stages have
# different numbers of groups; stage 3 ignores the mark of tied copies; and which parameters count
# is all-or-nothing, where key/value heads on several ranks need a part of one counted.
#
# Both optimizers ask one method for the norm and then skip the step themselves where it is invalid
# (negative), in every dtype. That method is replaced. The separate overflow check
# (stage_1_and_2.py:3237-3249) is switched off: it finds nothing that the norm does not show, and
# the host would read the device once more.

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


# How ZeRO-1 and 2 of DeepSpeed 0.19.8 add up gradients (runtime/zero/stage_1_and_2.py).
#
# 1253-1254 and 3256-3280: the bucket in which gradients are laid end to end before they are reduced
# has the parameters' dtype at stage 2, even if gradients accumulate in fp32. A sum of micro-batches
# is then rounded to bf16 once before it is averaged.
#
# 396-404 and 1236-1246: if ZeRO-1 adds up in another dtype than the parameters', the sum is parked
# beside each parameter (``grad_accum``) while the next backward fills ``grad`` again. Here ``grad``
# has the accumulation dtype itself, so two complete fp32 gradients would stand side by side: 8
# bytes a parameter instead of 4.
#
# 1259-1266 and 1040-1050: unless gradients accumulate in another dtype than the parameters', stage
# 2 keeps between micro-batches the complete gradient of every parameter that touches its partition.
# With one large embedding that is nearly the complete gradient on every rank. The other path
# ("compact" partition buffer) keeps exactly 1/dp in one flat tensor. It is right for equal dtypes
# too. The flat tensor is also what norm, tied-weight reduction and inspection read.


def reduce_in(optimizer: Any, dtype: torch.dtype) -> None:
    """Makes the reduction bucket of a stage-1 or -2 optimizer hold ``dtype``."""
    optimizer._gradient_reduction_buffer_dtype = lambda: dtype


def add_up_in_place(optimizer: Any) -> None:
    """Makes a stage-1 or -2 optimizer reduce ``parameter.grad``, to which autograd adds."""
    optimizer.use_grad_accum_attribute = False


def keep_only_own_partition(optimizer: Any) -> None:
    """Makes a stage-1 or -2 optimizer accumulate into its flat gradient partition alone."""
    optimizer._use_compact_grad_partition_buffer = lambda group_index: True


# DeepSpeed 0.19.8 reduces gradients in the middle of a backward pass (runtime/zero/
# stage_1_and_2.py:2205 and stage3.py:1648), and does not report how long this takes. Here each call
# of these two methods counts for the data axis, including the calls from DeepSpeed's hooks.

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


# DeepSpeed 0.19.8, runtime/zero/parameter_offload.py:337-528: ZeRO-3 hooks every module, to gather
# its parameters before its forward and its backward and to free them afterwards.
#
# With several micro-batches in flight these hooks do the wrong thing. The counters that decide when
# a backward has left a module belong to the last forward (parameter_offload.py:438), so the other
# micro-batches' backwards free nothing. The order of modules never matches the one recorded
# (partitioned_param_coordinator.py:202), so nothing is fetched ahead; and before each forward that
# has no record, all ranks of the world compare their modules
# (partitioned_param_coordinator.py:260), which never ends if they belong to different pipeline
# stages.
#
# All these hooks are removed. ``layer_gathers`` gathers and frees parameters instead.


def remove_module_hooks(optimizer: Any) -> None:
    """Removes the hooks with which ZeRO-3 gathers parameters.

    It also empties DeepSpeed's list of the parameters that it gathers one by one after each step.
    """
    optimizer.parameter_offload._remove_module_hooks()
    optimizer.persistent_parameters = []


# DeepSpeed 0.19.8 makes the host wait for the device where one stream could wait for another:
#
#     runtime/zero/stage3.py:1414                     after every backward
#     runtime/zero/stage_1_and_2.py:1028              after every backward, with overlap_comm
#     runtime/zero/stage_1_and_2.py:2413              at every slice of a bucket, with overlap_comm
#     runtime/engine.py:3307                          before every reduction, with overlap_comm
#
# While the host waits, it launches nothing, so the device is idle afterwards. Here the current
# stream waits for the reduction stream instead, and the host continues.
#
# No memory is reused too early. Gradients are reduced in buckets that stay allocated; with
# ``overlap_comm`` the configuration requires such buckets. A gradient larger than a bucket is
# reduced in place, so this file calls ``record_stream`` on it.
#
# Waits for single events stay (stage3.py:1667): they limit how many gradients the host launches
# ahead of their reduction. With offload all waits stay: the optimizer step runs on the host and
# reads gradients that the device copies there.

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

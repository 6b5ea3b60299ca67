"""Work-arounds for DeepSpeed 0.19.8. Each docstring states DeepSpeed's lines and the reason.

Each has a test that fails if the work-around is omitted, or if DeepSpeed no longer needs it.
"""

import functools
import importlib
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
from deepspeed.runtime import compiler
from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine
from torch import Tensor

from megaspeed.topology.activity import Timeline
from megaspeed.zero.model_states import partitions_parameters


def declare_no_compiled_ops() -> None:
    """Declare that no operator can be compiled here, so that DeepSpeed never tries.

    comm/torch.py:47-53 and ops/__init__.py:16-33: starting the communication backend builds a C++
    extension (``deepspeed_shm_comm``, about half a minute with a compiler, an error without one)
    that only inference uses. The registry of compatible operators is filled on first use; if it is
    empty, nothing is built.
    """
    deepspeed.ops.__compatible_ops__ = {}


def hide_announced_renames() -> None:
    """Hide torch's FutureWarnings about collectives, but no other warnings.

    comm/torch.py:47-200: collectives are called by names that torch 2.13 deprecates. Each rank
    would print a warning.
    """
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.distributed.*")


def count_numa_nodes_once() -> None:
    """Cache the result of ``numactl``, because nodes do not change while a process runs.

    accelerator/cpu_accelerator.py:70-79 and utils/numa.py:27: on a CPU every call that counts
    devices starts a ``numactl`` process, even if ``numactl`` is not installed: about ten times for
    each optimizer step and rank.
    """
    if not hasattr(deepspeed.utils.numa.get_numa_cores, "cache_info"):
        deepspeed.utils.numa.get_numa_cores = functools.cache(deepspeed.utils.numa.get_numa_cores)


def import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon optimizer, which no run uses, without importing torch's compiler.

    runtime/zero/utils.py:72 and runtime/zero/stage3.py:355: every ZeRO optimizer imports Muon, and
    runtime/zero/muon/original_muon.py:50, 81, 189 decorate functions with ``torch.compile``. This
    imports Inductor: more than a second for each rank, and thousands of files on a shared disk.
    """
    original = compiler.compile
    compiler.compile = lambda *_arguments, **_options: lambda function: function
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = original


def name_the_local_rank(device: torch.device, local_rank: int) -> None:
    """Set LOCAL_RANK: on a GPU to its index, which is 0 if each process sees only one GPU.

    runtime/zero/partition_parameters.py:1138 takes the device of partitioned parameters from this
    variable, which only torchrun and deepspeed set. runtime/engine.py:1962 requires that Open MPI's
    variable is equal to it.
    """
    number = str(local_rank if device.index is None else device.index)
    os.environ["LOCAL_RANK"] = number
    if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ:
        os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = number


@contextmanager
def always_the_zero_optimizer() -> Iterator[None]:
    """An engine built within this block uses ``DeepSpeedZeroOptimizer`` for stages 1 and 2.

    runtime/engine.py:2304-2310: bf16 parameters with fp32 gradient accumulation at ZeRO-1 select
    ``BF16_Optimizer``. It keeps gradients elsewhere, has no ``coalesce_grad_reduction``, and its
    norm masks other parameters than at the other stages. ``DeepSpeedZeroOptimizer`` can do the same
    (it is used if the optimizer is offloaded), so stages 1 and 2 are one code path.

    runtime/engine.py:2298-2304: DeepSpeed would also warn that a subclass of torch's AdamW, which
    it does not know by name, is untested.
    """
    original = DeepSpeedEngine._do_optimizer_sanity_check
    DeepSpeedEngine._do_optimizer_sanity_check = lambda engine, optimizer: ZERO_OPTIMIZATION
    try:
        yield
    finally:
        DeepSpeedEngine._do_optimizer_sanity_check = original


INVALID_NORM = -1.0
"""DeepSpeed's norm for gradients that are not finite: the step is skipped."""


def use_norm(optimizer: Any, norm: Callable[[], float]) -> None:
    """Make a ZeRO optimizer clip by ``norm()``, report it, and skip the step if it is not finite.

    runtime/zero/stage_1_and_2.py:2648-2701, 2943-2960 and runtime/zero/stage3.py:2419-2486,
    2573-2584: DeepSpeed all-reduces its own norm over the model-parallel group once for each
    parameter group. This hangs if pipeline stages have different numbers of groups. Stage 3 counts
    tied copies twice. DeepSpeed counts a parameter completely or not at all, but if several ranks
    hold the same key/value heads, only a part of the parameter must be counted.

    Both optimizers call one method for the norm, and skip the step if it is negative, in every
    dtype. This method is replaced. The separate overflow check (stage_1_and_2.py:3237-3249) is
    switched off: it finds nothing that the norm does not show, and reads from the device again.

    Args:
        optimizer: DeepSpeed's ZeRO optimizer.
        norm: returns the norm, multiplied by the loss scale.
    """

    def in_host_memory() -> Tensor:
        # DeepSpeed reads this tensor on the host, and multiplies gradients on any device by it. If
        # it were on a GPU, the host would wait twice: to make it, and to read it.
        value = norm()
        return torch.tensor(value if math.isfinite(value) else INVALID_NORM, device="cpu")

    optimizer.check_overflow = lambda *args, **kwargs: None
    # stage_1_and_2.py:3044 skips the step in bf16 only if this is true.
    optimizer.check_grad_overflow = True
    if hasattr(optimizer, "scaled_global_norm"):
        optimizer.scaled_global_norm = in_host_memory
    else:
        optimizer._get_norm_groups = lambda: [in_host_memory()]


def stay_at_the_smallest_scale(optimizer: Any) -> None:
    """Prevent a dynamic loss scaler from raising an exception.

    runtime/fp16/loss_scaler.py:257: if the dynamic loss scale of fp16 is at its minimum, the next
    overflow raises an exception without details, on the first rank that gets there. Instead,
    ``training.max_skipped_steps`` ends such a run on all ranks together, and names the parameter.
    """
    if hasattr(optimizer.loss_scaler, "raise_error_at_min_scale"):
        optimizer.loss_scaler.raise_error_at_min_scale = False


def reduce_in(optimizer: Any, dtype: torch.dtype) -> None:
    """Make the reduction bucket of a stage-1 or -2 optimizer have ``dtype``.

    runtime/zero/stage_1_and_2.py:1253-1254, 3256-3280: at stage 2 the bucket has the dtype of the
    parameters, even if gradients accumulate in fp32. A sum of micro-batches would be rounded to
    bf16 before it is averaged.
    """
    optimizer._gradient_reduction_buffer_dtype = lambda: dtype


def add_up_in_place(optimizer: Any) -> None:
    """Make a stage-1 or -2 optimizer reduce ``parameter.grad``, to which autograd adds.

    runtime/zero/stage_1_and_2.py:396-404, 1236-1246: if ZeRO-1 accumulates in another dtype than
    that of the parameters, it moves the sum to ``grad_accum`` of each parameter, and the next
    backward fills ``grad`` again. Here ``grad`` itself has the accumulation dtype, so there would
    be two complete fp32 gradients: 8 bytes a parameter instead of 4.
    """
    optimizer.use_grad_accum_attribute = False


def keep_only_own_partition(optimizer: Any) -> None:
    """Make a stage-1 or -2 optimizer accumulate only into its flat gradient partition.

    runtime/zero/stage_1_and_2.py:1259-1266, 1040-1050: if gradients accumulate in the dtype of the
    parameters, stage 2 keeps between micro-batches the complete gradient of every parameter that
    overlaps its partition. With one large embedding, this is nearly the complete gradient on every
    rank. The other path ("compact" partition buffer) keeps exactly 1/dp in one flat tensor, and is
    correct for equal dtypes, too. Norm and tied weights are computed from this flat tensor.
    """
    optimizer._use_compact_grad_partition_buffer = lambda group_index: True


def time_reductions(optimizer: Any, timeline: Timeline) -> None:
    """Make the reductions of a ZeRO optimizer count as communication over the data axis.

    runtime/zero/stage_1_and_2.py:2205, stage3.py:1648: DeepSpeed's hooks reduce gradients during a
    backward, and do not report how long this takes.
    """
    stage3 = "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads"
    for name in ("reduce_ipg_grads", stage3):
        reduce = getattr(optimizer, name, None)
        if reduce is not None:
            setattr(optimizer, name, _timed(reduce, timeline))


def _timed(reduce: Any, timeline: Timeline) -> Any:
    def timed(*arguments: Any, **options: Any) -> Any:
        with timeline.part("data"):
            return reduce(*arguments, **options)

    return timed


def remove_module_hooks(optimizer: Any) -> None:
    """Remove ZeRO-3's hooks that gather and free parameters; ``layer_gathers`` replaces them.

    runtime/zero/parameter_offload.py:337-528: every module has hooks, which are wrong with several
    micro-batches in flight. The counters that decide when a backward has left a module belong to
    the last forward (parameter_offload.py:438), so the backwards of other micro-batches free
    nothing. The order of modules never matches the recorded one
    (partitioned_param_coordinator.py:202), so nothing is gathered ahead. Before each forward
    without a record, all ranks of the world compare their modules
    (partitioned_param_coordinator.py:260), which hangs if they are in different pipeline stages.

    DeepSpeed's list of persistent parameters, which it gathers one by one after each step, becomes
    empty, too.
    """
    optimizer.parameter_offload._remove_module_hooks()
    optimizer.persistent_parameters = []


def wait_on_the_device(optimizer: Any) -> None:
    """Make the current stream wait for the reduction stream instead of the host.

    In these places DeepSpeed makes the host wait for the device. Meanwhile it launches nothing, so
    the device is idle afterwards:

        runtime/zero/stage3.py:1414               after every backward
        runtime/zero/stage_1_and_2.py:1028        after every backward, with overlap_comm
        runtime/zero/stage_1_and_2.py:2413        at every slice of a bucket, with overlap_comm
        runtime/engine.py:3307                    before every reduction, with overlap_comm

    No memory is reused too early. Gradients are reduced in buckets that stay allocated; with
    ``overlap_comm`` the configuration requires such buckets. A gradient larger than a bucket is
    reduced in place, so ``record_stream`` is called on it.

    Waits for single events remain (stage3.py:1667): they limit how many gradients the host launches
    ahead of their reduction. With offload all waits remain, because the optimizer step runs on the
    host and reads gradients that the device copies there.
    """
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
    for name in ("average_tensor", "independent_gradient_partition_epilogue"):
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

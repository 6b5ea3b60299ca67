"""Work-arounds for DeepSpeed 0.19.8. Each docstring states DeepSpeed's lines and the reason.

Each has a test that fails if the work-around is omitted, or if DeepSpeed no longer needs it.
"""

import importlib
import logging
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.runtime import compiler
from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import logger
from torch import nn

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


def hide_skipped_steps() -> None:
    """Hide DeepSpeed's lines about skipped steps: the console has a line for each of them.

    runtime/fp16/loss_scaler.py:153, 263-273: rank 0 would also log "[deepspeed] OVERFLOW! Skipping
    step", in every number type, even if it is the loss that is not finite.
    """
    logger.addFilter(_is_no_skipped_step)


def _is_no_skipped_step(record: logging.LogRecord) -> bool:
    return "OVERFLOW! " not in str(record.msg)


def import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon, which no run uses, without importing torch's compiler.

    A run with the optimizer Muon uses ``zero/muon.py``. DeepSpeed would run its own code for
    parameters with ``use_muon``. Only deepspeed/__init__.py:357-372 sets it, if the JSON names
    Muon, and ``build.deepspeed_json`` passes no optimizer.

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
    ``BF16_Optimizer``. It takes gradients from elsewhere, and its norm masks other parameters than
    at the other stages. ``DeepSpeedZeroOptimizer`` can do the same (it is used if the optimizer is
    offloaded), so stages 1 and 2 are one code path.

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


def use_norm(optimizer: Any, norm: float) -> None:
    """Make the next step of a ZeRO optimizer clip by ``norm``, and skip it if this is not finite.

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
        norm: of the gradients, which are multiplied by the loss scale.
    """
    # DeepSpeed reads this tensor on the host, and multiplies gradients on any device by it. If it
    # were on a GPU, the host would wait twice: to make it, and to read it.
    in_host_memory = torch.tensor(norm if math.isfinite(norm) else INVALID_NORM, device="cpu")
    optimizer.check_overflow = lambda *args, **kwargs: None
    # stage_1_and_2.py:3044 skips the step in bf16 only if this is true.
    optimizer.check_grad_overflow = True
    if hasattr(optimizer, "scaled_global_norm"):
        optimizer.scaled_global_norm = lambda: in_host_memory
    else:
        optimizer._get_norm_groups = lambda: [in_host_memory]


def stay_at_the_smallest_scale(optimizer: Any) -> None:
    """Prevent a dynamic loss scaler from raising an exception.

    runtime/fp16/loss_scaler.py:257: if the dynamic loss scale of fp16 is at its minimum, the next
    overflow raises an exception without details, on the first rank that gets there. Instead,
    ``training.max_skipped_steps`` ends such a run on all ranks together, and names the parameter.
    """
    if hasattr(optimizer.loss_scaler, "raise_error_at_min_scale"):
        optimizer.loss_scaler.raise_error_at_min_scale = False


@contextmanager
def without_gradient_hooks() -> Iterator[None]:
    """A ZeRO optimizer built within this block has no hooks on gradients; see ``gradients``.

    runtime/zero/stage_1_and_2.py:1354 and runtime/zero/stage3.py:1487: DeepSpeed's hooks copy each
    gradient to a bucket and reduce it. At ZeRO-3 it also gathers every parameter, one by one, to
    register its hook. The hooks cannot be removed afterwards without this cost.
    """
    classes = (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)
    names = ("create_gradient_handling_hooks", "create_reduce_and_remove_grad_hooks")
    originals = [getattr(kind, name) for kind, name in zip(classes, names, strict=True)]
    for kind, name in zip(classes, names, strict=True):
        setattr(kind, name, lambda optimizer: None)
    try:
        yield
    finally:
        for kind, name, original in zip(classes, names, originals, strict=True):
            setattr(kind, name, original)


@contextmanager
def without_broadcast() -> Iterator[None]:
    """An engine built within this block does not replace its parameters by those of another rank.

    runtime/engine.py:2038-2066: DeepSpeed sends the parameters of the first rank of the shards to
    the others. Those that hold other experts would lose them. Initial values are functions of names
    and shapes, so copies are equal without this.
    """
    original = DeepSpeedEngine._broadcast_model
    DeepSpeedEngine._broadcast_model = lambda engine: None
    try:
        yield
    finally:
        DeepSpeedEngine._broadcast_model = original


@contextmanager
def partitions_of_groups_over(groups: Sequence[Any]) -> Iterator[None]:
    """A stage-1 or -2 optimizer built within this block partitions each parameter group over the
    process group of ``groups`` at the same index.

    runtime/zero/stage_1_and_2.py:293-306: DeepSpeed partitions all parameter groups over the same
    ranks, unless the model has DeepSpeed's own layers of experts. These need its own process
    groups, and a buffer of contiguous gradients, which ``gradients`` replaces. The lists are read
    after the constructor has called this method (line 336).
    """
    original = DeepSpeedZeroOptimizer._configure_master_weights

    def configured(optimizer: Any, *arguments: Any, **options: Any) -> Any:
        optimizer.real_dp_process_group = list(groups)
        optimizer.partition_count = [dist.get_world_size(group) for group in groups]
        return original(optimizer, *arguments, **options)

    DeepSpeedZeroOptimizer._configure_master_weights = configured
    try:
        yield
    finally:
        DeepSpeedZeroOptimizer._configure_master_weights = original


def partition_over(parameter: nn.Parameter, group: Any) -> None:
    """Make ``zero.Init`` partition a parameter over the ranks of ``group``.

    runtime/zero/partition_parameters.py:1302: the only way is an attribute of the parameter, which
    DeepSpeed sets on the parameters of its own layers of experts (runtime/engine.py:929).
    """
    parameter.ds_zero_partition_process_group = group  # type: ignore[attr-defined]


def drop_gradient_partitions(optimizer: Any) -> None:
    """Free the flat gradient partition that ZeRO-3 has allocated; ``gradients`` has its own.

    runtime/zero/stage3.py:791-801: DeepSpeed's is in host memory if the optimizer is offloaded, in
    addition to the gradients of the master weights.
    """
    if partitions_parameters(optimizer):
        optimizer.grad_partitions_flat_buffer = None
        optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition = {}


def keep_parameter_views(optimizer: Any) -> None:
    """Prevent a stage-1 or -2 optimizer from making each parameter a view again in every step.

    runtime/zero/stage_1_and_2.py:889-900, 3166-3168: after the gather, DeepSpeed visits every
    parameter. The flat tensor of which they are views is always the same.
    """
    if not partitions_parameters(optimizer):
        optimizer._update_model_bit16_weights = lambda group_index: None


@contextmanager
def without_gathers() -> Iterator[None]:
    """A step of a stage-1 or -2 optimizer within this block gathers no parameters.

    runtime/zero/stage_1_and_2.py:3155: DeepSpeed gathers all buckets at the end of its step, one
    after the other, and waits. ``step_gathers`` gathers them beside the next forward. Outside of
    the block, DeepSpeed still gathers them when a checkpoint was loaded (line 3178).
    """
    original = stage_1_and_2.all_gather_dp_groups
    stage_1_and_2.all_gather_dp_groups = lambda **_buckets: None
    try:
        yield
    finally:
        stage_1_and_2.all_gather_dp_groups = original


def remove_module_hooks(engine: Any) -> None:
    """Remove DeepSpeed's hooks on modules. ``layer_gathers`` replaces those of ZeRO-3.

    runtime/engine.py:2916-2928: before and after each forward, DeepSpeed visits every module.

    runtime/zero/parameter_offload.py:337-528: at ZeRO-3, every module has hooks that gather and
    free its parameters. They are wrong with several micro-batches in flight. The counters that
    decide when a backward has left a module belong to the last forward (parameter_offload.py:438),
    so the backwards of other micro-batches free nothing. The order of modules never matches the
    recorded one (partitioned_param_coordinator.py:202), so nothing is gathered ahead. Before each
    forward without a record, all ranks of the world compare their modules
    (partitioned_param_coordinator.py:260), which hangs if they are in different pipeline stages.

    DeepSpeed's list of persistent parameters, which it gathers one by one after each step, becomes
    empty, too.
    """
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    if partitions_parameters(engine.optimizer):
        engine.optimizer.parameter_offload._remove_module_hooks()
        engine.optimizer.persistent_parameters = []

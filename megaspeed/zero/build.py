"""Builds the engine of one rank: initial weights, optimizer, DeepSpeed's engine.

model on the meta device
  -> materialize                    layer by layer; ZeRO-3 partitions each before the next is made
  -> AdamW, and Muon, over groups   one for each bucket of the plan; passed to deepspeed.initialize
"""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaspeed.config.resolve import Run
from megaspeed.data_axis.axis import DataAxis, data_axis_of
from megaspeed.data_axis.steps import check_data_axis
from megaspeed.model.experts import Experts
from megaspeed.model.gpt import DTYPES, GPT, ExpertBlock
from megaspeed.model.parameters import parameter_named
from megaspeed.pipeline.schedules import pipeline_of
from megaspeed.tensor_parallel.loss import VocabParallelLoss
from megaspeed.tensor_parallel.parallelize import materialize, shared_initial_shard
from megaspeed.tensor_parallel.shards import ParameterShard
from megaspeed.topology.context import ParallelContext
from megaspeed.zero.engine import ZeroEngine
from megaspeed.zero.workarounds import (
    always_the_zero_optimizer,
    declare_no_compiled_ops,
    hide_announced_renames,
    hide_skipped_steps,
    import_muon_uncompiled,
    name_the_local_rank,
    partition_over,
    partitions_of_groups_over,
    without_broadcast,
    without_gradient_hooks,
)


def deepspeed_json(run: Run) -> dict[str, Any]:
    """DeepSpeed's configuration for one rank of ``run``. These keys differ from the run's JSON:

    zero_optimization.stage 0    1, over one shard: nothing is partitioned, and all stages and
                                 dtypes use the same code.
    gradient_accumulation_steps  1: the schedule counts micro-batches, and the loss is scaled
                                 before backward.
    contiguous_gradients,        false: ``gradients`` reduces gradients, so DeepSpeed needs
    overlap_comm                 neither buckets nor streams.
    optimizer, scheduler         removed: the optimizer is passed as an object, and the learning
                                 rate is set in each step.
    zero_allow_untested_...      true: DeepSpeed does not know this package's AdamW by name.
    offload_param,               removed at a stage that does not partition what they move.
    offload_optimizer
    timers.throughput            off: it waits for the device before every forward
                                 (utils/timer.py:238). The run measures its own step times.
    """
    json = run.config.deepspeed_json()
    for key in ("train_batch_size", "optimizer", "scheduler"):
        json.pop(key, None)
    json["train_micro_batch_size_per_gpu"] = run.batch.micro_batch_size
    json["gradient_accumulation_steps"] = 1
    # DeepSpeed 0.19.8 asserts that this is micro-batch x accumulation x data degree
    # (runtime/config.py:602).
    json["train_batch_size"] = run.batch.micro_batch_size * run.grid.shard
    # Otherwise it refuses to offload an AdamW that is not its own (runtime/engine.py:2344).
    json["zero_force_ds_cpu_optimizer"] = False
    json["zero_allow_untested_optimizer"] = True
    json["timers"] = {"throughput": {"enabled": False}}
    zero = json["zero_optimization"]
    zero["stage"] = max(1, run.zero_stage)
    # zero.Init would replace torch's F.linear in the complete process
    # (runtime/zero/partition_parameters.py:419).
    zero["memory_efficient_linear"] = False
    zero["contiguous_gradients"] = zero["overlap_comm"] = False
    if not run.config.zero_optimization.offloads_parameters:
        zero.pop("offload_param", None)
    if not run.config.zero_optimization.offloads_optimizer:
        zero.pop("offload_optimizer", None)
    return json


def model_parallel_unit(context: ParallelContext) -> SimpleNamespace:
    """Return DeepSpeed's ``mpu`` (model parallel unit) for one engine.

    DeepSpeed partitions over the shards. This package sums over replicas, and does everything that
    spans the model axes: the norm, tied weights, the agreement to skip a step. So there is no
    model-parallel group for DeepSpeed: None, which its ZeRO optimizers accept
    (deepspeed/comm/pg_utils.py, is_parallel).
    """
    return SimpleNamespace(
        get_data_parallel_group=lambda: context.shard_group,
        get_data_parallel_world_size=lambda: context.grid.shard,
        get_data_parallel_rank=lambda: context.shard_rank,
        get_model_parallel_group=lambda: None,
        get_model_parallel_world_size=lambda: 1,
        get_model_parallel_rank=lambda: 0,
    )


OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def build_engine(
    run: Run,
    context: ParallelContext,
    model: GPT,
    shards: Mapping[str, ParameterShard],
    *,
    parameter_groups: Callable[[Mapping[str, nn.Parameter]], list[dict[str, Any]]],
    make_optimizer: OptimizerFactory,
    loss: VocabParallelLoss,
) -> ZeroEngine:
    """This rank's engine over ``model``.

    Args:
        run, context: the resolved run, and this rank's groups.
        model: this rank's tensor-parallel layers on the meta device, which get their values here.
        shards: full name -> this rank's shard of the parameter.
        parameter_groups: (full name -> parameter) -> parameter groups of the optimizer.
        loss: the loss of the last pipeline stage.
    """
    _prepare_deepspeed(context)
    json = deepspeed_json(run)
    mpu = model_parallel_unit(context)
    dtype = DTYPES[run.precision]

    def initial_value(name: str) -> Tensor:
        is_expert = parameter_named(run.config.model, name).is_expert
        return shared_initial_shard(
            run.config.model,
            run.config.training.seed,
            name,
            shards[name],
            group=context.group_along(run.grid.copies_of(experts=is_expert).axis),
            device=context.device,
            dtype=dtype,
        )

    def partition(layer: nn.Module) -> None:
        if run.zero_stage == 3:
            # Init takes no group from ``mpu``: without one, it partitions over all ranks
            # (runtime/zero/partition_parameters.py:1093).
            group = context.shard_group
            mlp = layer.mlp if isinstance(layer, ExpertBlock) else None
            if context.expert_shard_group is not None and isinstance(mlp, Experts):
                for experts in (mlp.gate_up, mlp.down):
                    partition_over(experts.weight, context.expert_shard_group)
            deepspeed.zero.Init(
                layer, data_parallel_group=group, config_dict_or_path=json, dtype=dtype, mpu=mpu
            )

    materialize(model, initial_value, device=context.device, dtype=dtype, on_layer_ready=partition)
    parameters = dict(model.named_parameters())
    # gloo has no reduce-scatter that sends as little as NCCL's.
    over_gloo = dist.get_backend(context.shard_group) == "gloo"
    axis = data_axis_of(run, context.pp_rank, "cpu" if over_gloo else "cuda")
    for phase in run.phases.values():
        check_data_axis(axis, pipeline_of(phase), context.pp_rank)
    groups = _groups_of_buckets(axis, parameters, parameter_groups(parameters))
    shard_groups = [
        context.expert_shard_group if bucket.is_expert else context.shard_group
        for bucket in axis.buckets
    ]
    with (
        always_the_zero_optimizer(),
        without_gradient_hooks(),
        without_broadcast(),
        partitions_of_groups_over(shard_groups),
    ):
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=make_optimizer(groups), mpu=mpu, config=json
        )
    return ZeroEngine(
        engine,
        run,
        axis,
        context,
        owned_elements=_owned_elements(shards, axis, context),
        loss=loss,
    )


def _groups_of_buckets(
    axis: DataAxis, parameters: Mapping[str, nn.Parameter], groups: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return a parameter group for each bucket, with the options of its parameters' group."""
    options = {parameter: group for group in groups for parameter in group["params"]}
    members = [[parameters[each.name] for each in bucket.parameters] for bucket in axis.buckets]
    return [{**options[own[0]], "params": own} for own in members]


def _prepare_deepspeed(context: ParallelContext) -> None:
    hide_announced_renames()
    hide_skipped_steps()
    name_the_local_rank(context.device, context.local_rank)
    declare_no_compiled_ops()  # before init_distributed, which would compile one
    import_muon_uncompiled()
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


def _owned_elements(
    shards: Mapping[str, ParameterShard], axis: DataAxis, context: ParallelContext
) -> dict[str, int]:
    owned = {}
    for local in axis.parameters:
        shard = shards[local.name]
        width = shard.local_shape[1] if len(shard.local_shape) == 2 else 1
        later_copy = local.group == "tied" and not context.is_first_pipeline_stage
        # The first stage counts a tied weight, so the last one does not.
        owned[local.name] = 0 if later_copy else shard.owned_rows * width
    return owned

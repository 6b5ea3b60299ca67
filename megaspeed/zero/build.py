"""Builds the engine of one rank: initial weights, optimizer, DeepSpeed's engine.

model on the meta device
  -> materialize                    layer by layer; ZeRO-3 partitions each before the next is made
  -> AdamW over parameter groups    passed to deepspeed.initialize
"""

from collections.abc import Callable, Mapping, Sequence, Set
from types import SimpleNamespace
from typing import Any, get_args

import deepspeed
import torch
from torch import Tensor, nn

from megaspeed.config.message_sizes import buckets
from megaspeed.config.resolve import Run
from megaspeed.data_axis.plan import DataAxis, data_axis_of
from megaspeed.model.gpt import DTYPES, GPT
from megaspeed.model.parameters import parameter_named
from megaspeed.tensor_parallel.loss import VocabParallelLoss
from megaspeed.tensor_parallel.parallelize import materialize, shared_initial_shard
from megaspeed.tensor_parallel.plan import (
    OptimizerGroup,
    ParameterShard,
    is_compressed,
    optimizer_group,
)
from megaspeed.topology.context import ParallelContext
from megaspeed.zero.engine import ZeroEngine
from megaspeed.zero.model_states import held_ranges
from megaspeed.zero.workarounds import (
    always_the_zero_optimizer,
    declare_no_compiled_ops,
    hide_announced_renames,
    hide_skipped_steps,
    import_muon_uncompiled,
    name_the_local_rank,
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
    json["train_batch_size"] = run.batch.micro_batch_size * run.grid.shard
    json["zero_force_ds_cpu_optimizer"] = False
    json["zero_allow_untested_optimizer"] = True
    json["timers"] = {"throughput": {"enabled": False}}
    zero = json["zero_optimization"]
    zero["stage"] = max(1, run.zero_stage)
    zero["memory_efficient_linear"] = False
    zero["contiguous_gradients"] = zero["overlap_comm"] = False
    if not run.config.zero_optimization.offloads_parameters:
        zero.pop("offload_param", None)
    if not run.config.zero_optimization.offloads_optimizer:
        zero.pop("offload_optimizer", None)
    return json


def data_axis(context: ParallelContext) -> SimpleNamespace:
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
    loss_scale: float,
) -> ZeroEngine:
    """This rank's engine over ``model``.

    Args:
        run: the resolved run.
        context: this rank's groups.
        model: this rank's tensor-parallel layers on the meta device, which get their values here.
        shards: full name -> this rank's shard of the parameter.
        parameter_groups: (full name -> parameter) -> parameter groups of the optimizer.
        make_optimizer: parameter groups -> optimizer.
        loss: the loss of the last pipeline stage.
        loss_scale: the gradients are those of the loss multiplied by it.
    """
    _prepare_deepspeed(context)
    json = deepspeed_json(run)
    mpu = data_axis(context)
    dtype = DTYPES[run.precision]

    def initial_value(name: str) -> Tensor:
        return shared_initial_shard(
            run.config.model,
            run.config.training.seed,
            name,
            shards[name],
            group=context.data_group,
            device=context.device,
            dtype=dtype,
        )

    def partition(layer: nn.Module) -> None:
        if run.zero_stage == 3:
            group = context.shard_group
            deepspeed.zero.Init(
                layer, data_parallel_group=group, config_dict_or_path=json, dtype=dtype, mpu=mpu
            )

    materialize(model, initial_value, device=context.device, dtype=dtype, on_layer_ready=partition)
    parameters = dict(model.named_parameters())
    labels = _labels(run, parameters)
    tied = next((p for p, label in labels.items() if label == "tied"), None)
    compressed = _compressed_gradients(run, parameters)
    groups = _split_by_label(parameter_groups(parameters), labels, model.parameters_of_chunks())
    groups = _in_buckets(run, groups, model, set(compressed))
    with always_the_zero_optimizer(), without_gradient_hooks():
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=make_optimizer(groups), mpu=mpu, config=json
        )
    _check_places(data_axis_of(run, context.pp_rank, context.device.type), engine, context)
    return ZeroEngine(
        engine,
        run,
        context,
        owned_elements=_owned_elements(parameters, shards, tied, context),
        tied=tied,
        partial=[p for p, label in labels.items() if label == "partial"],
        compressed=compressed,
        loss=loss,
        loss_scale=loss_scale,
    )


def _check_places(axis: DataAxis, engine: Any, context: ParallelContext) -> None:
    """Compare the places that DeepSpeed has given to the parameters with those of the plan."""
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    found = {
        (names[held.parameter], held.start, held.bucket, held.offset, held.length)
        for held in held_ranges(engine.optimizer)
    }
    planned = {
        (own.parameter.name, own.start, index, own.offset, own.length)
        for index, bucket in enumerate(axis.buckets)
        for own in bucket.owned(context.shard_rank)
    }
    if planned != found:
        raise RuntimeError(f"DeepSpeed holds other places than planned: {found ^ planned}")


def _prepare_deepspeed(context: ParallelContext) -> None:
    hide_announced_renames()
    hide_skipped_steps()
    name_the_local_rank(context.device, context.local_rank)
    declare_no_compiled_ops()
    import_muon_uncompiled()
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


def _labels(run: Run, parameters: Mapping[str, nn.Parameter]) -> dict[nn.Parameter, OptimizerGroup]:
    model, split = run.config.model, run.sequence_parallel
    return {
        parameter: optimizer_group(
            model,
            parameter_named(model, name),
            run.compression,
            has_pipeline=run.grid.pp > 1,
            size=run.grid.tp,
            sequence_parallel=split,
        )
        for name, parameter in parameters.items()
    }


def _compressed_gradients(run: Run, parameters: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
    model, compression, size = run.config.model, run.compression, run.grid.tp
    return [
        parameter
        for name, parameter in parameters.items()
        if is_compressed(model, parameter_named(model, name), compression, size=size)
    ]


def _split_by_label(
    groups: list[dict[str, Any]],
    labels: Mapping[nn.Parameter, OptimizerGroup],
    chunks: Sequence[Sequence[nn.Parameter]],
) -> list[dict[str, Any]]:
    """Put parameters with different labels, or of different chunks, into different groups.

    A bucket is reduced when the backward of its chunk has ended. The two stages that share a tied
    weight partition it alike, and the partition of partial gradients is summed over the tensor axis
    as it is.
    """
    apart = [
        {**group, "params": [p for p in group["params"] if labels[p] == label and p in members]}
        for label in get_args(OptimizerGroup)
        for group in groups
        for members in map(set, chunks)
    ]
    return [group for group in apart if group["params"]]


def _in_buckets(
    run: Run, groups: list[dict[str, Any]], model: GPT, compressed: Set[nn.Parameter]
) -> list[dict[str, Any]]:
    """Put each bucket of gradients (``reduce_bucket_size``) into a group of its own.

    Compressed gradients stay together, unless they are reduced over shards before they are
    compressed. With one data rank, nothing is reduced.

    At ZeRO-1 and 2, DeepSpeed divides every group into equal parts, one for each shard. So a rank
    owns a row of each bucket, and one reduce-scatter sums a bucket for all its owners. If a bucket
    were a part of a group, it would be a part of one or a few rows, and each owner would need a
    message of its own.
    """
    if run.grid.dp_cp == 1:
        return groups

    def elements(parameter: Any) -> int:
        if run.zero_stage == 3:
            return run.grid.shard * int(parameter.partition_numel())
        return int(parameter.numel())

    weight = None if model.head is None else model.head.output.weight
    split = []
    for group in groups:
        members, together = group["params"], [range(len(group["params"]))]
        if members[0] not in compressed or run.grid.is_hybrid:
            head = next((i for i, p in enumerate(members) if p is weight), None)
            together = buckets(run, list(map(elements, members)), head)
        split += [{**group, "params": members[one.start : one.stop]} for one in together]
    return split


def _owned_elements(
    parameters: Mapping[str, nn.Parameter],
    shards: Mapping[str, ParameterShard],
    tied: nn.Parameter | None,
    context: ParallelContext,
) -> dict[nn.Parameter, int]:
    owned = {}
    for name, parameter in parameters.items():
        shard = shards[name]
        width = shard.local_shape[1] if len(shard.local_shape) == 2 else 1
        later_copy = parameter is tied and not context.is_first_pipeline_stage
        owned[parameter] = 0 if later_copy else shard.owned_rows * width
    return owned

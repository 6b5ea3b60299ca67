"""Builds one rank's engine: initial weights, optimizer, and DeepSpeed round the rank's model.

model on the meta device
  -> materialize                    layer by layer; ZeRO-3 partitions each before the next is made
  -> AdamW over parameter groups    handed over to deepspeed.initialize
"""

from collections.abc import Callable, Mapping
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from megaspeed.config.resolve import Run
from megaspeed.model.gpt import DTYPES, GPT
from megaspeed.model.parameters import EMBEDDING_WEIGHT, HEAD_WEIGHT
from megaspeed.tensor_parallel.parallelize import materialize
from megaspeed.tensor_parallel.plan import ParameterShard
from megaspeed.topology.context import ParallelContext
from megaspeed.zero.deepspeed_json import deepspeed_json
from megaspeed.zero.engine import ZeroEngine
from megaspeed.zero.mpu import DataAxis
from megaspeed.zero.workarounds.process_environment import name_the_local_rank
from megaspeed.zero.workarounds.stage1_fp32_accumulation import always_the_zero_optimizer
from megaspeed.zero.workarounds.start_up import (
    count_numa_nodes_once,
    declare_no_compiled_ops,
    hide_announced_renames,
)

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def build_engine(
    run: Run,
    context: ParallelContext,
    model: GPT,
    shards: Mapping[str, ParameterShard],
    *,
    initial_value: Callable[[str], Tensor],
    parameter_groups: Callable[[Mapping[str, nn.Parameter]], list[dict[str, Any]]],
    make_optimizer: OptimizerFactory,
) -> ZeroEngine:
    """This rank's engine over ``model``.

    Args:
        run: the resolved run.
        context: this rank's groups.
        model: this rank's layers on the meta device, tensor-parallel; they get their values here.
        shards: full name -> the part of the parameter that this rank holds.
        initial_value: full name -> this rank's shard of the parameter's initial value.
        parameter_groups: this rank's parameters by full name -> groups for the optimizer.
        make_optimizer: groups -> optimizer.
    """
    _prepare_deepspeed(context)
    local_elements = sum(parameter.numel() for parameter in model.parameters())
    json = deepspeed_json(run, local_elements=local_elements)
    mpu = DataAxis(context, replicate=run.zero_stage == 0)
    partition = _LayerPartitioner(run, mpu, json)
    materialize(
        model,
        initial_value,
        device=context.device,
        dtype=DTYPES[run.precision],
        on_layer_ready=partition,
    )
    parameters = dict(model.named_parameters())
    _accumulate_in(parameters, DTYPES[run.accumulation_dtype])
    tied = _tied_across_stages(run, parameters)
    groups = _with_tied_alone(parameter_groups(parameters), tied)
    with always_the_zero_optimizer():
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=make_optimizer(groups), mpu=mpu, config=json
        )
    return ZeroEngine(
        engine,
        run,
        context,
        owned_elements=_owned_elements(parameters, shards, tied, context),
        tied=tied,
    )


def _prepare_deepspeed(context: ParallelContext) -> None:
    hide_announced_renames()
    name_the_local_rank(context.device, context.local_rank)
    declare_no_compiled_ops()
    count_numa_nodes_once()
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


class _LayerPartitioner:
    """ZeRO-3: partitions a layer's parameters over the data axis; other stages leave it whole."""

    def __init__(self, run: Run, mpu: DataAxis, json: dict[str, Any]) -> None:
        self._active = run.zero_stage == 3
        self._dtype = DTYPES[run.precision]
        self._mpu = mpu
        self._json = json

    def __call__(self, layer: nn.Module) -> None:
        if self._active:
            deepspeed.zero.Init(
                module=layer,
                data_parallel_group=self._mpu.get_data_parallel_group(),
                config_dict_or_path=self._json,
                dtype=self._dtype,
                mpu=self._mpu,
            )


def _accumulate_in(parameters: Mapping[str, nn.Parameter], dtype: torch.dtype) -> None:
    """Makes autograd sum the gradients of successive micro-batches in ``dtype``."""
    for parameter in parameters.values():
        if parameter.dtype != dtype:
            parameter.grad_dtype = dtype


def _tied_across_stages(run: Run, parameters: Mapping[str, nn.Parameter]) -> nn.Parameter | None:
    if not run.config.model.tie_word_embeddings or run.grid.pp == 1:
        return None
    return parameters.get(EMBEDDING_WEIGHT, parameters.get(HEAD_WEIGHT))


def _with_tied_alone(
    groups: list[dict[str, Any]], tied: nn.Parameter | None
) -> list[dict[str, Any]]:
    """Puts the tied weight in a group of its own, so that both stages cut it at the same places."""
    if tied is None:
        return groups
    alone = [{**g, "params": [tied]} for g in groups if any(p is tied for p in g["params"])]
    rest = [{**g, "params": [p for p in g["params"] if p is not tied]} for g in groups]
    return [*alone, *(g for g in rest if g["params"])]


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

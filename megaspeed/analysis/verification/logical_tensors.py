"""From what each rank holds to one tensor for each logical parameter.

    fragments (ZeRO)  --sum over dp-->          local tensors (tensor shards)
                      --place rows, columns-->  logical tensors

For models that fit in one process: everything is gathered on rank 0.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaspeed.config.model import ModelConfig
from megaspeed.model.parameters import logical_name
from megaspeed.tensor_parallel.plan import ParameterShard
from megaspeed.topology.context import ParallelContext
from megaspeed.training.worker import Worker
from megaspeed.zero.model_states import gather_parameters

Fragment = tuple[nn.Parameter, int, Tensor]
"""Whose it is, its first element in the flattened local tensor, and its elements."""


@dataclass(frozen=True)
class LogicalTensors:
    """Tensors by logical parameter name, fp32 on the CPU.

    Attributes:
        tensors: one for each logical parameter, unpadded.
        copies_differ_by: largest absolute difference between two ranks' copies of the same element;
            infinite where one of them is not a number.
    """

    tensors: Mapping[str, Tensor]
    copies_differ_by: float


def gather_gradients(worker: Worker) -> LogicalTensors | None:
    """The reduced gradients, on rank 0 (None elsewhere). Call from the engine's ``before_step``.

    Without fp16's loss scale, which the engine's own gradients still carry.
    """
    scale = float(worker.engine.optimizer.loss_scale)
    fragments = worker.engine.gradient_fragments()
    local = _whole_shards(worker, ((f.parameter, f.start, f.values / scale) for f in fragments))
    return _gather(local, worker.shards, worker.run.config.model, worker.context)


def gather_weights(worker: Worker) -> LogicalTensors | None:
    """The parameters that the model computes with, on rank 0 (None elsewhere)."""
    local = {name: value.float().cpu() for name, value in gather_parameters(worker.engine.module)}
    return _gather(local, worker.shards, worker.run.config.model, worker.context)


def gather_state(worker: Worker, kind: str) -> LogicalTensors | None:
    """One of ``checkpoint.tensors.KINDS`` of the optimizer's state, on rank 0 (None elsewhere)."""
    fragments = worker.engine.state_fragments()
    local = _whole_shards(worker, ((f.parameter, f.start, getattr(f, kind)) for f in fragments))
    return _gather(local, worker.shards, worker.run.config.model, worker.context)


def _whole_shards(worker: Worker, fragments: Iterable[Fragment]) -> dict[str, Tensor]:
    """This rank's tensor shards, put together from the data axis's fragments."""
    names = worker.engine.names
    flat = {name: torch.zeros(_elements(shard)) for name, shard in worker.shards.items()}
    for parameter, start, values in fragments:
        flat[names[parameter]][start : start + values.numel()] = values.float().cpu()
    if worker.run.zero_stage > 0:
        for name in sorted(flat):
            flat[name] = _sum(flat[name], worker.context)
    return {name: flat[name].view(shard.local_shape) for name, shard in worker.shards.items()}


def _sum(tensor: Tensor, context: ParallelContext) -> Tensor:
    on_device = tensor.to(context.device)
    dist.all_reduce(on_device, group=context.dp_group)
    return on_device.cpu()


def _elements(shard: ParameterShard) -> int:
    elements = 1
    for size in shard.local_shape:
        elements *= size
    return elements


def _gather(
    local: Mapping[str, Tensor],
    shards: Mapping[str, ParameterShard],
    config: ModelConfig,
    context: ParallelContext,
) -> LogicalTensors | None:
    mine = [(logical_name(config, name), shards[name], value) for name, value in local.items()]
    everyones: list[list[tuple[str, ParameterShard, Tensor]]] | None = (
        [[] for _ in range(context.grid.world_size)] if context.rank == 0 else None
    )
    dist.gather_object(mine, everyones, dst=0, group=context.world_group)
    if everyones is None:
        return None
    return merge_shards(part for rank in everyones for part in rank)


def merge_shards(parts: Iterable[tuple[str, ParameterShard, Tensor]]) -> LogicalTensors:
    """Places every shard's logical rows and columns; of an element that several hold the first
    counts, and the others are compared with it.
    """
    merged: dict[str, Tensor] = {}
    placed: dict[str, Tensor] = {}
    difference = 0.0
    for name, shard, value in parts:
        if name not in merged:
            merged[name] = torch.zeros(shard.full_shape)
            placed[name] = torch.zeros(shard.full_shape, dtype=torch.bool)
        held = value.split([*(len(rows) for rows in shard.rows), shard.padding_rows])
        for rows, part in zip(shard.rows, held, strict=False):
            there, known = _part(merged[name], rows, shard), _part(placed[name], rows, shard)
            difference = max(difference, _largest_difference(there[known], part[known]))
            there.copy_(torch.where(known, there, part))
            known.fill_(True)
    return LogicalTensors(merged, difference)


def _part(tensor: Tensor, rows: range, shard: ParameterShard) -> Tensor:
    """A view of the logical tensor: these rows, and the shard's columns."""
    part = tensor[rows.start : rows.stop]
    return part if shard.columns is None else part[:, shard.columns.start : shard.columns.stop]


def _largest_difference(a: Tensor, b: Tensor) -> float:
    if not a.numel():
        return 0.0
    largest = float((a - b).abs().max())
    return math.inf if math.isnan(largest) else largest

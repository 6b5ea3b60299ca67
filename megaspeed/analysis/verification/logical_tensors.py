"""Gathers the shards and partitions of all ranks into one tensor for each logical parameter.

    fragments (ZeRO)  --sum over dp-->          local tensors (tensor shards)
                      --place rows, columns-->  logical tensors

Everything is gathered on rank 0, so the model must fit in one process.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaspeed.model.parameters import logical_name
from megaspeed.tensor_parallel.plan import ParameterShard
from megaspeed.training.worker import Worker
from megaspeed.zero.model_states import gather_parameters

Fragment = tuple[nn.Parameter, int, Tensor]
"""A fragment: its parameter, its start in the flattened local tensor, and its elements."""


@dataclass(frozen=True)
class LogicalTensors:
    """Tensors by logical parameter name, fp32 on the CPU."""

    tensors: Mapping[str, Tensor]  # one for each logical parameter, unpadded
    # Largest absolute difference between two ranks' copies of the same element; infinite if one of
    # them is NaN.
    copies_differ_by: float


def gather_gradients(worker: Worker) -> LogicalTensors | None:
    """The reduced gradients without fp16's loss scale, on rank 0 (None elsewhere).

    Call it from the engine's ``before_step``.
    """
    scale = float(worker.engine.optimizer.loss_scale)
    fragments = worker.engine.gradient_fragments()
    return _gather(
        worker,
        _complete_shards(worker, ((f.parameter, f.start, f.values / scale) for f in fragments)),
    )


def gather_weights(worker: Worker) -> LogicalTensors | None:
    """The parameters that the model computes with, on rank 0 (None elsewhere)."""
    local = {name: value.float().cpu() for name, value in gather_parameters(worker.engine.module)}
    return _gather(worker, local)


def gather_state(worker: Worker, kind: str) -> LogicalTensors | None:
    """One of ``checkpoint.tensors.KINDS`` of the optimizer state, on rank 0 (None elsewhere)."""
    fragments = worker.engine.state_fragments()
    local = _complete_shards(worker, ((f.parameter, f.start, getattr(f, kind)) for f in fragments))
    return _gather(worker, local)


def _complete_shards(worker: Worker, fragments: Iterable[Fragment]) -> dict[str, Tensor]:
    """This rank's tensor shards, put together from the fragments of the data axis."""
    names = worker.engine.names
    shapes = {name: shard.local_shape for name, shard in worker.shards.items()}
    flat = {name: torch.zeros(math.prod(shape)) for name, shape in shapes.items()}
    for parameter, start, values in fragments:
        flat[names[parameter]][start : start + values.numel()] = values.float().cpu()
    if worker.run.zero_stage > 0:
        for name in sorted(flat):
            on_device = flat[name].to(worker.context.device)
            dist.all_reduce(on_device, group=worker.context.dp_group)
            flat[name] = on_device.cpu()
    return {name: flat[name].view(shape) for name, shape in shapes.items()}


def _gather(worker: Worker, local: Mapping[str, Tensor]) -> LogicalTensors | None:
    config, context = worker.run.config.model, worker.context
    mine = [
        (logical_name(config, name), worker.shards[name], value) for name, value in local.items()
    ]
    everyones: list[list[tuple[str, ParameterShard, Tensor]]] | None = (
        [[] for _ in range(context.grid.world_size)] if context.rank == 0 else None
    )
    dist.gather_object(mine, everyones, dst=0, group=context.world_group)
    if everyones is None:
        return None
    return merge_shards(part for rank in everyones for part in rank)


def merge_shards(parts: Iterable[tuple[str, ParameterShard, Tensor]]) -> LogicalTensors:
    """Places the rows and columns of every shard in its logical tensor.

    If several shards hold an element, the first is used and the others are compared with it.
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
    """A view of the logical tensor: these rows and the shard's columns."""
    part = tensor[rows.start : rows.stop]
    return part if shard.columns is None else part[:, shard.columns.start : shard.columns.stop]


def _largest_difference(a: Tensor, b: Tensor) -> float:
    if not a.numel():
        return 0.0
    largest = float((a - b).abs().max())
    return math.inf if math.isnan(largest) else largest

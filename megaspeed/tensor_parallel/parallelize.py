"""Applies tensor parallelism to a plain GPT: replaces its modules, and keeps its forward.

    plain GPT on the meta device --parallelize--> the same GPT with parallel layers, still on meta
    --materialize--> this rank's shards, with the same bits as slices of the full initial weights

No rank ever holds more than its part of the model: a shard is made without its full parameter (see
``model.initialization``).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaspeed.config.model import ModelConfig
from megaspeed.model.dropout import MaskShard
from megaspeed.model.experts import ExpertLinear, Experts
from megaspeed.model.gpt import GPT, Block
from megaspeed.model.initialization import BLOCK_ELEMENTS, initial_slice
from megaspeed.model.parameters import Parameter, logical_name, parameter_named
from megaspeed.tensor_parallel.collectives import (
    ExpertAxis,
    TensorAxis,
    mean_over_tensor_axis,
    split_sequence,
    sum_in_place,
)
from megaspeed.tensor_parallel.experts import exchange_of
from megaspeed.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    SharedRows,
    VocabParallelEmbedding,
    sum_shared_rows,
)
from megaspeed.tensor_parallel.shards import (
    ParameterShard,
    key_value_replicas,
    query_rows,
    shard_of,
)

ALL_EXPERTS = ExpertAxis()
"""The expert axis of a rank that has all experts of its blocks."""


def parallelize(
    model: GPT, config: ModelConfig, axis: TensorAxis, experts: ExpertAxis = ALL_EXPERTS
) -> dict[str, ParameterShard]:
    """Replace the layers of ``model`` by tensor-parallel ones, in place. It is on the meta device.

    Experts that other ranks of the axis ``experts`` have are removed.

    Returns:
        Full name of each parameter -> the shard of this rank. A head that is tied to an embedding
        of the same stage has the name of the embedding.
    """
    place = {"rank": axis.rank, "size": axis.size, "ep_rank": experts.rank, "ep": experts.size}
    shards = {
        name: shard_of(config, _parameter(config, name, weight), **place)
        for name, weight in model.named_parameters()
    }
    for name, module in list(model.named_modules()):
        replacement = _parallel_module(name, module, config, axis)
        if replacement is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, replacement)
    for block in model.blocks.values():
        assert isinstance(block, Block)
        _localize_block(block, config, axis)
        if isinstance(block.mlp, Experts):
            _share_experts(block.mlp, config, axis, experts)
    if axis.sequence_parallel:
        model.sequence_parts = axis.size
    if axis.sequence_parallel and model.embedding is not None:
        model.embedding.register_forward_hook(lambda _m, _args, x: split_sequence(x, axis))
    # The modules that replace them have weights of their own.
    if model.embedding is not None and model.head is not None and config.tie_word_embeddings:
        model.head.output.weight = model.embedding.tokens.weight
    return shards


def initial_shard(config: ModelConfig, seed: int, name: str, shard: ParameterShard) -> Tensor:
    """This rank's shard of the initial value of a parameter: fp32 on the CPU, padded with zeros."""
    value = initial_slice(
        config,
        seed,
        logical_name(config, name),
        torch.Size(shard.full_shape),
        rows=shard.rows,
        columns=shard.columns,
    )
    if not shard.padding_rows:
        return value
    return torch.cat((value, value.new_zeros((shard.padding_rows, *value.shape[1:]))))


def shared_initial_shard(
    config: ModelConfig,
    seed: int,
    name: str,
    shard: ParameterShard,
    *,
    group: dist.ProcessGroup | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """``initial_shard`` in ``dtype`` on ``device``, of which each rank of ``group`` draws a part.

    All n ranks of the group hold the same shard, and call this together (None: n = 1). A rank draws
    the blocks (see ``model.initialization``) that contain its 1/n of the rows, and receives the
    other rows. A parameter of one or two blocks is drawn by every rank.
    """
    size, count = 1 if group is None else group.size(), shard.logical_rows
    # A block is always drawn as a whole. If there are only one or two, sharing saves little.
    is_small = len(shard.full_shape) == 1 or count * shard.full_shape[1] <= 2 * BLOCK_ELEMENTS
    if group is None or size == 1 or is_small:
        return initial_shard(config, seed, name, shard).to(device=device, dtype=dtype)
    rows, width = shard.local_shape
    per_rank = -(-count // size)
    start = group.rank() * per_rank
    drawn = _rows_between(shard.rows, start, start + per_rank)
    own = initial_shard(config, seed, name, replace(shard, rows=drawn, padding_rows=0))
    sent = torch.zeros(per_rank, width, device=device, dtype=dtype)
    sent[: len(own)].copy_(own)
    # Rows of zeros are the padding of the shard, and that of the last ranks' parts.
    value = torch.zeros(max(rows, size * per_rank), width, device=device, dtype=dtype)
    received = value[: size * per_rank]
    dist.all_gather_into_tensor(received.view(torch.uint8), sent.view(torch.uint8), group=group)
    return value if len(value) == rows else value[:rows].clone()


def _rows_between(ranges: Sequence[range], start: int, stop: int) -> tuple[range, ...]:
    """The rows at the places ``start`` to ``stop`` of the concatenated ranges."""
    between = []
    for rows in ranges:
        between.append(rows[max(0, start) : max(0, stop)])
        start, stop = start - len(rows), stop - len(rows)
    return tuple(between)


def materialize(
    model: GPT,
    value_of: Callable[[str], Tensor],
    *,
    device: torch.device,
    dtype: torch.dtype,
    on_layer_ready: Callable[[nn.Module], None] = lambda layer: None,
) -> None:
    """Set every parameter of a model on the meta device to its value, layer by layer, in place.

    Buffers have values already and are moved to ``device``.

    Args:
        model: a parallelized GPT on the meta device; tied parameters remain tied.
        value_of: full parameter name -> this rank's shard; called once for each distinct parameter.
        device, dtype: of the parameters.
        on_layer_ready: called with each layer before the next one gets its values, so that ZeRO-3
            can partition it, and no rank holds more than one complete layer.
    """
    # The parameters are in the values, too: an id may be used again once its object is freed.
    placeholders = {id(p): (name, p) for name, p in model.named_parameters()}
    made: dict[int, nn.Parameter] = {}
    for layer in model.layer_modules():
        for owner in layer.modules():
            for attribute, placeholder in list(owner.named_parameters(recurse=False)):
                key = id(placeholder)
                if key not in made:
                    value = value_of(placeholders[key][0]).to(device=device, dtype=dtype)
                    made[key] = nn.Parameter(value)
                setattr(owner, attribute, made[key])
            for attribute, buffer in owner.named_buffers(recurse=False):
                setattr(owner, attribute, buffer.to(device))
        on_layer_ready(layer)


def _parallel_module(
    name: str, module: nn.Module, config: ModelConfig, axis: TensorAxis
) -> nn.Module | None:
    """The tensor-parallel form of ``module``; None if it is not replaced."""
    if not isinstance(module, nn.Linear | nn.Embedding):
        return None
    parameter = parameter_named(config, f"{name}.weight")
    split = parameter.split
    if split == "replicated" and isinstance(module, nn.Embedding):
        return None
    if split in ("replicated", "each head"):
        raise ValueError(
            f"the row of {name} in megaspeed/model/parameters.py states the split {split}, which "
            "only norms, embeddings, routers and experts have; split a linear module by rows, "
            "columns, heads or vocabulary"
        )
    shard = shard_of(config, parameter, rank=axis.rank, size=axis.size)
    rows, columns = shard.local_shape
    if isinstance(module, nn.Embedding):
        return VocabParallelEmbedding(rows, columns, vocabulary=shard.rows[0], axis=axis)
    bias = module.bias is not None
    if split == "columns":
        return RowParallelLinear(columns, rows, bias=bias, axis=axis)
    shared = None
    if split == "heads":
        shared = _shared_rows(config, axis, first=query_rows(parameter, shard))
    return ColumnParallelLinear(columns, rows, bias=bias, axis=axis, shared_rows=shared)


def _parameter(config: ModelConfig, name: str, weight: Tensor) -> Parameter:
    """The table's entry for a parameter of the model."""
    parameter = parameter_named(config, name)
    if parameter.shape != tuple(weight.shape):
        raise ValueError(
            f"the parameter {name} has the shape {tuple(weight.shape)}, but its row in "
            f"megaspeed/model/parameters.py states {parameter.shape}; make its module from the row"
        )
    return parameter


def _shared_rows(config: ModelConfig, axis: TensorAxis, *, first: int) -> SharedRows | None:
    """The rows from ``first`` on, if they are key/value heads that several ranks hold."""
    replicas = key_value_replicas(config, axis.size)
    if replicas == 1:
        return None
    return SharedRows(first=first, index=axis.rank // replicas, count=axis.size // replicas)


def _share_experts(
    mlp: Experts, config: ModelConfig, axis: TensorAxis, experts: ExpertAxis
) -> None:
    """Keep this rank's experts of a block, which get tokens from the ranks of the expert axis."""
    count, active = config.num_experts, config.num_experts_per_tok
    assert count is not None and active is not None
    if axis.sequence_parallel:
        mlp.part = (axis.rank, axis.size)
        mlp.sums_over_sequence.append(partial(sum_in_place, axis=axis))
    if experts.size == 1:
        return
    for name in ("gate_up", "down"):
        rows, columns = getattr(mlp, name).weight.shape
        with torch.device("meta"):
            own = ExpertLinear(rows // experts.size, columns, count // experts.size)
        setattr(mlp, name, own)
    mlp.exchange = exchange_of(experts, count, active)


def _localize_block(block: Block, config: ModelConfig, axis: TensorAxis) -> None:
    """Set the head counts and dropout masks of this rank's part of a block."""
    attention = block.attention
    attention.query_heads, attention.key_value_heads = config.local_heads(axis.size)
    attention.dropout.shard = MaskShard(index=axis.rank, count=axis.size)
    if attention.joint_norm is not None:
        attention.joint_norm.mean_of_ranks = partial(mean_over_tensor_axis, axis=axis)
        if (shared := _shared_rows(config, axis, first=0)) is not None:
            attention.joint_norm.shared = partial(sum_shared_rows, shared=shared, axis=axis)
    if axis.sequence_parallel:
        tokens = MaskShard(index=axis.rank, count=axis.size, across_samples=True)
        block.attention_dropout.shard = block.mlp_dropout.shard = tokens

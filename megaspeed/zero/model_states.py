"""The parameters, gradients and optimizer states of a rank, as views of DeepSpeed's tensors.

    stage      parameters                                    optimizer states
    0, 1, 2    flat buffer, of which parameters are views    master partition, two moments
    3          flat partitions, and persistent parameters    the same

DeepSpeed 0.19.8 does not document these tensors. The optimizer states (fp32 master weights, and
AdamW's two moments or Muon's momentum) are flat tensors for each parameter group, with the same
layout.

A fragment is a flat range of one parameter. Whatever is written to it is what the optimizer uses.

    stage      partitioned over    fragments of a rank
    0          one rank            every parameter, complete
    1, 2       the data axis       flat ranges: one partition of the concatenated parameters
    3          the data axis       an equal flat range of every parameter
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaspeed.data_axis.axis import DataAxis
from megaspeed.data_axis.buckets import Bucket, OwnedRange
from megaspeed.topology.context import ParallelContext


@dataclass(frozen=True)
class Fragment:
    """Elements [start, start + len(values)) of a flat local parameter, or of its gradient."""

    name: str  # full name of the parameter
    start: int
    values: Tensor


@dataclass(frozen=True)
class StateFragment:
    """Elements of the flat local state of a parameter, fp32, from ``start`` on."""

    name: str  # full name of the parameter
    start: int
    tensors: Mapping[str, Tensor]
    """Kind -> elements: "weights", and "momentum" of a matrix that Muon updates, or "exp_avg" and
    "exp_avg_sq" of what AdamW updates."""

    @property
    def weights(self) -> Tensor:
        """Master weights."""
        return self.tensors["weights"]


def own_part(bucket: Bucket, context: ParallelContext) -> int:
    """The index of the part of a bucket that this rank owns: 0 if there is one shard."""
    return context.rank_along(bucket.reduction.axis) % bucket.shards


def owned_ranges(axis: DataAxis, context: ParallelContext) -> Iterator[tuple[int, OwnedRange]]:
    """(index of a bucket, what this rank owns of one of its parameters)."""
    for index, bucket in enumerate(axis.buckets):
        yield from ((index, own) for own in bucket.owned(own_part(bucket, context)))


def partitions_parameters(optimizer: Any) -> bool:
    """Whether this is DeepSpeed's optimizer of ZeRO-3; other stages use another class."""
    return hasattr(optimizer, "fp16_groups")


def _places_in_deepspeed(optimizer: Any) -> Iterator[tuple[nn.Parameter, int, int, int, int]]:
    """(parameter, first element, flat partition, offset in it, elements) of what this rank owns."""
    if partitions_parameters(optimizer):
        for parameter in chain(*optimizer.fp16_groups):
            bucket, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = optimizer._get_param_partition_rank(parameter) * parameter.partition_numel()
            length = max(0, min(parameter.partition_numel(), parameter.ds_numel - start))
            yield parameter, start, int(bucket), int(offset), length
        return
    for bucket, parameters in enumerate(optimizer.params_in_partition):
        size = optimizer.single_partition_of_fp32_groups[bucket].numel()
        rank = dist.get_rank(optimizer.real_dp_process_group[bucket])
        for parameter in parameters:
            key = optimizer.get_param_id(parameter)
            start = int(optimizer.grad_start_offset[bucket][rank][key])
            offset = int(optimizer.grad_partition_insertion_offset[bucket][rank][key])
            yield parameter, start, bucket, offset, min(parameter.numel() - start, size - offset)


def check_places(
    optimizer: Any, module: nn.Module, axis: DataAxis, context: ParallelContext
) -> None:
    """Raise RuntimeError if DeepSpeed's partitions or what it keeps gathered are not as planned."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    found = {(names[parameter], *place) for parameter, *place in _places_in_deepspeed(optimizer)}
    planned = {
        (own.parameter.name, own.start, index, own.offset, own.length)
        for index, own in owned_ranges(axis, context)
    }
    kept = {name for parameter, name in names.items() if getattr(parameter, "ds_persist", False)}
    persistent = () if axis.persistent is None else axis.persistent.parameters
    differ = kept ^ {parameter.name for parameter in persistent}
    mend = "Install the version of DeepSpeed that constraints.txt states."
    if found != planned:
        raise RuntimeError(
            "DeepSpeed partitions parameters differently from the plan (megaspeed/data_axis). "
            f"{mend} As (parameter, first element, bucket, offset, length), DeepSpeed has "
            f"{sorted(found - planned)[:2]}, and the plan {sorted(planned - found)[:2]}."
        )
    if differ:
        raise RuntimeError(
            f"DeepSpeed and the plan (megaspeed/data_axis) differ in whether {min(differ)} stays "
            f"gathered. {mend}"
        )


def state_fragments(
    optimizer: Any, axis: DataAxis, context: ParallelContext
) -> Iterator[StateFragment]:
    """This rank's optimizer state without padding. Moments that do not exist yet are zeros."""
    masters = master_partitions(optimizer)
    for index, own in owned_ranges(axis, context):
        state = optimizer_state(optimizer, axis.buckets[index], masters[index])
        views = {
            kind: tensor.view(-1).narrow(0, own.offset, own.length)
            for kind, tensor in {"weights": masters[index].data, **state}.items()
            if kind != "step"
        }
        yield StateFragment(own.parameter.name, own.start, views)


def load_state(optimizer: Any, axis: DataAxis, steps_taken: int) -> None:
    """Make the optimizer continue from state fragments that were written to.

    The model's parameters are computed from the master weights; a collective over the data axis.
    ``steps_taken`` determines AdamW's bias correction.
    """
    for bucket, master in zip(axis.buckets, master_partitions(optimizer), strict=True):
        # Checkpoints have no step count of a parameter: all of a run have taken the same steps.
        if "step" in (state := optimizer_state(optimizer, bucket, master)):
            state["step"].fill_(steps_taken)
    if partitions_parameters(optimizer):
        for sub_group in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)
    else:
        optimizer.update_lp_params()


def master_partitions(optimizer: Any) -> list[Tensor]:
    """The flat master weights of each parameter group (a sub-group of DeepSpeed's at ZeRO-3)."""
    if partitions_parameters(optimizer):
        return list(optimizer.fp32_partitioned_groups_flat)
    return list(optimizer.single_partition_of_fp32_groups)


def optimizer_state(optimizer: Any, bucket: Bucket, master: Tensor) -> dict[str, Tensor]:
    """Kind -> the state of the flat weights of a bucket, and for AdamW its ``step``.

    Zeros before the first step, in which torch would create those of AdamW.
    """
    state: dict[str, Tensor] = optimizer.optimizer.state[master]
    if not state and bucket.group == "orthogonalized":
        state["momentum"] = torch.zeros_like(master.data)
    elif not state:
        # As torch.optim.adam does for fused=True: an fp32 step count beside the parameter.
        state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
        state["exp_avg"] = torch.zeros_like(master.data)
        state["exp_avg_sq"] = torch.zeros_like(master.data)
    return state


def parameter_fragments(
    module: nn.Module, axis: DataAxis, context: ParallelContext
) -> Iterator[Fragment]:
    """The parameters that this rank holds between steps: the complete ones or, at ZeRO-3, this
    rank's part without padding.
    """
    parameters: dict[str, Any] = dict(module.named_parameters())
    if axis.persistent is None:
        yield from (Fragment(name, 0, each.view(-1)) for name, each in parameters.items())
        return
    for _, own in owned_ranges(axis, context):
        part = parameters[own.parameter.name].ds_tensor.view(-1)
        yield Fragment(own.parameter.name, own.start, part.narrow(0, 0, own.length))


def gather_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(full name, copy of the complete tensor shard) of each parameter; a collective over dp."""
    for name, parameter in module.named_parameters():
        partitioned = hasattr(parameter, "ds_id")
        with deepspeed.zero.GatheredParameters([parameter], enabled=partitioned):
            value = parameter.detach().clone()
        yield name, value

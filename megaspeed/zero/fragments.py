"""The reduced gradients that this rank holds between the reduction and the optimizer step.

ZeRO keeps them in other places for each stage and offload setting; here they are one list of
fragments, each a flat range of one parameter. All of them are views: writing to a fragment changes
what the optimizer will see.

    stage      partitioned over    a rank's fragments
    0          nobody              every parameter, whole
    1, 2       the data axis       flat ranges: one partition of the parameters laid end to end
    3          the data axis       an equal flat range of every parameter
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class GradientFragment:
    """Elements [start, start + len(values)) of ``parameter``'s flattened local gradient."""

    parameter: nn.Parameter
    start: int
    values: Tensor


@dataclass(frozen=True)
class HeldRange:
    """Where in this rank's flat partitions a part of a parameter lies.

    Attributes:
        parameter: whose.
        start: first element of the part, in the parameter's flattened local tensor.
        group: which flat partition: one for each parameter group (ZeRO-3: sub-group).
        offset: first element of the part in that partition.
        length: elements, padding left out; may be 0 at stage 3.
    """

    parameter: nn.Parameter
    start: int
    group: int
    offset: int
    length: int


def partitions_parameters(optimizer: Any) -> bool:
    """Whether it is DeepSpeed's optimizer of ZeRO-3, which has another class than the others'."""
    return hasattr(optimizer, "fp16_groups")


def held_ranges(optimizer: Any) -> Iterator[HeldRange]:
    """Every part of a parameter whose gradient and optimizer state this rank holds."""
    if partitions_parameters(optimizer):
        yield from _stage3_ranges(optimizer)
    else:
        yield from _flat_partition_ranges(optimizer)


def gradient_fragments(optimizer: Any) -> Iterator[GradientFragment]:
    """This rank's fragments, padding left out. Valid after the reduction and before the step."""
    if partitions_parameters(optimizer):
        yield from _stage3_fragments(optimizer)
        return
    if optimizer.cpu_offload:
        # DeepSpeed copies to host memory without waiting, and waits only in its own step.
        optimizer._wait_for_offload_copies()
    for held in held_ranges(optimizer):
        partition = _gradient_partition(optimizer, held.group)
        values = partition.narrow(0, held.offset, held.length)
        yield GradientFragment(held.parameter, held.start, values)


def _gradient_partition(optimizer: Any, group: int) -> Tensor:
    if optimizer.cpu_offload:
        gradient: Tensor = optimizer.single_partition_of_fp32_groups[group].grad
        return gradient.view(-1)
    partition: Tensor = optimizer.averaged_gradients[group].flat_partition
    return partition


def _stage3_fragments(optimizer: Any) -> Iterator[GradientFragment]:
    # DeepSpeed's own method for a parameter's gradient (stage3.py:3102) makes the host wait for the
    # reduction stream, once for each parameter.
    if optimizer.offload_optimizer:
        flat = [master.grad.view(-1) for master in optimizer.fp32_partitioned_groups_flat]
        for held in held_ranges(optimizer):
            values = flat[held.group].narrow(0, held.offset, held.length)
            yield GradientFragment(held.parameter, held.start, values)
        return
    # In each sub-group, one partition for each parameter, in the order of held_ranges.
    partitions = chain.from_iterable(
        optimizer.averaged_gradients[group] for group in range(len(optimizer.fp16_groups))
    )
    for held, partition in zip(held_ranges(optimizer), partitions, strict=True):
        values = partition.view(-1).narrow(0, 0, held.length)
        yield GradientFragment(held.parameter, held.start, values)


def _flat_partition_ranges(optimizer: Any) -> Iterator[HeldRange]:
    for group, parameters in enumerate(optimizer.params_in_partition):
        size = optimizer.single_partition_of_fp32_groups[group].numel()
        rank = dist.get_rank(optimizer.real_dp_process_group[group])
        for parameter in parameters:
            key = optimizer.get_param_id(parameter)
            start = int(optimizer.grad_start_offset[group][rank][key])
            offset = int(optimizer.grad_partition_insertion_offset[group][rank][key])
            length = min(parameter.numel() - start, size - offset)
            yield HeldRange(parameter, start, group, offset, length)


def _stage3_ranges(optimizer: Any) -> Iterator[HeldRange]:
    for parameters in optimizer.fp16_groups:
        for parameter in parameters:
            group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = optimizer._get_param_partition_rank(parameter) * parameter.partition_numel()
            length = max(0, min(parameter.partition_numel(), parameter.ds_numel - start))
            yield HeldRange(parameter, start, int(group), int(offset), length)


# The optimizer's state that this rank holds: fp32 master weights and AdamW's two moments.
#
# ZeRO keeps each of the three as a flat tensor for every parameter group, laid out alike. Here they
# are one list of fragments, each a flat range of one parameter, as the gradients are
# (``fragments.py``). All of them are views: what is written to a fragment is the state.
#
#     stage      a rank's fragments
#     0          every parameter, whole
#     1, 2       flat ranges: one partition of the parameters laid end to end
#     3          an equal flat range of every parameter


@dataclass(frozen=True)
class StateFragment:
    """Elements [start, start + len(weights)) of ``parameter``'s flattened local state, fp32."""

    parameter: nn.Parameter
    start: int
    weights: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def state_fragments(optimizer: Any) -> Iterator[StateFragment]:
    """This rank's fragments, padding left out; moments that do not exist yet are made, of zeros."""
    masters = master_partitions(optimizer)
    for held in held_ranges(optimizer):
        master = masters[held.group]
        moments = _moments(optimizer.optimizer, master)
        flat = (master.data, moments["exp_avg"], moments["exp_avg_sq"])
        views = [tensor.view(-1).narrow(0, held.offset, held.length) for tensor in flat]
        yield StateFragment(held.parameter, held.start, *views)


def load_state(optimizer: Any, steps_taken: int) -> None:
    """Lets the optimizer go on from fragments that were written to.

    The parameters that the model computes with are made from the master weights, on all ranks of
    the data axis: a collective over it.

    Args:
        optimizer: DeepSpeed's ZeRO optimizer.
        steps_taken: AdamW's step count, of which its bias correction is a function.
    """
    for master in master_partitions(optimizer):
        _moments(optimizer.optimizer, master)["step"].fill_(steps_taken)
    if partitions_parameters(optimizer):
        for sub_group in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)
    else:
        optimizer.update_lp_params()


def master_partitions(optimizer: Any) -> list[Tensor]:
    """The flat master weights of each parameter group (ZeRO-3: sub-group)."""
    if partitions_parameters(optimizer):
        return list(optimizer.fp32_partitioned_groups_flat)
    return list(optimizer.single_partition_of_fp32_groups)


def _moments(adamw: torch.optim.Optimizer, master: Tensor) -> dict[str, Tensor]:
    """torch's state of one flat parameter, which it makes in the first step."""
    state: dict[str, Tensor] = adamw.state[master]
    if not state:
        # As torch.optim.adam does for fused=True: an fp32 step count beside the parameter.
        state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
        state["exp_avg"] = torch.zeros_like(master.data)
        state["exp_avg_sq"] = torch.zeros_like(master.data)
    return state

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
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class GradientFragment:
    """Elements [start, start + len(values)) of ``parameter``'s flattened local gradient."""

    parameter: nn.Parameter
    start: int
    values: Tensor


def gradient_fragments(optimizer: Any) -> Iterator[GradientFragment]:
    """This rank's fragments, padding left out. Valid after the reduction and before the step."""
    if hasattr(optimizer, "fp16_groups"):
        yield from _stage3_fragments(optimizer)
    elif optimizer.cpu_offload:
        yield from _offloaded_fragments(optimizer)
    else:
        yield from _flat_partition_fragments(optimizer)


def _flat_partition_fragments(optimizer: Any) -> Iterator[GradientFragment]:
    for group, parameters in enumerate(optimizer.params_in_partition):
        partition = optimizer.averaged_gradients[group].flat_partition
        rank = dist.get_rank(optimizer.real_dp_process_group[group])
        for parameter in parameters:
            key = optimizer.get_param_id(parameter)
            start = int(optimizer.grad_start_offset[group][rank][key])
            offset = int(optimizer.grad_partition_insertion_offset[group][rank][key])
            length = min(parameter.numel() - start, partition.numel() - offset)
            yield GradientFragment(parameter, start, partition.narrow(0, offset, length))


def _offloaded_fragments(optimizer: Any) -> Iterator[GradientFragment]:
    # DeepSpeed copies to host memory without waiting, and waits only in its own step.
    optimizer._wait_for_offload_copies()
    for group, parameters in enumerate(optimizer.params_in_partition):
        partition = optimizer.single_partition_of_fp32_groups[group].grad.view(-1)
        for parameter in parameters:
            position = optimizer.grad_position[optimizer.get_param_id(parameter)]
            _, start, offset, length = (int(number) for number in position)
            yield GradientFragment(parameter, start, partition.narrow(0, offset, length))


def _stage3_fragments(optimizer: Any) -> Iterator[GradientFragment]:
    for parameters in optimizer.fp16_groups:
        for parameter in parameters:
            values, _ = optimizer._get_fp32_grad_state_partition(
                parameter, release_swap_buffers=True
            )
            start = optimizer._get_param_partition_rank(parameter) * parameter.partition_numel()
            length = max(0, min(parameter.partition_numel(), parameter.ds_numel - start))
            yield GradientFragment(parameter, start, values.view(-1).narrow(0, 0, length))

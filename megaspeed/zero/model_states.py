"""The parameters, gradients and optimizer states that a rank holds, at every ZeRO stage."""

from collections.abc import Iterator
from typing import Any

import deepspeed
from torch import Tensor, nn

from megaspeed.zero.engine import ZeroEngine
from megaspeed.zero.fragments import held_ranges, master_partitions, partitions_parameters

# What DeepSpeed's ZeRO optimizers hold, by what it is for.
#
#     stage      parameters              gradients                 optimizer states
#     0, 1, 2    flat buffer, of which   flat partition; and       master partition, two moments
#                parameters are views    ``parameter.grad``
#     3          flat partitions, and    flat partitions; and      the same
#                parameters kept whole   ``parameter.grad``
#
# For measurement only: which tensors these are, DeepSpeed 0.19.8 says nowhere.

# The parameters that the model computes with, as far as this rank holds them between two steps.


def held_parameters(engine: ZeroEngine) -> Iterator[Tensor | None]:
    """What the model computes with, and at ZeRO-3 the partitions it is gathered from."""
    for parameter in engine.module.parameters():
        yield parameter.data
        yield getattr(parameter, "ds_tensor", None)


def held_gradients(engine: ZeroEngine) -> Iterator[Tensor | None]:
    """Gradients of parameters, whole and partitioned, added up or about to be."""
    for parameter in engine.module.parameters():
        yield parameter.grad
        yield getattr(parameter, "grad_accum", None)
    optimizer = engine.optimizer
    yield getattr(optimizer, "grad_partitions_flat_buffer", None)
    for group in optimizer.averaged_gradients.values():
        yield getattr(group, "flat_partition", None)
    for master in master_partitions(optimizer):
        yield master.grad


def held_optimizer_states(engine: ZeroEngine) -> Iterator[Tensor | None]:
    """fp32 master weights and AdamW's moments."""
    optimizer = engine.optimizer
    yield from master_partitions(optimizer)
    for state in optimizer.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def allocates_for_communication(module: str) -> bool | None:
    """Whether tensors made by code of this Python module serve communication.

    None where the module does not decide: its caller does.
    """
    if module == "deepspeed.runtime.zero.linear":  # a linear layer's forward and backward
        return False
    if module.startswith(("deepspeed.runtime.zero.", "deepspeed.runtime.comm.")):
        return True
    own = ("megaspeed.zero.reductions", "megaspeed.zero.layer_gathers")
    return True if module in own else None


def parameter_fragments(
    module: nn.Module, optimizer: Any
) -> Iterator[tuple[nn.Parameter, int, Tensor]]:
    """(parameter, first element, flat values) of each: all of it, or with ZeRO-3 this rank's part.

    Padding is left out.
    """
    if partitions_parameters(optimizer):
        for held in held_ranges(optimizer):
            part: Tensor = held.parameter.ds_tensor  # type: ignore[attr-defined]  # DeepSpeed's
            yield held.parameter, held.start, part.view(-1).narrow(0, 0, held.length)
        return
    for parameter in module.parameters():
        yield parameter, 0, parameter.view(-1)


# Parameters as the model computes with them, whether ZeRO-3 has partitioned them or not.


def gather_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(full name, copy of the rank's whole tensor shard) of each parameter.

    A collective over the data axis.
    """
    for name, parameter in module.named_parameters():
        partitioned = hasattr(parameter, "ds_id")
        with deepspeed.zero.GatheredParameters([parameter], enabled=partitioned):
            value = parameter.detach().clone()
        yield name, value

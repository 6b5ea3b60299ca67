"""The parameters, gradients and optimizer states that a rank holds, at every ZeRO stage.

    stage      parameters              gradients                 optimizer states
    0, 1, 2    flat buffer, of which   flat partition; and       master partition, two moments
               parameters are views    ``parameter.grad``
    3          flat partitions, and    flat partitions; and      the same
               persistent parameters   ``parameter.grad``

DeepSpeed 0.19.8 does not document these tensors. The functions ``held_...`` are for measurement.
"""

from collections.abc import Iterator
from typing import Any

import deepspeed
from torch import Tensor, nn

from megaspeed.zero.engine import ZeroEngine
from megaspeed.zero.fragments import held_ranges, master_partitions, partitions_parameters


def held_parameters(engine: ZeroEngine) -> Iterator[Tensor | None]:
    """The model's parameters, and at ZeRO-3 their partitions."""
    for parameter in engine.module.parameters():
        yield parameter.data
        yield getattr(parameter, "ds_tensor", None)


def held_gradients(engine: ZeroEngine) -> Iterator[Tensor | None]:
    """Gradients, complete or partitioned, accumulated or not."""
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
    """Whether tensors that this Python module allocates are for communication.

    None if this depends on the caller of the module.
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
    """(parameter, first element, flat values) of the parameters that this rank holds between steps:
    the complete ones or, at ZeRO-3, this rank's part without padding.
    """
    if partitions_parameters(optimizer):
        for held in held_ranges(optimizer):
            part: Tensor = held.parameter.ds_tensor  # type: ignore[attr-defined]  # DeepSpeed's
            yield held.parameter, held.start, part.view(-1).narrow(0, 0, held.length)
        return
    for parameter in module.parameters():
        yield parameter, 0, parameter.view(-1)


def gather_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(full name, copy of the complete tensor shard) of each parameter; a collective over dp."""
    for name, parameter in module.named_parameters():
        partitioned = hasattr(parameter, "ds_id")
        with deepspeed.zero.GatheredParameters([parameter], enabled=partitioned):
            value = parameter.detach().clone()
        yield name, value

"""The parameters that the model computes with, as far as this rank holds them between two steps."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from megaspeed.zero.fragments import held_ranges, partitions_parameters


def held_parameters(
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

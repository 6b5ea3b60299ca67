"""Parameters as the model computes with them, whether ZeRO-3 has partitioned them or not."""

from collections.abc import Iterator

import deepspeed
from torch import Tensor, nn


def whole_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(full name, copy of the rank's whole tensor shard) of each parameter.

    A collective over the data axis.
    """
    for name, parameter in module.named_parameters():
        partitioned = hasattr(parameter, "ds_id")
        with deepspeed.zero.GatheredParameters([parameter], enabled=partitioned):
            value = parameter.detach().clone()
        yield name, value

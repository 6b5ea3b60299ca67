"""Gradients of key/value heads that stand on several tensor ranks.

With fewer key/value heads than tensor ranks each head is replicated on neighbouring ranks, and each
replica sees only the query heads of its own rank. The head's gradient is the sum over its replicas.
The sum runs over the whole axis, with each rank's part put at its head's place in a zero tensor:
key/value heads are few, so the tensor is small, and no further process group is needed.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaspeed.tensor_parallel.axis import TensorAxis


@dataclass(frozen=True, kw_only=True)
class SharedRows:
    """The local rows from ``first`` on are a copy of part ``index`` of ``count`` over the axis."""

    first: int
    index: int
    count: int


def sum_shared_rows(parameter: Tensor, shared: SharedRows, axis: TensorAxis) -> Tensor:
    """The same tensor; the gradient of its shared rows is summed over the ranks that hold them."""
    return _SumSharedRows.apply(parameter, shared, axis)


class _SumSharedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, shared: SharedRows, axis: TensorAxis) -> Tensor:
        ctx.shared, ctx.axis = shared, axis
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        shared: SharedRows = ctx.shared
        own = gradient[shared.first :]
        parts = own.new_zeros((shared.count, *own.shape))
        parts[shared.index] = own
        with ctx.axis.timed():
            dist.all_reduce(parts, group=ctx.axis.group)
        return torch.cat((gradient[: shared.first], parts[shared.index])), None, None

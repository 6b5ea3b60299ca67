"""A linear layer on an input that is split along the sequence, which keeps only its own part.

    forward    y = gather(x) A^T + b
    backward   dx = reduce-scatter(dy A),  dA = dy^T gather(x),  db = sum(dy)

The input is gathered again in the backward pass, so that a rank stores (B, S/tp, D) for it and not
(B, S, D): without this, sequence parallelism would save little (Korthikanti et al. 2022, section
4.2.2).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaspeed.tensor_parallel.axis import TensorAxis
from megaspeed.tensor_parallel.collectives import all_gather_sequence, reduce_scatter_sum


def gathered_linear(x: Tensor, weight: Tensor, bias: Tensor | None, axis: TensorAxis) -> Tensor:
    """(B, S/tp, in) -> (B, S, rows of ``weight``); ``x`` gets its gradient summed over the axis."""
    if axis.size == 1:
        return F.linear(x, weight, bias)
    return _GatheredLinear.apply(x, weight, bias, axis)


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: TensorAxis
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.has_bias = axis, bias is not None
        return F.linear(all_gather_sequence(x, axis), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, 1)  # (B S, rows)
        inputs = all_gather_sequence(x, ctx.axis).flatten(0, 1)  # (B S, in)
        x_gradient = reduce_scatter_sum(gradient @ weight, ctx.axis)
        bias_gradient = rows.sum(0) if ctx.has_bias else None
        return x_gradient, rows.t() @ inputs, bias_gradient, None

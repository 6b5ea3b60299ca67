"""Linear layers and embedding that are split over the tensor axis.

    x --f--> [column-parallel A_i] -> nonlinearity -> [row-parallel B_i] --g--> sum_i

A pair of them needs one collective forward and one backward (Shoeybi et al. 2019, section 3; f and
g are in ``collectives``). Each layer holds only its shard, which ``shards`` determines.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megaspeed.tensor_parallel.collectives import (
    TensorAxis,
    all_gather_sequence,
    reduce_from_tensor_axis,
    reduce_scatter_sequence,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megaspeed.tensor_parallel.weight_gradients import MatrixLayer, weight_gradient

_META = torch.device("meta")


def column_parallel_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, axis: TensorAxis, key: Tensor | None = None
) -> Tensor:
    """A linear layer whose weight is split by rows, so that each rank has a part of its output.

        forward    y = x A^T + b
        backward   dx = all-reduce(dy A),  dA = dy^T x,  db = sum(dy)

    With sequence parallelism, the input is also split:

        forward    y = gather(x) A^T + b
        backward   dx = reduce-scatter(dy A),  dA = dy^T gather(x),  db = sum(dy)

    The input is gathered again in backward, so a rank saves only (B, S/tp, in) for it. Without
    this, sequence parallelism would save little memory (Korthikanti et al. 2022, section 4.2.2).

    The backward communicates while it multiplies. With sequence parallelism, the input is gathered
    while dy A is computed. In both cases, dx is summed while dA and db are computed. If the
    products take longer than the collectives, the collectives add no time.

    Returns:
        (B, S, rows of ``weight``).
    """
    if axis.size == 1:
        return _linear(x, weight, bias, key)
    return _ColumnParallelLinear.apply(x, weight, bias, axis, key)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, key: Tensor | None) -> Tensor:
    """y = x A^T + b on one rank. If there is a ``key``, a product adds dA to its sum."""
    return F.linear(x, weight, bias) if key is None else _Linear.apply(x, weight, bias, key)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, key: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.key, ctx.has_bias = key, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, 1)  # (B S, out)
        weight_gradient(rows, x.flatten(0, 1), ctx.key)
        bias_gradient = rows.sum(0) if ctx.has_bias else None
        return (rows @ weight).view(x.shape), None, bias_gradient, None


class _ColumnParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: TensorAxis,
        key: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.key, ctx.has_bias = axis, key, bias is not None
        return F.linear(all_gather_sequence(x, axis) if axis.sequence_parallel else x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        axis: TensorAxis = ctx.axis
        rows = gradient.flatten(0, 1)  # (B S, rows)
        inputs = x.flatten(0, 1)  # (B S, in) or (B S / tp, in)
        if axis.sequence_parallel:
            gathering = start_all_gather(inputs, axis)
            x_gradient = rows @ weight
            inputs = gathering.wait()
            summing = start_reduce_scatter(x_gradient, axis)
        else:
            summing = start_all_reduce(rows @ weight, axis)
        # Must stay before ``wait``, so that the sum of dx runs beside these two.
        of_weight = weight_gradient(rows, inputs, ctx.key)
        of_bias = rows.sum(0) if ctx.has_bias else None
        return summing.wait().view(x.shape), of_weight, of_bias, None, None


@dataclass(frozen=True, kw_only=True)
class SharedRows:
    """The local rows from ``first`` on are key/value heads that other tensor ranks hold, too.

    They are part ``index`` of ``count`` different parts on the axis.
    """

    first: int
    index: int
    count: int


def sum_shared_rows(parameter: Tensor, shared: SharedRows, axis: TensorAxis) -> Tensor:
    """Return the tensor unchanged. In backward, sums gradients of shared rows over their ranks.

    With fewer key/value heads than tensor ranks, each head is replicated on neighbouring ranks, and
    each replica receives gradients only from the query heads of its own rank. The sum is one
    all-reduce over the axis: each rank puts its part at the place of its head in a tensor of zeros.
    Key/value heads are few, so this tensor is small, and no other process group is needed.
    """
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


class ColumnParallelLinear(MatrixLayer):
    """y_i = x A_i^T + b_i: this rank's rows of the weight, this rank's part of the output.

    Args:
        in_features: width of ``x``.
        local_rows: output features of this rank.
        bias: whether there is one; it is split like the output.
        axis: the tensor axis.
        shared_rows: rows that other ranks hold, too.

    Input (B, S, in), or (B, S/tp, in) with sequence parallelism; output (B, S, local_rows).
    """

    def __init__(
        self,
        in_features: int,
        local_rows: int,
        *,
        bias: bool,
        axis: TensorAxis,
        shared_rows: SharedRows | None = None,
    ) -> None:
        super().__init__()
        self.axis = axis
        self.shared_rows = shared_rows
        self.weight = nn.Parameter(torch.empty(local_rows, in_features, device=_META))
        self.bias = nn.Parameter(torch.empty(local_rows, device=_META)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.shared_rows is not None:
            weight = sum_shared_rows(weight, self.shared_rows, self.axis)
            bias = None if bias is None else sum_shared_rows(bias, self.shared_rows, self.axis)
        return column_parallel_linear(x, weight, bias, self.axis, self.key)


class RowParallelLinear(MatrixLayer):
    """y = sum_i x_i B_i^T + b: this rank's columns of the weight, and the full bias.

    The bias is added once, after the sum.

    Input (B, S, local_columns); output (B, S, out), or (B, S/tp, out) with sequence parallelism.
    """

    def __init__(
        self, local_columns: int, out_features: int, *, bias: bool, axis: TensorAxis
    ) -> None:
        super().__init__()
        self.axis = axis
        self.weight = nn.Parameter(torch.empty(out_features, local_columns, device=_META))
        self.bias = nn.Parameter(torch.empty(out_features, device=_META)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.axis.size == 1:
            return _linear(x, self.weight, self.bias, self.key)
        partial = _linear(x, self.weight, None, self.key)
        if self.axis.sequence_parallel:
            y = reduce_scatter_sequence(partial, self.axis)
        else:
            y = reduce_from_tensor_axis(partial, self.axis)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """The rows ``vocabulary`` of the token embedding, then padding.

    Tokens of other ranks give zero here; the sum over the axis adds their rows.

    Input (B, S) token ids; output (B, S, D), the same on every rank.
    """

    def __init__(self, local_rows: int, width: int, *, vocabulary: range, axis: TensorAxis) -> None:
        super().__init__()
        self.axis = axis
        self.vocabulary = vocabulary
        self.weight = nn.Parameter(torch.empty(local_rows, width, device=_META))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.axis.size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.vocabulary.start
        absent = (local < 0) | (local >= len(self.vocabulary))
        rows = F.embedding(local.masked_fill(absent, 0), self.weight)
        return reduce_from_tensor_axis(rows.masked_fill(absent.unsqueeze(-1), 0.0), self.axis)

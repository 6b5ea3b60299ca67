"""Column- and row-parallel linear layers, vocabulary-parallel embedding, norms of a part.

    x --f--> [column-parallel A_i] -> nonlinearity -> [row-parallel B_i] --g--> sum_i

A pair of them needs one collective forward and one backward (Shoeybi et al. 2019, section 3; f and
g are in ``collectives``). Each layer holds only its own shard; which shard that is, ``plan`` says.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaspeed.tensor_parallel.axis import TensorAxis
from megaspeed.tensor_parallel.collectives import (
    copy_to_tensor_axis,
    reduce_from_tensor_axis,
    reduce_scatter_sequence,
    sum_gradients,
)
from megaspeed.tensor_parallel.gathered_linear import gathered_linear
from megaspeed.tensor_parallel.shared_rows import SharedRows, sum_shared_rows

_META = torch.device("meta")


class ColumnParallelLinear(nn.Module):
    """y_i = x A_i^T + b_i: this rank's rows of the weight, this rank's part of the output.

    Args:
        in_features: width of ``x``, whole on every rank.
        local_rows: output features of this rank.
        bias: whether there is one (split like the output).
        axis: the tensor axis.
        shared_rows: rows that other ranks hold too, whose gradients are summed over those ranks.

    Input (B, S, in) - (B, S/tp, in) with sequence parallelism - output (B, S, local_rows).
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
        """Applies this rank's rows to ``x``."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.shared_rows is not None:
            weight = sum_shared_rows(weight, self.shared_rows, self.axis)
            bias = None if bias is None else sum_shared_rows(bias, self.shared_rows, self.axis)
        if self.axis.sequence_parallel:
            return gathered_linear(x, weight, bias, self.axis)
        return F.linear(copy_to_tensor_axis(x, self.axis), weight, bias)


class RowParallelLinear(nn.Module):
    """y = sum_i x_i B_i^T + b: this rank's columns of the weight, the whole bias.

    The bias is added once, after the sum.

    Input (B, S, local_columns), output (B, S, out) - (B, S/tp, out) with sequence parallelism.
    """

    def __init__(
        self, local_columns: int, out_features: int, *, bias: bool, axis: TensorAxis
    ) -> None:
        super().__init__()
        self.axis = axis
        self.weight = nn.Parameter(torch.empty(out_features, local_columns, device=_META))
        self.bias = nn.Parameter(torch.empty(out_features, device=_META)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies by this rank's columns and sums over the axis."""
        if self.axis.size == 1:
            return F.linear(x, self.weight, self.bias)
        partial = F.linear(x, self.weight)
        if not self.axis.sequence_parallel:
            y = reduce_from_tensor_axis(partial, self.axis)
            return y if self.bias is None else y + self.bias
        y = reduce_scatter_sequence(partial, self.axis)
        if self.bias is None:
            return y
        # Each rank adds the bias to its own part of the sequence, so its gradient is one summand.
        (bias,) = sum_gradients(self.axis, self.bias)
        return y + bias


class VocabParallelEmbedding(nn.Module):
    """The token embedding's rows ``vocabulary``, then padding.

    A token outside gives zero here, and the sum over the axis brings its row from another rank.

    Input (B, S) token ids, output (B, S, D), whole on every rank.
    """

    def __init__(self, local_rows: int, width: int, *, vocabulary: range, axis: TensorAxis) -> None:
        super().__init__()
        self.axis = axis
        self.vocabulary = vocabulary
        self.weight = nn.Parameter(torch.empty(local_rows, width, device=_META))

    def forward(self, tokens: Tensor) -> Tensor:
        """Looks up ``tokens`` and sums over the axis."""
        if self.axis.size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.vocabulary.start
        absent = (local < 0) | (local >= len(self.vocabulary))
        rows = F.embedding(local.masked_fill(absent, 0), self.weight)
        return reduce_from_tensor_axis(rows.masked_fill(absent.unsqueeze(-1), 0.0), self.axis)


class PartialLayerNorm(nn.LayerNorm):
    """LayerNorm of a part of the sequence; the gradients of weight and bias are summed."""

    axis: TensorAxis

    def forward(self, x: Tensor) -> Tensor:
        """Normalises ``x`` (B, S/tp, D) over D."""
        weight, bias = sum_gradients(self.axis, self.weight, self.bias)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class PartialRMSNorm(nn.RMSNorm):
    """RMSNorm of a part of the sequence or of the heads; the weight's gradient is summed."""

    axis: TensorAxis

    def forward(self, x: Tensor) -> Tensor:
        """Normalises ``x`` (B, S/tp, D) or (B, S, heads, K) over the last dim."""
        (weight,) = sum_gradients(self.axis, self.weight)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)

"""Cross-entropy over a vocabulary that is split along the tensor axis, without gathering logits.

    loss = log(sum_j exp(z_j - m)) - (z_t - m),  m = max_j z_j,  for logits z and target t

Each rank reduces over its own columns first, so only three numbers a token are communicated: first
m, then the sum and z_t - m (Shoeybi et al. 2019, section 3). The gradient, softmax - one-hot, is
local.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaspeed.model.micro_batch import NOT_COUNTED
from megaspeed.tensor_parallel.collectives import TensorAxis


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, vocabulary: range, axis: TensorAxis
) -> Tensor:
    """The loss of every token, in fp32.

    Args:
        logits: (B, S, columns), this rank's columns; those after ``len(vocabulary)`` are padding
            and do not affect the loss.
        targets: (B, S) token ids of the full vocabulary, or ``NOT_COUNTED``.
        vocabulary: the token ids of this rank's columns.
        axis: the tensor axis.

    Returns:
        (B, S) losses in nats, the same on every rank of the axis; zero if a target is not counted.
    """
    return _VocabParallelCrossEntropy.apply(logits, targets, vocabulary, axis)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocabulary: range, axis: TensorAxis
    ) -> Tensor:
        z = logits[..., : len(vocabulary)]
        maximum = _row_maximum(z, axis).float()
        shifted = z - maximum.unsqueeze(-1)  # fp32, the only large tensor that is saved
        local = targets - vocabulary.start
        here = (local >= 0) & (local < len(vocabulary))
        local = local.masked_fill(~here, 0).unsqueeze(-1)
        target_logit = (
            shifted.gather(-1, local).squeeze(-1).masked_fill(~here, 0.0)
            if len(vocabulary)
            else torch.zeros_like(maximum)
        )
        exponentials = shifted.exp_()
        sums = torch.stack((exponentials.sum(dim=-1), target_logit))
        if axis.size > 1:
            with axis.timed():
                dist.all_reduce(sums, group=axis.group)
        counted = targets != NOT_COUNTED
        softmax = exponentials.div_(sums[0].unsqueeze(-1))
        ctx.save_for_backward(softmax, local, here, counted)
        ctx.columns, ctx.dtype = logits.shape[-1], logits.dtype
        return (sums[0].log() - sums[1]).masked_fill(~counted, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, local, here, counted = ctx.saved_tensors
        scale = gradient.masked_fill(~counted, 0.0).unsqueeze(-1)
        z_gradient = softmax.mul_(scale)  # in place: the softmax is not used again
        width = softmax.shape[-1]
        if width:
            z_gradient.scatter_add_(-1, local, -scale * here.unsqueeze(-1))
        # One tensor for dtype and padding, so that nothing is larger than the logits.
        padded = z_gradient.new_empty((*z_gradient.shape[:-1], ctx.columns), dtype=ctx.dtype)
        padded[..., :width] = z_gradient
        padded[..., width:] = 0.0
        return padded, None, None, None


def _row_maximum(z: Tensor, axis: TensorAxis) -> Tensor:
    """max_j z_j over the columns of all ranks. A rank that has only padding contributes -inf."""
    maximum = z.amax(dim=-1) if z.shape[-1] else z.new_full(z.shape[:-1], float("-inf"))
    if axis.size > 1:
        with axis.timed():
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=axis.group)
    return maximum

"""The projection to the vocabulary and its cross-entropy, which store no logits.

    x (B, S, D) -> rows (n, D) --chunk by chunk--> logits (c, V/tp) -> losses (c,)
                                                   gradient of the logits, in their memory
                                                     -> gradient of x, kept for the backward
                                                     -> added to the gradient of the weight

Logits are the largest activation of a model with a large vocabulary. The loss of a step is the sum
over all tokens times a known factor. So the gradient of the logits is known in the forward: each
chunk of logits is differentiated as soon as it is computed, and its gradient overwrites it.
Liger Kernel (Hsu et al. 2024, section 3.2, "FusedLinearCrossEntropy") does the same.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaspeed.model.micro_batch import NOT_COUNTED
from megaspeed.tensor_parallel.collectives import (
    TensorAxis,
    all_gather_sequence,
    reduce_scatter_sum,
    start_all_reduce,
)
from megaspeed.tensor_parallel.drawing import Draw
from megaspeed.tensor_parallel.shards import tokens_of_a_chunk
from megaspeed.tensor_parallel.weight_gradients import add_product

GradientSum = Callable[[nn.Parameter], Tensor]
"""A parameter -> the tensor to which its gradient is added, in fp32 or in the parameter's type."""


class TokenLosses(NamedTuple):
    """Numbers of each token, in fp32, the same on every rank of the axis; zero if its target is not
    counted.
    """

    losses: Tensor  # (n,) cross-entropy in nats
    z_losses: Tensor | None  # (n,) log(Z)^2, Z = sum_j exp(z_j); None without a z-loss


class VocabParallelLoss:
    """Sum of the losses of a micro-batch, from hidden states and the weight of the head.

    Args:
        vocabulary: the token ids of this rank's rows of the weight; the rows after them are
            padding.
        axis: the tensor axis.
        z_loss: coefficient of log(Z)^2 in the gradients (Chowdhery et al. 2022, "PaLM", section 5).
    """

    def __init__(self, vocabulary: range, axis: TensorAxis, z_loss: float = 0.0) -> None:
        self.axis = axis
        self._vocabulary = vocabulary
        self._z_loss = z_loss
        self.z_sum: Tensor | None = None
        """fp32 scalar to which each training forward adds log(Z)^2 of its tokens; None if it need
        not be added up."""
        self.chunk_losses = self.cross_entropy
        """``cross_entropy``, or its compiled form."""

    def __call__(
        self,
        x: Tensor,
        projection: nn.Module,
        targets: Tensor,
        *,
        scale: float,
        gradient_sum: GradientSum,
    ) -> Tensor:
        """Compute the loss and, if gradients are enabled, the gradients of ``scale`` times it.

        Args:
            x: (B, S, D), or (B, S/tp, D) with sequence parallelism.
            projection: its ``weight`` is (columns, D); it has no bias.
            targets: (B, S) token ids of the full vocabulary, or ``NOT_COUNTED``.
            scale: multiplies the gradients, but not the loss that is returned.
            gradient_sum: returns the tensor to which the gradient of the weight is added.

        Returns:
            The sum of the losses in nats, an fp32 scalar, the same on every rank of the axis. Call
            ``backward`` on this scalar itself. Any other factor of it would be ignored, because the
            gradient of ``x`` is already computed.
        """
        weight = projection.weight
        assert isinstance(weight, nn.Parameter)
        total = gradient_sum(weight) if torch.is_grad_enabled() else None
        loss: Tensor = _Loss.apply(x, weight.detach(), targets, scale, self, total)
        return loss

    def next_token(
        self, x: Tensor, output: nn.Module, targets: Tensor, *, draw: Draw, **_: object
    ) -> Tensor:
        """(2, B) in fp64: the largest score of each row at its counted target, and its token id.

        Only this rank's columns count, without padding. If no target is counted, the score is -inf.
        A counted target is the number of the prompt.
        """
        hidden = all_gather_sequence(x, self.axis) if self.axis.sequence_parallel else x
        counted = targets != NOT_COUNTED
        place = counted.int().argmax(dim=1).view(-1, 1, 1)
        last = hidden.take_along_dim(place, dim=1).squeeze(1)  # (B, D)
        z = (last @ output.get_parameter("weight").t()).double().nan_to_num(nan=-math.inf)
        z[:, len(self._vocabulary) :] = -math.inf
        z.masked_fill_(~counted.any(dim=1, keepdim=True), -math.inf)
        start = self._vocabulary.start
        prompts = targets.take_along_dim(place.squeeze(2), dim=1).squeeze(1)
        scores = draw.scores(z, range(start, start + z.shape[1]), prompts, self.axis)
        largest, ids = scores.max(dim=1)
        return torch.stack((largest, ids + start))

    def cross_entropy(self, logits: Tensor, targets: Tensor, scales: Tensor | None) -> TokenLosses:
        """The loss of every token, in fp32, without gathering the logits.

            loss = log(sum_j exp(z_j - m)) - (z_t - m),  m = max_j z_j,  for logits z and target t

        Each rank reduces over its own columns first, so only three numbers a token are
        communicated: first m, then the sum and z_t - m (Shoeybi et al. 2019, section 3). The
        gradient, softmax - one-hot, is local. That of a z-loss with coefficient c adds
        2 c log(Z) softmax.

        Args:
            logits: (n, columns), this rank's columns; padding does not affect the loss. They are
                replaced by their gradient, that of the sum of ``scales`` times the losses (with
                the z-losses, times their coefficient).
            targets: (n,).
            scales: (n,), zero for targets that are not counted. If None, the content of ``logits``
                is undefined afterwards.

        """
        width = len(self._vocabulary)
        z = logits[:, :width]
        # Sent in the logits' type, in which a maximum is exact.
        maximum = self._row_maximum(z).float()
        local = targets - self._vocabulary.start
        here = (local >= 0) & (local < width)
        local = local.masked_fill(~here, 0).unsqueeze(-1)
        target_logit = torch.zeros_like(maximum)
        if width:
            target_logit = (z.gather(-1, local).squeeze(-1) - maximum).masked_fill(~here, 0.0)
        # In place if the logits are fp32. Otherwise, a copy in fp32 is the only other such tensor.
        exponentials = (z if z.dtype == torch.float32 else z.float()).sub_(maximum.unsqueeze(-1))
        exponentials.exp_()
        sums = torch.stack((exponentials.sum(dim=-1), target_logit))
        if self.axis.size > 1:
            with self.axis.timed():
                dist.all_reduce(sums, group=self.axis.group)
        log_sum, z_losses = sums[0].log(), None
        if self._z_loss:
            log_z = log_sum + maximum
            z_losses = log_z.square()
        if scales is not None:
            factors = scales / sums[0]
            if self._z_loss:
                factors = factors * (1.0 + 2.0 * self._z_loss * log_z)
            at_target = (target_logit.exp() * factors - scales).unsqueeze(-1)
            here = here.unsqueeze(-1)
            exponentials.mul_(factors.unsqueeze(-1))  # softmax times scale
            if torch.compiler.is_compiling():  # a scatter would need another tensor of this size
                columns = torch.arange(width, device=z.device)
                z.copy_(torch.where((columns == local) & here, at_target, exponentials))
            elif width:  # in fp32, because torch's scatter on a CPU copies 16-bit numbers
                elsewhere = exponentials.gather(-1, local)  # another rank has the target
                exponentials.scatter_(-1, local, torch.where(here, at_target, elsewhere))
                if exponentials is not z:
                    z.copy_(exponentials)
            logits[:, width:] = 0.0
        is_ignored = targets == NOT_COUNTED
        losses = (log_sum - sums[1]).masked_fill(is_ignored, 0.0)
        if z_losses is not None:
            z_losses = z_losses.masked_fill(is_ignored, 0.0)
        return TokenLosses(losses, z_losses)

    def _row_maximum(self, z: Tensor) -> Tensor:
        """max_j z_j over the columns of all ranks. A rank with only padding contributes -inf."""
        maximum = z.amax(dim=-1) if z.shape[-1] else z.new_full(z.shape[:-1], float("-inf"))
        if self.axis.size > 1:
            with self.axis.timed():
                dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=self.axis.group)
        return maximum


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,  # detached: autograd computes no gradient of it
        targets: Tensor,
        scale: float,
        loss: VocabParallelLoss,
        weight_gradient: Tensor | None,
    ) -> Tensor:
        axis = loss.axis
        hidden = all_gather_sequence(x, axis) if axis.sequence_parallel else x  # (B, S, D)
        rows, targets = hidden.flatten(0, 1), targets.flatten()
        gradient, scales = None, None
        if weight_gradient is not None:
            gradient = torch.empty_like(rows)
            scales = (targets != NOT_COUNTED).float() * scale
        total = rows.new_zeros((), dtype=torch.float32)
        size = tokens_of_a_chunk(len(rows), len(weight))
        for start in range(0, len(rows), size):
            chunk = slice(start, start + size)
            logits = rows[chunk] @ weight.t()
            chunk_scales = None if scales is None else scales[chunk]
            losses, z_losses = loss.chunk_losses(logits, targets[chunk], chunk_scales)
            total += losses.sum()
            if z_losses is not None and scales is not None and loss.z_sum is not None:
                loss.z_sum += z_losses.sum()
            if gradient is not None and weight_gradient is not None:
                torch.mm(logits, weight, out=gradient[chunk])
                add_product(weight_gradient, logits, rows[chunk])
            del logits  # before those of the next chunk are computed
        if gradient is not None:
            ctx.save_for_backward(_summed(gradient.view_as(hidden), axis))
        return total

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient, None, None, None, None, None


def _summed(gradient: Tensor, axis: TensorAxis) -> Tensor:
    """The sum over the axis of ``gradient``, which each rank has computed from its own columns.

    With sequence parallelism, the result is this rank's part of the sum. May overwrite
    ``gradient``.
    """
    if axis.sequence_parallel:
        return reduce_scatter_sum(gradient, axis)
    return gradient if axis.size == 1 else start_all_reduce(gradient, axis).wait()

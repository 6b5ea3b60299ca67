"""Conjugate collectives: each one's backward is the other's forward.

Column- and row-parallel layers come in pairs (Shoeybi et al. 2019, Megatron-LM, section 3):

    f = copy_to_tensor_axis      forward identity              backward all-reduce
    g = reduce_from_tensor_axis  forward all-reduce            backward identity

With sequence parallelism (Korthikanti et al. 2022, section 4.2.2), activations between the pairs
are split along the sequence, and f and g become

    gathered_linear (its input)  forward all-gather            backward reduce-scatter
    reduce_scatter_sequence      forward reduce-scatter        backward all-gather

``split_sequence`` takes this rank's part of an activation that is the same on all ranks.
Hidden states are (B, S, D), the sequence is dim 1. Every function is the identity on an axis of one
rank.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaspeed.topology.activity import Timeline


@dataclass(frozen=True)
class TensorAxis:
    """The tensor axis of one rank."""

    group: dist.ProcessGroup | None  # may be None if ``size`` is 1: then no collective is called
    rank: int
    size: int
    sequence_parallel: bool = False  # whether activations between blocks are split
    timeline: Timeline | None = None  # times the collectives

    def timed(self) -> AbstractContextManager[None]:
        """A context for each collective over this axis. Compiled code has none: it is not timed."""
        if self.timeline is None or torch.compiler.is_compiling():
            return nullcontext()
        return self.timeline.part("tensor")


_Collective = Callable[[Tensor, TensorAxis], Tensor]

_SEQUENCE_DIM = 1

# torch 2.13 deprecates the old names of these two collectives; torch 2.11 has only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy_to_tensor_axis(x: Tensor, axis: TensorAxis) -> Tensor:
    """f: returns ``x``; sums its gradient over the axis. For inputs of column-parallel layers."""
    return x if axis.size == 1 else _Conjugate.apply(x, axis, _identity, all_reduce)


def reduce_from_tensor_axis(x: Tensor, axis: TensorAxis) -> Tensor:
    """g: sums ``x`` over the axis; keeps its gradient. For outputs of row-parallel layers."""
    return x if axis.size == 1 else _Conjugate.apply(x, axis, all_reduce, _identity)


def reduce_scatter_sequence(x: Tensor, axis: TensorAxis) -> Tensor:
    """This rank's (B, S/tp, D) of the sum over the axis; the gradient is gathered."""
    if axis.size == 1:
        return x
    return _Conjugate.apply(x, axis, reduce_scatter_sum, all_gather_sequence)


def split_sequence(x: Tensor, axis: TensorAxis) -> Tensor:
    """This rank's (B, S/tp, D) of a replicated ``x`` (B, S, D); the gradient is gathered."""
    if axis.size == 1:
        return x
    return _Conjugate.apply(x, axis, _own_chunk, all_gather_sequence)


def all_reduce(x: Tensor, axis: TensorAxis) -> Tensor:
    """A new tensor with the sum of ``x`` over the axis; no gradient."""
    total = x.clone(memory_format=torch.contiguous_format)
    with axis.timed():
        dist.all_reduce(total, group=axis.group)
    return total


def all_gather_sequence(x: Tensor, axis: TensorAxis) -> Tensor:
    """The ranks' parts (B, S/tp, ...) as one (B, S, ...); no gradient."""
    # The collective concatenates along dim 0, so the sequence is moved there and back.
    part = x.transpose(0, _SEQUENCE_DIM).contiguous()
    full = part.new_empty((part.shape[0] * axis.size, *part.shape[1:]))
    with axis.timed():
        _all_gather(full, part, group=axis.group)
    return full.transpose(0, _SEQUENCE_DIM).contiguous()


def reduce_scatter_sum(x: Tensor, axis: TensorAxis) -> Tensor:
    """This rank's (B, S/tp, ...) of the sum over the axis of ``x`` (B, S, ...); no gradient."""
    full = x.transpose(0, _SEQUENCE_DIM).contiguous()
    part = full.new_empty((full.shape[0] // axis.size, *full.shape[1:]))
    with axis.timed():
        _reduce_scatter(part, full, group=axis.group)
    return part.transpose(0, _SEQUENCE_DIM).contiguous()


def _own_chunk(x: Tensor, axis: TensorAxis) -> Tensor:
    return x.chunk(axis.size, dim=_SEQUENCE_DIM)[axis.rank].contiguous()


def _identity(x: Tensor, axis: TensorAxis) -> Tensor:
    return x.view_as(x)


class _Conjugate(torch.autograd.Function):
    """Applies ``forward(x, axis)``; the gradient of ``x`` is ``backward(gradient, axis)``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: TensorAxis, forward: _Collective, backward: _Collective
    ) -> Tensor:
        ctx.axis, ctx.conjugate = axis, backward
        return forward(x, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.conjugate(gradient, ctx.axis), None, None, None

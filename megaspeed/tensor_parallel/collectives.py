"""Collectives over the tensor and the context axis, and autograd functions that use them.

Column- and row-parallel layers come in pairs (Shoeybi et al. 2019, Megatron-LM, section 3). A pair
begins with f and ends with g. These two are conjugate: each one's backward is the other's forward.

    f = input of a column-parallel layer   forward identity         backward all-reduce
    g = reduce_from_tensor_axis            forward all-reduce       backward identity

With sequence parallelism (Korthikanti et al. 2022, section 4.2.2), activations between the pairs
are split over the axis, and f and g become

    input of a column-parallel layer       forward all-gather       backward reduce-scatter
    reduce_scatter_sequence                forward reduce-scatter   backward all-gather

f is a part of ``layers.column_parallel_linear``, because its backward overlaps with matrix
products. ``split_sequence`` takes this rank's part of an activation that all ranks have.

Hidden states are (B, S, D). The B S tokens are split into tp equal parts, row after row:

    rows of B 2, S 4       a b c d | e f g h
    parts of tp 4          a b | c d | e f | g h     part r is on rank r

So the parts lie one after another in memory, and no collective needs a transposed copy. A part has
the shape (B, S/tp, D), although its row b need not be a part of row b of the batch. This changes no
result, because everything between the pairs is computed for each token separately. Only dropout
masks depend on where a token is (``MaskShard``). Every function is the identity on an axis of one
rank.

``mean_over_tensor_axis`` is its own conjugate: both all-reduce. The context axis (``context``) and
the expert axis (``experts``) exchange rows of tensors, with the conjugate pairs

    exchange_rows          forward all-to-all              backward all-to-all
    gather_rows            forward all-gather              backward reduce-scatter
    all_gather_parts       forward all-gather              backward reduce-scatter
    reduce_scatter_parts   forward reduce-scatter          backward all-gather
    exchange_some_rows     forward all-to-all              backward all-to-all
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megaspeed.config.model import ContextMethod, ExpertExchange
from megaspeed.model.sequence_part import SequencePart
from megaspeed.topology.activity import Part, Timeline


@dataclass(frozen=True)
class GroupAxis:
    """The place of this rank on an axis, and the axis's process group."""

    group: dist.ProcessGroup | None = None  # may be None if ``size`` is 1: nothing is sent
    rank: int = 0
    size: int = 1
    timeline: Timeline | None = None  # times the collectives
    part: ClassVar[Part]  # as which they are timed

    def timed(self) -> AbstractContextManager[None]:
        """A context for each collective over this axis. Compiled code has none: it is not timed."""
        if self.timeline is None or torch.compiler.is_compiling():
            return nullcontext()
        return self.timeline.part(self.part)

    @property
    def name(self) -> str:
        """The name by which compiled code finds the group."""
        assert self.group is not None, "an axis of several ranks has a group"
        return self.group.group_name


@dataclass(frozen=True)
class TensorAxis(GroupAxis):
    sequence_parallel: bool = False  # whether activations between blocks are split
    part = "tensor"


@dataclass(frozen=True)
class ContextAxis(GroupAxis):
    method: ContextMethod = "ulysses"
    part = "context"

    @property
    def tokens(self) -> SequencePart:
        return SequencePart(self.method, self.rank, self.size)


@dataclass(frozen=True)
class ExpertAxis(GroupAxis):
    method: ExpertExchange = "all_to_all"
    part = "expert"


_Axis = TypeVar("_Axis", bound=GroupAxis)
_Collective = Callable[[Tensor, _Axis], Tensor]

# torch 2.13 deprecates the old names of these two collectives; torch 2.11 has only the old names.
all_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# torch.compile translates a collective to these operations only if the wait follows at once. Called
# directly, they leave the wait as an operation of its own, which keeps its place in the graph.
_compiled: Any = torch.ops._c10d_functional


class Pending:
    """A collective that has been started. Its result may be used only after ``wait``."""

    def __init__(self, result: Tensor, work: Any, axis: GroupAxis) -> None:
        self._result, self._work, self._axis = result, work, axis

    def wait(self) -> Tensor:
        """The result. On a GPU, the current stream waits, and the host does not."""
        if torch.compiler.is_compiling():
            waited: Tensor = _compiled.wait_tensor(self._result)
            return waited
        with self._axis.timed():
            self._work.wait()
        return self._result


def start_all_reduce(x: Tensor, axis: TensorAxis) -> Pending:
    """Start to sum ``x`` over the axis, in place. ``x`` must be contiguous."""
    if torch.compiler.is_compiling():  # the compiler decides whether it is in place
        return Pending(_compiled.all_reduce(x, "sum", axis.name), None, axis)
    return Pending(x, dist.all_reduce(x, group=axis.group, async_op=True), axis)


def start_all_gather(part: Tensor, axis: GroupAxis) -> Pending:
    """Start to concatenate the ranks' parts (n/tp, ...) to (n, ...)."""
    part = part.contiguous()
    if torch.compiler.is_compiling():
        return Pending(_compiled.all_gather_into_tensor(part, axis.size, axis.name), None, axis)
    full = part.new_empty((len(part) * axis.size, *part.shape[1:]))
    return Pending(full, all_gather_tensor(full, part, group=axis.group, async_op=True), axis)


def start_reduce_scatter(full: Tensor, axis: GroupAxis) -> Pending:
    """Start to compute this rank's (n/tp, ...) of the sum over the axis of ``full`` (n, ...)."""
    full = full.contiguous()
    if torch.compiler.is_compiling():
        part = _compiled.reduce_scatter_tensor(full, "sum", axis.size, axis.name)
        return Pending(part, None, axis)
    part = full.new_empty((len(full) // axis.size, *full.shape[1:]))
    return Pending(part, _reduce_scatter(part, full, group=axis.group, async_op=True), axis)


def reduce_from_tensor_axis(x: Tensor, axis: TensorAxis) -> Tensor:
    """g: sums ``x`` over the axis, in place unless compiled. For outputs of row-parallel layers."""
    return x if axis.size == 1 else _Sum.apply(x, axis)


def mean_over_tensor_axis(x: Tensor, axis: TensorAxis) -> Tensor:
    """The mean of ``x`` over the axis. All ranks use it, so its gradient is also a mean."""
    return x if axis.size == 1 else _Conjugate.apply(x, axis, _mean, _mean)


def reduce_scatter_sequence(x: Tensor, axis: TensorAxis) -> Tensor:
    """This rank's (B, S/tp, D) of the sum over the axis; the gradient is gathered."""
    if axis.size == 1:
        return x
    return _Conjugate.apply(x, axis, reduce_scatter_sum, all_gather_sequence)


def split_sequence(x: Tensor, axis: TensorAxis) -> Tensor:
    """This rank's (B, S/tp, D) of a replicated ``x`` (B, S, D); the gradient is gathered."""
    if axis.size == 1:
        return x
    return _Conjugate.apply(x, axis, _own_part, all_gather_sequence)


def all_gather_sequence(x: Tensor, axis: TensorAxis) -> Tensor:
    """The ranks' parts (B, S/tp, ...) as one (B, S, ...); no gradient."""
    batch, sequence = x.shape[:2]
    full = start_all_gather(x.flatten(0, 1), axis).wait()
    return full.view(batch, sequence * axis.size, *x.shape[2:])


def reduce_scatter_sum(x: Tensor, axis: TensorAxis) -> Tensor:
    """This rank's (B, S/tp, ...) of the sum over the axis of ``x`` (B, S, ...); no gradient."""
    batch, sequence = x.shape[:2]
    part = start_reduce_scatter(x.flatten(0, 1), axis).wait()
    return part.view(batch, sequence // axis.size, *x.shape[2:])


def sum_in_place(x: Tensor, axis: GroupAxis) -> None:
    """Replace ``x`` by its sum over the axis. It is not differentiable."""
    with axis.timed():
        dist.all_reduce(x, group=axis.group)


def exchange_rows(x: Tensor, axis: GroupAxis) -> Tensor:
    """Send row r of ``x`` (cp, ...) to rank r. Returns (cp, ...), whose row r is from rank r."""
    return _Conjugate.apply(x, axis, _all_to_all, _all_to_all)


def gather_rows(x: Tensor, index: Tensor, axis: GroupAxis) -> Tensor:
    """Gather the parts (n, ...) of all ranks to (cp n, ...), and return the rows ``index`` of them.

    A row may be used several times and by several ranks. Its gradients are summed.
    """
    return _GatherRows.apply(x, index, axis)


def all_gather_parts(x: Tensor, axis: GroupAxis) -> Tensor:
    """The parts (n, ...) of all ranks, (size n, ...); the gradient is summed and scattered."""
    return _Conjugate.apply(x, axis, _all_gather, _reduce_scatter_sum)


def reduce_scatter_parts(x: Tensor, axis: GroupAxis) -> Tensor:
    """This rank's (n, ...) of the sum of ``x`` (size n, ...); the gradient is gathered."""
    return _Conjugate.apply(x, axis, _reduce_scatter_sum, _all_gather)


def exchange_some_rows(
    x: Tensor, sent: list[int], received: list[int], axis: GroupAxis, spare: int = 0
) -> Tensor:
    """Send the first ``sent[0]`` rows of ``x`` to rank 0, the next ones to rank 1, and so on.

    Returns ``received[0]`` rows from rank 0, those from rank 1, and so on, and ``spare`` rows that
    may contain anything. ``x`` may have more rows than are sent.
    """
    forward = partial(_exchange, sent=sent, received=received, spare=spare)
    backward = partial(_exchange, sent=received, received=sent, spare=len(x) - sum(sent))
    return _Conjugate.apply(x, axis, forward, backward)


def _all_gather(x: Tensor, axis: GroupAxis) -> Tensor:
    return start_all_gather(x, axis).wait()


def _reduce_scatter_sum(x: Tensor, axis: GroupAxis) -> Tensor:
    return start_reduce_scatter(x, axis).wait()


def _exchange(
    x: Tensor, axis: GroupAxis, *, sent: list[int], received: list[int], spare: int
) -> Tensor:
    count = sum(received)
    arrived = x.new_empty((count + spare, *x.shape[1:]))
    with axis.timed():
        dist.all_to_all_single(
            arrived[:count], x[: sum(sent)].contiguous(), received, sent, group=axis.group
        )
    return arrived


def _all_to_all(x: Tensor, axis: GroupAxis) -> Tensor:
    x = x.contiguous()
    if torch.compiler.is_compiling():
        ones = [1] * axis.size
        sent = _compiled.all_to_all_single(x, ones, ones, axis.name)
        waited: Tensor = _compiled.wait_tensor(sent)
        return waited
    received = torch.empty_like(x)
    with axis.timed():
        dist.all_to_all_single(received, x, group=axis.group)
    return received


def _mean(x: Tensor, axis: TensorAxis) -> Tensor:
    # Divided first: the quotient is new, so the sum in place does not overwrite the caller's x.
    return start_all_reduce(x / axis.size, axis).wait()


def _own_part(x: Tensor, axis: TensorAxis) -> Tensor:
    batch, sequence = x.shape[:2]
    part = x.flatten(0, 1).chunk(axis.size)[axis.rank]
    # A copy, because a view would keep the memory of the other parts.
    return part.clone().view(batch, sequence // axis.size, *x.shape[2:])


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, axis: GroupAxis) -> Tensor:
        ctx.axis, ctx.index, ctx.rows = axis, index, len(x) * axis.size
        return start_all_gather(x, axis).wait().index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        full = gradient.new_zeros((ctx.rows, *gradient.shape[1:]))
        full = full.index_add_(0, ctx.index, gradient)
        return start_reduce_scatter(full, ctx.axis).wait(), None, None


class _Sum(torch.autograd.Function):
    """Sums ``x`` over the axis; the gradient of ``x`` is that of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        if not torch.compiler.is_compiling():  # compiled, the sum is a new tensor
            ctx.mark_dirty(x)
        return start_all_reduce(x, axis).wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Conjugate(torch.autograd.Function):
    """Applies ``forward(x, axis)``; the gradient of ``x`` is ``backward(gradient, axis)``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        axis: _Axis,
        forward: _Collective[_Axis],
        backward: _Collective[_Axis],
    ) -> Tensor:
        ctx.axis, ctx.conjugate = axis, backward
        return forward(x, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.conjugate(gradient, ctx.axis), None, None, None

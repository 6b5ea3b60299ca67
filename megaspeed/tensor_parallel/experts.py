"""The expert axis: how the ranks that share experts exchange tokens.

    all_to_all    rows (T k, D), sorted by expert --all-to-all--> the rows of this rank's experts
                  results, in the order of arrival --all-to-all--> results (T k, D)
    all_gather    tokens (T, D) --all-gather--> those of all ranks (ep T, D)
                  sums over this rank's experts (ep T, D) --reduce-scatter--> sums (T, D)

With ``all_to_all``, a rank must know how many rows it gets from each rank before it can receive
them. So the ranks exchange the counts first, and the host reads them once for each block and
micro-batch. A backward and a recomputation use the same numbers again. With ``all_gather``, all
shapes are static, so the host reads nothing. But a rank computes with as many rows as there can be:
ep T min(k, E / ep). Only those that are used are multiplied.

The weight of each row travels with it, in columns after the D features.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megaspeed.model.experts import Exchange, Places, Received, Routing
from megaspeed.tensor_parallel.collectives import (
    ExpertAxis,
    all_gather_parts,
    exchange_some_rows,
    reduce_scatter_parts,
    start_all_gather,
)
from megaspeed.tensor_parallel.shards import columns_of_weights

_FEWEST_ROWS = 2
"""torch compiles another graph for 0 rows, and another for 1 row."""


def exchange_of(axis: ExpertAxis, experts: int, active: int) -> Exchange:
    """Return how a block with E experts, of which a token uses k, exchanges tokens."""
    kind = AllToAll if axis.method == "all_to_all" else AllGather
    return kind(axis, experts // axis.size, active)


class _OverAxis:
    """Exchanges tokens over an axis. ``experts`` are those of a rank, ``active`` is k."""

    def __init__(self, axis: ExpertAxis, experts: int, active: int) -> None:
        self._axis, self._experts, self._active = axis, experts, active


class AllToAll(_OverAxis):
    """Sends each row to the rank of its expert."""

    def begin(self, routing: Routing) -> Callable[[], Received]:
        ranks, axis = self._axis.size, self._axis
        on_device = torch.stack((routing.loads, routing.loads))  # sent, received
        counts = on_device[1]
        with axis.timed():
            dist.all_to_all_single(counts, routing.loads, group=axis.group)
        on_host, copied = on_device, None
        if on_device.is_cuda:
            on_host = torch.empty_like(on_device, device="cpu", pin_memory=True)
            on_host.copy_(on_device, non_blocking=True)
            copied = torch.cuda.current_stream().record_event()

        def wait() -> Received:
            if copied is not None:
                with axis.timed():
                    copied.synchronize()  # not the stream, which may have more work by now
            sent, received = on_host.view(2, ranks, -1).sum(2).tolist()
            return Received(sent, received, _Once(partial(self._places, counts, sum(received))))

        return wait

    def _places(self, counts: Tensor, rows: int) -> Places:
        """Sort rows by expert. They arrive as ``counts`` (E,) are: by rank, then by expert."""
        of_rows = torch.repeat_interleave(counts, output_size=rows) % self._experts
        if spare := _spare(rows):
            of_rows = torch.cat((of_rows, of_rows.new_full((spare,), self._experts)))
        order, inverse, ends = _sorted(of_rows, self._experts)
        return Places(order, order, inverse.unsqueeze(1), ends)

    def pack(self, h: Tensor, weights: Tensor, routing: Routing) -> Tensor:
        return _RowsOfTokens.apply(h, weights, routing.order, routing.rows)

    def send(self, packed: Tensor, received: Received) -> Tensor:
        sent, rows = received.sent_rows, received.received_rows
        return exchange_some_rows(packed, sent, rows, self._axis, _spare(sum(rows)))

    def send_back(self, results: Tensor, received: Received) -> Tensor:
        return exchange_some_rows(results, received.received_rows, received.sent_rows, self._axis)

    def unpack(self, returned: Tensor, routing: Routing) -> Tensor:
        return _SumsOfTokens.apply(returned, routing.order, routing.rows)


class AllGather(_OverAxis):
    """Sends all tokens to all ranks, and sums what the ranks compute for each token."""

    def begin(self, routing: Routing) -> Callable[[], Received]:
        pending = start_all_gather(routing.experts.int(), self._axis)  # int has fewer bytes
        return lambda: Received([], [], _Once(lambda: self._places(pending.wait())))

    def _places(self, experts: Tensor) -> Places:
        """``experts`` (ep T, k) are the choices of all ranks."""
        own, most = self._experts, len(experts) * min(self._active, self._experts)
        # This rank's experts are the first ones, so the rows of other ranks come last.
        local = (experts - self._axis.rank * own) % (self._axis.size * own)
        order, rows, ends = _sorted(local.flatten(), own)
        rows, order = rows.view_as(experts).clamp_(max=most - 1), order[:most].clone()
        return Places(order, order // self._active, rows, ends, local < own)

    def pack(self, h: Tensor, weights: Tensor, routing: Routing) -> Tensor:
        columns = columns_of_weights(self._active, h.element_size(), "all_gather")
        return torch.cat((h, weights, h.new_zeros(len(h), columns - self._active)), dim=1)

    def send(self, packed: Tensor, received: Received) -> Tensor:
        return all_gather_parts(packed, self._axis)

    def send_back(self, results: Tensor, received: Received) -> Tensor:
        return reduce_scatter_parts(results, self._axis)

    def unpack(self, returned: Tensor, routing: Routing) -> Tensor:
        return returned


_Result = TypeVar("_Result")


class _Once(Generic[_Result]):
    """Calls a function once, and frees what it refers to. Later calls return the same result."""

    def __init__(self, function: Callable[[], _Result]) -> None:
        self._function: Callable[[], _Result] | None = function

    def __call__(self) -> _Result:
        if self._function is not None:
            self._result, self._function = self._function(), None
        return self._result


def _spare(rows: int) -> int:
    """Return how many rows are added to those that are received."""
    return max(0, _FEWEST_ROWS - rows)


def _sorted(of_rows: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort rows by their experts. Return the order, its inverse, and where the rows of each of the
    first ``experts`` end.
    """
    numbers, order = of_rows.sort(stable=True)
    inverse = torch.empty_like(order)
    inverse.scatter_(0, order, torch.arange(len(order), device=order.device))
    own = torch.arange(experts, dtype=numbers.dtype, device=numbers.device)
    return order, inverse, torch.searchsorted(numbers, own, right=True, out_int32=True)


class _RowsOfTokens(torch.autograd.Function):
    """Tokens (T, D) and weights (T, k) -> (T k, D + c), sorted by expert."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weights: Tensor, order: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.hidden = h.shape[1]
        columns = columns_of_weights(1, h.element_size(), "all_to_all")
        of_rows = weights.flatten()[order].unsqueeze(1).expand(-1, columns)
        return torch.cat((h[order // rows.shape[1]], of_rows), dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        by_token = gradient[rows]  # (T, k, D + c)
        return by_token[..., : ctx.hidden].sum(1), by_token[..., ctx.hidden], None, None


class _SumsOfTokens(torch.autograd.Function):
    """Rows (T k, D), sorted by expert -> the sum of the rows of each token (T, D)."""

    @staticmethod
    def forward(ctx: Any, returned: Tensor, order: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        ctx.active = rows.shape[1]
        return returned[rows].sum(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return gradient[order // ctx.active], None, None

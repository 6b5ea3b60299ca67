"""The expert axis: how the ranks that share experts exchange tokens.

    all_to_all    rows (T k, D), sorted by expert --all-to-all--> the rows of this rank's experts
                  results, in the order of arrival --all-to-all--> results (T k, D)
    all_gather    tokens (T, D) --all-gather--> those of all ranks (ep T, D)
                  sums over this rank's experts (ep T, D) --reduce-scatter--> sums (T, D)

With ``all_to_all``, a rank must know how many rows it gets from each rank before it can receive
them. So the ranks exchange the counts first, and the host reads them: once for each layer and
micro-batch. A backward and a recomputation use the same numbers again. With ``all_gather``, all
shapes are static, so the host reads nothing. But a rank computes with as many rows as there can be:
ep T min(k, E / ep). Only those that are used are multiplied.

The weight of each row travels with it, in columns after the D features.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

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

COLUMN_BYTES = 16
"""The columns after the features take a multiple of this, so that rows are aligned."""
_FEWEST_ROWS = 2
"""The compiler makes other kernels for 0 and for 1 row."""


def columns_of_weights(active: int, element_bytes: int, method: str) -> int:
    """Return how many columns the weights of a row take: 1, or ``active`` with all_gather."""
    used = active if method == "all_gather" else 1
    return -(-used * element_bytes // COLUMN_BYTES) * COLUMN_BYTES // element_bytes


def exchange_of(axis: ExpertAxis, experts: int, active: int) -> Exchange | None:
    """Return how a block with E experts, of which a token uses k, exchanges tokens; None if a rank
    has all experts.
    """
    if axis.size == 1:
        return None
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
        sent = routing.offsets.diff(prepend=routing.offsets.new_zeros(1))
        counts = torch.empty_like(sent)
        with axis.timed():
            dist.all_to_all_single(counts, sent, group=axis.group)
        by_rank = torch.stack((sent, counts)).view(2, ranks, -1).sum(2)
        on_host, copied = by_rank, None
        if by_rank.is_cuda:
            on_host = torch.empty_like(by_rank, device="cpu", pin_memory=True)
            on_host.copy_(by_rank, non_blocking=True)
            copied = torch.cuda.current_stream().record_event()

        @cache
        def wait() -> Received:
            if copied is not None:
                copied.synchronize()  # not the stream, which may have more work by now
            sent_rows, received_rows = on_host.tolist()
            places = self._places(counts.view(ranks, -1), sum(received_rows))
            return Received(places, sent_rows, received_rows)

        return wait

    def _places(self, counts: Tensor, rows: int) -> Places:
        """Sort received rows by expert. ``counts`` (ep, experts) are those from each rank."""
        # Rows arrive by rank, then by expert. Rows of one rank and expert stay together.
        arrived, of_experts = counts.flatten().long(), counts.sum(0)
        before = counts.t().flatten().cumsum(0).view(-1, len(counts)).t() - counts
        shift = (before.flatten() - arrived.cumsum(0) + arrived).repeat_interleave(
            arrived, output_size=rows
        )
        spare = max(0, _FEWEST_ROWS - rows)
        places = torch.arange(rows + spare, device=counts.device)
        places[:rows] += shift
        order = torch.empty_like(places)
        order.scatter_(0, places, torch.arange(len(order), device=order.device))
        return Places(order, order, places.unsqueeze(1), of_experts.cumsum(0).int())

    def pack(self, h: Tensor, weights: Tensor, routing: Routing) -> Tensor:
        return _RowsOfTokens.apply(h, weights, routing.order, routing.rows)

    def send(self, packed: Tensor, received: Received) -> Tensor:
        spare = len(received.places.tokens) - sum(received.received_rows)
        return exchange_some_rows(
            packed, received.sent_rows, received.received_rows, self._axis, spare
        )

    def send_back(self, results: Tensor, received: Received) -> Tensor:
        return exchange_some_rows(results, received.received_rows, received.sent_rows, self._axis)

    def unpack(self, returned: Tensor, routing: Routing) -> Tensor:
        return _SumsOfTokens.apply(returned, routing.order, routing.rows)


class AllGather(_OverAxis):
    """Sends all tokens to all ranks, and sums what the ranks compute for each token."""

    def begin(self, routing: Routing) -> Callable[[], Received]:
        own = routing.experts.int()  # fewer bytes
        pending = start_all_gather(own, self._axis)

        @cache
        def wait() -> Received:
            return Received(self._places(pending.wait().long()), [], [])

        return wait

    def _places(self, experts: Tensor) -> Places:
        """``experts`` (ep T, k) are the choices of all ranks."""
        local = experts - self._axis.rank * self._experts
        is_used = (local >= 0) & (local < self._experts)
        # The rows of other ranks come last.
        local = torch.where(is_used, local, self._experts).flatten()
        order = local.sort(stable=True).indices
        rows = torch.empty_like(order)
        rows.scatter_(0, order, torch.arange(len(order), device=order.device))
        rows = torch.where(is_used, rows.view_as(experts), 0)
        counts = local.new_zeros(self._experts + 1)
        counts.scatter_add_(0, local, torch.ones_like(local))
        most = len(experts) * min(self._active, self._experts)
        ends, order = counts[:-1].cumsum(0).int(), order[:most].clone()
        return Places(order, order // self._active, rows, ends, is_used)

    def pack(self, h: Tensor, weights: Tensor, routing: Routing) -> Tensor:
        columns = columns_of_weights(self._active, h.element_size(), "all_gather")
        return torch.cat((h, weights, h.new_zeros(len(h), columns - self._active)), dim=1)

    def send(self, packed: Tensor, received: Received) -> Tensor:
        return all_gather_parts(packed, self._axis)

    def send_back(self, results: Tensor, received: Received) -> Tensor:
        return reduce_scatter_parts(results, self._axis)

    def unpack(self, returned: Tensor, routing: Routing) -> Tensor:
        return returned


class _RowsOfTokens(torch.autograd.Function):
    """Tokens (T, D) and weights (T, k) -> (T k, D + some), sorted by expert."""

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
        by_token = gradient[rows]  # (T, k, D + some)
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

"""Latency and bandwidth of each group of the run, with the same operations as in training.

    tp, dp, world    all-reduce of few and of many bytes
    pp               each stage sends to the next and receives from the previous one, at once

All groups of one axis work at the same time, as they do in a step. Bandwidth is the bytes that a
rank sends per second: 2 (n-1)/n of the message for an all-reduce over n ranks
(`costs.collective_cost`).
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megaspeed.analysis.costs.traffic import Collective, bytes_sent
from megaspeed.topology.context import ParallelContext

_SMALL_BYTES = 8
_LARGE_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
_SMALL_TIMES, _LARGE_TIMES = 20, 5


@dataclass(frozen=True, kw_only=True)
class Link:
    """One group, as measured by one of its ranks."""

    axis: str  # pp, dp, tp or world
    ranks: Sequence[int]  # the ranks of the group
    latency_seconds: float  # median time for a message of 8 bytes
    bytes_per_second: float  # bytes that a rank sends for a large message / the median time


@dataclass(kw_only=True)
class LinkReport:
    """What one rank measured, and the problem that ended the measurement, if any."""

    links: list[Link] = field(default_factory=list)
    problem: str | None = None


class Measurement:
    """Measures the links of one rank. `step` is the current step, which an error names."""

    def __init__(self) -> None:
        self.step = "joining the process groups"
        self.links: list[Link] = []

    def measure(self, context: ParallelContext) -> None:
        """Measure all groups of more than one rank. All ranks call this together."""
        groups = {
            "tp": context.tp_group,
            "dp": context.dp_group,
            "pp": context.pp_group,
            "world": context.world_group,
        }
        for axis, group in groups.items():
            if group is not None and group.size() > 1:
                self.step = f"measuring {axis} {dist.get_process_group_ranks(group)}"
                self.links.append(_measure(axis, group, context))
            # A barrier: all ranks start the next axis together, so measurements do not overlap.
            dist.all_reduce(torch.zeros(1, device=context.device), group=context.world_group)


def _measure(axis: str, group: dist.ProcessGroup, context: ParallelContext) -> Link:
    large = _LARGE_BYTES[context.device.type]
    operation = _neighbours if axis == "pp" else _all_reduce
    collective: Collective = "send" if axis == "pp" else "all_reduce"
    latency = _median_seconds(operation(group, _SMALL_BYTES, context), _SMALL_TIMES, context)
    seconds = _median_seconds(operation(group, large, context), _LARGE_TIMES, context)
    return Link(
        axis=axis,
        ranks=dist.get_process_group_ranks(group),
        latency_seconds=latency,
        bytes_per_second=bytes_sent(collective, large, group.size()) / seconds,
    )


def _all_reduce(
    group: dist.ProcessGroup, message_bytes: int, context: ParallelContext
) -> Callable[[], object]:
    message = torch.zeros(message_bytes // 4, device=context.device)
    return lambda: dist.all_reduce(message, group=group)


def _neighbours(
    group: dist.ProcessGroup, message_bytes: int, context: ParallelContext
) -> Callable[[], object]:
    outgoing = torch.zeros(message_bytes // 4, device=context.device)
    incoming = torch.empty_like(outgoing)

    def send_and_receive() -> None:
        batch = []
        if context.next_rank is not None:
            batch.append(dist.P2POp(dist.isend, outgoing, context.next_rank, group))
        if context.previous_rank is not None:
            batch.append(dist.P2POp(dist.irecv, incoming, context.previous_rank, group))
        for work in dist.batch_isend_irecv(batch):
            work.wait()

    return send_and_receive


def _median_seconds(operation: Callable[[], object], times: int, context: ParallelContext) -> float:
    seconds = []
    for _ in range(times + 1):
        start = time.perf_counter()
        operation()
        if context.device.type == "cuda":
            torch.cuda.synchronize(context.device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])  # the first call also opens connections

"""How many bytes a rank sends in a collective: the one place for the convention.

S is the message in bytes, n the ranks of the group; per rank, by bandwidth-optimal (ring)
algorithms (Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", section 3; Rajbhandari et al. 2020, ZeRO, section 7.1):

    reduce_scatter   (n-1)/n S        S: the whole input of a rank
    all_gather       (n-1)/n S        S: the gathered whole
    all_reduce     2 (n-1)/n S        a reduce-scatter, then an all-gather
    reduce           (n-1)/n S        along a chain n - 1 ranks send S; shared evenly
    broadcast        (n-1)/n S        the same the other way round
    send                     S

What goes round once is therefore "1 x" of the message and an all-reduce "2 x", as ZeRO's paper
counts, up to (n-1)/n.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Literal

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "reduce", "broadcast", "send"]
TrafficAxis = Literal["pp", "dp", "tp", "world"]
"""world: what all ranks agree on (gradient norm, loss): a few numbers."""

Traffic = Mapping[tuple[TrafficAxis, Collective], int]
"""Bytes that one rank sends in one optimizer step; what is not sent at all is left out."""


def bytes_sent(collective: Collective, message_bytes: int, ranks: int) -> int:
    """Bytes that one of ``ranks`` ranks sends for messages of ``message_bytes``, rounded down.

    A group of one rank sends nothing.
    """
    if ranks == 1:
        return 0
    if collective == "send":
        return message_bytes
    rounds = 2 if collective == "all_reduce" else 1
    return rounds * (ranks - 1) * message_bytes // ranks


def by_axis(traffic: Traffic) -> dict[str, dict[str, int]]:
    """The same as axis -> collective -> bytes, in the order of their names."""
    axes: dict[str, dict[str, int]] = {}
    for (axis, collective), sent in sorted(traffic.items()):
        axes.setdefault(axis, {})[collective] = sent
    return axes


class Messages:
    """Messages of a step by axis, collective and size of the group, before the convention.

    Summed as messages, so that rounding happens once and prediction and count round alike.
    """

    def __init__(self) -> None:
        self._bytes: Counter[tuple[TrafficAxis, Collective, int]] = Counter()

    def add(
        self, axis: TrafficAxis, collective: Collective, message_bytes: int, *, ranks: int
    ) -> None:
        """One message, or several of the same kind together, in bytes."""
        self._bytes[axis, collective, ranks] += message_bytes

    def traffic(self) -> Traffic:
        """What a rank sends for all of them."""
        sent: Counter[tuple[TrafficAxis, Collective]] = Counter()
        for (axis, collective, ranks), message_bytes in self._bytes.items():
            sent[axis, collective] += bytes_sent(collective, message_bytes, ranks)
        return {key: total for key, total in sent.items() if total}

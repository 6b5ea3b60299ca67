"""How far the clock of each machine is from that of rank 0.

    rank 0    sent ---------------------> received        offset = answer - (sent + received) / 2,
    rank r         \\--> answer: its time /                exact to half the round trip

Clocks that differ confuse logs, network file systems and certificates.
"""

import time

from megaspeed.analysis.doctor.messages import Messages
from megaspeed.topology.meeting import GroupError

_ROUNDS = 5


def answer_clock(messages: Messages, seconds: float) -> None:
    """Answers the requests of `measure_clocks` on another rank; returns after the last one."""
    for number in range(_ROUNDS):
        messages.hear(f"clock/{messages.rank}/{number}", seconds)
        messages.put(f"time/{number}", time.time())


def measure_clocks(messages: Messages, ranks: list[int], seconds: float) -> dict[int, float | None]:
    """For rank 0: how many seconds each rank's clock is ahead; None if it does not answer."""
    return {rank: _offset(messages, rank, seconds) for rank in ranks}


def _offset(messages: Messages, rank: int, seconds: float) -> float | None:
    best: tuple[float, float] | None = None
    try:
        for number in range(_ROUNDS):
            sent = time.time()
            messages.tell(f"clock/{rank}/{number}", None)
            answer = messages.hear(f"time/{number}/{rank}", seconds)
            received = time.time()
            uncertain = received - sent
            if best is None or uncertain < best[0]:
                best = uncertain, answer - (sent + received) / 2
    except GroupError:
        return None
    return None if best is None else best[1]

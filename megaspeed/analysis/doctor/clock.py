"""How far the clock of each machine is from that of rank 0.

    rank 0    sent ---------------------> received        offset = answer - (sent + received) / 2,
    rank r         \\--> answer: its time /                known to half of the way there and back

Clocks that differ confuse logs, network file systems and certificates.
"""

import time

from megaspeed.analysis.doctor.messages import Messages
from megaspeed.topology.meeting import GroupError

_ROUNDS = 5


def answer_clock(messages: Messages, seconds: float) -> None:
    """For a rank that `measure_clocks` asks; returns when it has asked enough."""
    for number in range(_ROUNDS):
        messages.hear(f"clock/{messages.rank}/{number}", seconds)
        messages.put(f"time/{number}", time.time())


def measure_clocks(messages: Messages, ranks: list[int], seconds: float) -> dict[int, float | None]:
    """For rank 0: by rank the seconds that its clock is ahead; None if it does not answer."""
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

"""Checks that machines can connect at ports that the system chooses, as gloo and NCCL do.

node 0 --> node 1 --> node 2 --> ... --> node 0      each listens, and the one before it connects
"""

import socket
from contextlib import suppress

from megaspeed.analysis.doctor.messages import Messages
from megaspeed.topology.meeting import GroupError
from megaspeed.topology.process_settings import is_loopback

_HELLO = b"megaspeed"


def check_ports(
    messages: Messages, address: str, ring: list[int], seconds: float
) -> dict[int, str]:
    """For the ranks of `ring`, one of each machine, together; rank 0 is the first of them.

    Args:
        messages: the store.
        address: this machine's address, as the other machines reach it.
        ring: the first rank of each machine.
        seconds: how long a connection may take.

    Returns:
        On rank 0, by rank, why it cannot reach or be reached. Empty on other ranks.
    """
    place = ring.index(messages.rank)
    after = ring[(place + 1) % len(ring)]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as server:
        server.bind((address, 0))
        server.listen()
        messages.tell(f"port/{messages.rank}", server.getsockname()[:2])
        messages.put("reached", _connect(messages, after, seconds))
        # Keep the port open until all ranks have tried to connect.
        if messages.rank != 0:
            with suppress(GroupError):
                messages.hear("ports tried", 2 * seconds)
            return {}
        answers = [_answer(messages, rank, 2 * seconds) for rank in ring]
        messages.tell("ports tried", None)
    return dict(answer for answer in answers if answer is not None)


def _answer(messages: Messages, rank: int, seconds: float) -> tuple[int, str] | None:
    try:
        answer = messages.hear(f"reached/{rank}", seconds)
    except GroupError:
        return rank, "did not answer when ports were tested"
    return None if answer is None else (answer[0], answer[1])


def _connect(messages: Messages, rank: int, seconds: float) -> tuple[int, str] | None:
    """Which rank prevents that this one reaches `rank`, and why; None if it is reached."""
    try:
        host, port = messages.hear(f"port/{rank}", seconds)
    except GroupError as error:
        return messages.rank, str(error)
    try:
        with socket.create_connection((host, port), timeout=seconds) as link:
            link.sendall(_HELLO)
    except OSError as error:
        if is_loopback(host):
            return rank, (
                f"MASTER_ADDR resolves to a loopback address there ({host}), and there is no "
                f"default route, so rank {messages.rank} cannot connect to it: set "
                "GLOO_SOCKET_IFNAME on that machine to its interface that reaches the other nodes"
            )
        return messages.rank, (
            f"cannot connect to {host} port {port}, where rank {rank} listens ({error}): gloo and "
            "NCCL connect at ports that the system chooses, so the firewall must allow every "
            "port between the machines"
        )
    return None

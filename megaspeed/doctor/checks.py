"""Checks between ranks over a key-value store: clocks, the shared run folder, ports.

    rank 1, 2, ...  --send("record", {...})-->  store  --gather("record")----------->  rank 0
    rank 1, 2, ...  <--receive("token")-------  store  <--broadcast("token", ...)----  rank 0

They use no collectives. A collective would wait for a missing rank, and could not name it. All
ranks call each check; its result is on rank 0.
"""

import json
import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import torch.distributed as dist

from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.topology.process_settings import is_loopback
from megaspeed.topology.store import GroupError

Result = TypeVar("Result")

_POLL_SECONDS = 0.02
_CLOCK_ROUNDS = 5
# A network file system may show a new file to other nodes a little later.
_SECONDS_UNTIL_VISIBLE = 5.0


class Messages:
    """This rank's connection to the store of all ranks."""

    def __init__(self, launch: LaunchEnvironment, store: dist.Store) -> None:
        self.rank = launch.rank
        self.world_size = launch.world_size
        self._store = dist.PrefixStore("doctor", store)

    def send(self, name: str, value: Any) -> None:
        """Stores this rank's value. ``gather`` or ``receive("name/rank")`` reads it."""
        self.broadcast(f"{name}/{self.rank}", value)

    def broadcast(self, name: str, value: Any) -> None:
        """Stores a value for all ranks."""
        self._store.set(name, json.dumps(value))

    def gather(self, name: str, seconds: float) -> list[Any]:
        """The values of all ranks; None for ranks that have sent none after ``seconds``."""
        keys = [f"{name}/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + seconds
        while not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return [
            json.loads(self._store.get(key)) if self._store.check([key]) else None for key in keys
        ]

    def receive(self, name: str, seconds: float) -> Any:
        """Waits for a value.

        Raises:
            GroupError: it does not arrive within ``seconds``, or the store has ended.
        """
        try:
            self._store.wait([name], timedelta(seconds=seconds))
            return json.loads(self._store.get(name))
        except RuntimeError as error:  # torch's DistError is one
            raise GroupError(
                f"rank {self.rank} waited {seconds:g} s for rank 0 ({name}), which did not answer"
            ) from error


def call_with_timeout(seconds: float, function: Callable[[], Result]) -> Result:
    """Calls ``function`` in another thread, because a disk or a driver may hang.

    Raises:
        TimeoutError: it has not returned after ``seconds``. Its thread continues in the background.
    """
    future: Future[Result] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=work, daemon=True).start()
    return future.result(timeout=seconds)


def check_clocks(
    messages: Messages, first_ranks: list[int], seconds: float
) -> dict[int, float | None]:
    """How many seconds each clock is ahead of rank 0's; None if the rank does not answer.

    Clocks that differ confuse logs, network file systems and certificates.

        rank 0    sent ...................... received
        rank r          answer: its own time             offset = answer - (sent + received) / 2

    The error is at most half the round trip, so the fastest of several round trips is used.
    Only the first rank of each machine calls this. Each answer may take up to ``seconds``.
    """
    if messages.rank == 0:
        return {rank: _clock_offset(messages, rank, seconds) for rank in first_ranks if rank}
    with suppress(GroupError):
        for number in range(_CLOCK_ROUNDS):
            messages.receive(f"clock/{messages.rank}/{number}", seconds * len(first_ranks))
            messages.send(f"time/{number}", time.time())
    return {}


def _clock_offset(messages: Messages, rank: int, seconds: float) -> float | None:
    rounds = []  # (duration of the round trip, offset)
    try:
        for number in range(_CLOCK_ROUNDS):
            sent = time.time()
            messages.broadcast(f"clock/{rank}/{number}", None)
            answer = messages.receive(f"time/{number}/{rank}", seconds)
            received = time.time()
            rounds.append((received - sent, answer - (sent + received) / 2))
    except GroupError:
        return None
    return min(rounds)[1]


def check_run_folder(
    run_dir: Path, messages: Messages, seconds: float, *, token_seconds: float
) -> dict[int, str]:
    """What is wrong with the run folder, by rank. The check removes its own files and folders.

        rank 0        writes .doctor-<random>, the token
        every rank    reads the token, writes .doctor-<random>-<rank> and removes it

    Each step may take up to ``seconds``. The other ranks wait up to ``token_seconds`` for rank 0's
    token, because rank 0 may still be busy.
    """
    created: list[Path] = []
    if messages.rank == 0:
        name = f".doctor-{secrets.token_hex(8)}"
        problem = _error_of(seconds, lambda: created.extend(_write_token(run_dir, name)))
        messages.broadcast("token", {"name": name, "problem": problem})
    try:
        token = messages.receive("token", token_seconds)
    except GroupError:
        return {}
    file = run_dir / token["name"]
    problem = token["problem"] or _error_of(
        seconds + _SECONDS_UNTIL_VISIBLE, lambda: _read_and_write(file, messages.rank)
    )
    messages.send("folder", {"problem": problem})
    if messages.rank != 0:
        return {}
    answers = messages.gather("folder", seconds + 2 * _SECONDS_UNTIL_VISIBLE)
    no_answer = {"problem": "did not answer when it was asked for the file"}
    problems = {rank: (answer or no_answer)["problem"] for rank, answer in enumerate(answers)}
    _error_of(seconds, lambda: _remove(file, created))
    return {rank: found for rank, found in problems.items() if found is not None}


def _write_token(run_dir: Path, name: str) -> list[Path]:
    """Writes the token. Returns the folders that had to be created, the innermost first."""
    folders = (run_dir.absolute(), *run_dir.absolute().parents)
    missing = [folder for folder in folders if not folder.exists()]
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / name).write_text(name)
    return missing


def _read_and_write(token: Path, rank: int) -> None:
    deadline = time.monotonic() + _SECONDS_UNTIL_VISIBLE
    while not token.exists():
        if time.monotonic() > deadline:
            raise OSError(f"{token} of rank 0 is not visible here: the folder is not shared")
        time.sleep(_POLL_SECONDS)
    if token.read_text() != token.name:
        raise OSError(f"{token} does not contain what rank 0 wrote there")
    own = token.with_name(f"{token.name}-{rank}")
    own.touch()
    own.unlink()


def _remove(token: Path, created: list[Path]) -> None:
    token.unlink(missing_ok=True)
    with suppress(OSError):
        for folder in created:
            folder.rmdir()


def _error_of(seconds: float, step: Callable[[], object]) -> str | None:
    """The error of a step of the check of the run folder; None if there is none."""
    try:
        call_with_timeout(seconds, step)
    except TimeoutError:
        return f"the file system of training.run_dir did not answer within {seconds:g} s"
    except OSError as error:
        return str(error)
    return None


def check_ports(
    messages: Messages, address: str, first_ranks: list[int], seconds: float
) -> dict[int, str]:
    """Which machines cannot connect to ports that the system chooses, as gloo and NCCL do.

        node 0 --> node 1 --> node 2 --> ... --> node 0      each listens, the previous one connects

    Only the first rank of each machine calls this. Other machines reach it at ``address``. Each
    connection may take up to ``seconds``.

    Returns:
        By rank, why it cannot connect, or why no rank can connect to it.
    """
    next_rank = first_ranks[(first_ranks.index(messages.rank) + 1) % len(first_ranks)]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as server:
        server.bind((address, 0))
        server.listen()
        messages.send("port", server.getsockname()[:2])
        messages.send("connected", _connect(messages, next_rank, seconds))
        # The port stays open until all ranks have tried to connect.
        if messages.rank != 0:
            with suppress(GroupError):
                messages.receive("all connected", 2 * seconds)
            return {}
        problems = {}
        for rank in first_ranks:
            try:
                problem = messages.receive(f"connected/{rank}", 2 * seconds)
            except GroupError:
                problem = rank, "did not answer when ports were tested"
            if problem is not None:
                problems[problem[0]] = problem[1]
        messages.broadcast("all connected", None)
    return problems


def _connect(messages: Messages, rank: int, seconds: float) -> tuple[int, str] | None:
    """Connects to ``rank``. If that fails, returns the rank at fault and the problem, else None."""
    try:
        host, port = messages.receive(f"port/{rank}", seconds)
    except GroupError as error:
        return messages.rank, str(error)
    try:
        socket.create_connection((host, port), timeout=seconds).close()
    except OSError as error:
        if is_loopback(host):
            return rank, (
                f"MASTER_ADDR resolves to a loopback address there ({host}), and there is no "
                f"default route, so rank {messages.rank} cannot connect to it: set "
                "GLOO_SOCKET_IFNAME on that machine to its interface that reaches the other nodes"
            )
        return messages.rank, (
            f"cannot connect to {host} port {port}, where rank {rank} listens ({error}): gloo and "
            "NCCL use ports that the system chooses, so the firewall must allow every "
            "port between the machines"
        )
    return None

"""The key-value store through which all ranks of a run find each other.

rank 0       listens at MASTER_ADDR:MASTER_PORT (torchrun's agent does so in its place)
others       connect, and print from time to time what they wait for
"""

import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from megaspeed.topology.launch import LaunchEnvironment

_SECONDS_UNTIL_MESSAGE = 10.0
"""A rank waits this long before its first message, and three times as long before later ones."""
_SECONDS_PER_TRY = 0.25
_MOST_NAMED = 16


class GroupError(RuntimeError):
    """Ranks could not connect, or could not create a process group: a rank is missing."""


def open_store(launch: LaunchEnvironment, timeout_seconds: float) -> dist.Store:
    """Connect to the store of all ranks. A single process has its own store.

    Raises GroupError, which names the address, if no process answers for ``timeout_seconds``.
    """
    if launch.world_size == 1:
        return dist.HashStore()  # no port needed
    connection = connect(launch, timeout_seconds)
    if not agent_keeps_the_store():
        return connection
    # The agent's store still has the keys of earlier attempts.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"/worker/attempt_{attempt}", connection)


def agent_keeps_the_store() -> bool:
    """Whether torchrun's agent or rank 0's supervisor keeps the store after the ranks end."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def ranks_named(ranks: list[int]) -> str:
    """Such as "rank 3" or "ranks 1, 4, 5 and 12 more"."""
    listed = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}{more}"


def connect(launch: LaunchEnvironment, timeout_seconds: float) -> dist.Store:
    """Connect to the store at MASTER_ADDR and MASTER_PORT; rank 0 listens there if no agent does.

    Raises GroupError, which names the address.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listens = launch.rank == 0 and not agent_keeps_the_store()
    if not listens:
        _wait_until_reachable(address, port, Waiting(launch, timeout_seconds))
    try:
        return dist.TCPStore(
            address,
            port,
            is_master=listens,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,  # the ranks wait in the meeting, which names who is missing
            multi_tenant=True,
        )
    except RuntimeError as error:  # torch's own DistError is one
        raise GroupError(
            f"rank {launch.rank} could not {'listen at' if listens else 'connect to'} "
            f"{address}:{port} (MASTER_ADDR, MASTER_PORT), the address of the store: MASTER_ADDR "
            "must be an address of rank 0's host, and MASTER_PORT a free port of that host. torch "
            f"reports: {error}"
        ) from error


def wait_for_keys(store: dist.Store, keys: list[str], seconds: float) -> bool:
    """Wait until the store has all keys. Returns False if it does not have them in time.

    Unlike the store's own ``wait``, does not block other calls on the same connection.
    """
    deadline = time.monotonic() + seconds
    while not store.check(keys):
        if time.monotonic() > deadline:
            return False
        time.sleep(_SECONDS_PER_TRY)
    return True


class Waiting:
    """Waits for other ranks with a timeout, and prints from time to time what it waits for."""

    def __init__(self, launch: LaunchEnvironment, timeout_seconds: float) -> None:
        self.launch = launch
        self._timeout = timeout_seconds
        self._start = time.monotonic()
        self._next_message = self._start + _SECONDS_UNTIL_MESSAGE

    @property
    def seconds(self) -> float:
        """How long this rank has waited until now."""
        return time.monotonic() - self._start

    def wait_for_keys(
        self,
        store: dist.Store,
        keys: list[str],
        missing: Callable[[], list[int]],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait for keys of the store, and call ``meanwhile`` several times a second.

        ``missing`` returns the ranks that have not set them yet; it is called only for a message.
        """
        while True:
            try:
                meanwhile()
                store.wait(keys, timedelta(seconds=_SECONDS_PER_TRY))
                return
            except dist.DistStoreError:  # not all keys are set yet
                self.report_or_raise(lambda: self._describe(missing()))
            except dist.DistNetworkError as error:
                raise GroupError(
                    f"rank {self.launch.rank} lost the connection to the store (at "
                    f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}): the process that "
                    "keeps it has ended; look for the first error of rank 0 and of its launcher"
                ) from error

    def report_or_raise(self, why: Callable[[], str], *, also_rank_1: bool = False) -> None:
        """Print from time to time why this rank waits. Raises GroupError after the timeout.

        Only the first rank of each host prints. Rank 1 also prints if ``also_rank_1``, because
        rank 0, which is on the same host, may not have started. ``why`` returns an empty message if
        this rank need not wait any longer.
        """
        if self.seconds >= self._timeout:
            raise GroupError(f"{why()}; no rank can continue without the others")
        if time.monotonic() >= self._next_message:
            self._next_message = time.monotonic() + 3 * _SECONDS_UNTIL_MESSAGE
            reports = self.launch.local_rank == 0 or (also_rank_1 and self.launch.rank == 1)
            if reports and (line := why()):
                print_error(f"{line}; the limit is {self._timeout:.0f} s")

    def _describe(self, missing: list[int]) -> str:
        if not missing:
            return ""
        return (
            f"rank {self.launch.rank} has waited {self.seconds:.0f} s for {ranks_named(missing)} "
            f"of {self.launch.world_size} (world size from {self.launch.source}). Each of them "
            f"must be started and reach {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        )


def _wait_until_reachable(address: str, port: int, waiting: Waiting) -> None:
    while True:
        try:
            socket.create_connection((address, port), timeout=_SECONDS_UNTIL_MESSAGE).close()
            return
        except OSError as error:  # also raised if the name cannot be resolved
            why = (
                f"rank {waiting.launch.rank} has not reached the store of rank 0 at "
                f"{address}:{port} (MASTER_ADDR, MASTER_PORT) for {waiting.seconds:.0f} s: "
                f"{error.strerror or error}. Rank 0 must be started, and the address must be one "
                "of its host, not behind a firewall"
            )
            waiting.report_or_raise(partial(str, why), also_rank_1=True)
            time.sleep(_SECONDS_PER_TRY)


def print_error(line: str) -> None:
    """Write a line to standard error at once. Ignores a full disk and a closed file."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

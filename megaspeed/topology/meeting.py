"""The first step of a run: all ranks connect to one key-value store and compare their settings.

    rank 0       listens at MASTER_ADDR:MASTER_PORT (torchrun's agent does so in its place)
    others       connect
    every rank   checks in: host, process, and how its configuration differs from rank 0's
    rank 0       writes the result: all ranks continue, or all raise the same error

Missing ranks, a wrong address and different configurations are detected here, and the error names
them. Without these checks, each would be a silent hang in a process group.
"""

import dataclasses
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from megaspeed.files.json_values import leaves
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.topology.process_settings import allow_open_files

_SECONDS_UNTIL_TOLD = 10.0
"""A rank waits this long before its first message, and three times as long before later ones."""
_SECONDS_A_TRY = 0.25
_MOST_NAMED = 16


class GroupError(RuntimeError):
    """Ranks could not connect, or could not create a process group: a rank is missing."""


class RanksDisagree(RuntimeError):
    """Two ranks were started with different inputs."""


@dataclass(frozen=True)
class Neighbour:
    """Another rank of the same host."""

    rank: int
    process: int
    error_file: str | None  # the file in which torchrun looks for the reason why the rank ended


@dataclass(frozen=True)
class Meeting:
    """The store, and the other ranks of this host."""

    store: dist.Store
    launch: LaunchEnvironment
    neighbours: tuple[Neighbour, ...] = ()
    between_attempts: dist.Store | None = None
    """A store that outlives this attempt, for the next one; None if no process keeps one."""
    spare_ranks: tuple[int, ...] = ()

    @property
    def hosts_the_store(self) -> bool:
        """Whether the store ends with this process."""
        return self.launch.rank == 0 and not agent_keeps_the_store()

    def without_spare_ranks(self, world_size: int) -> "Meeting":
        """The meeting of the first ``world_size`` ranks, which train; the others are spare."""
        launch = self.launch
        if launch.rank < world_size:
            launch = dataclasses.replace(launch, world_size=world_size)
        return dataclasses.replace(
            self,
            launch=launch,
            spare_ranks=tuple(range(world_size, self.launch.world_size)),
        )

    def own_connection(self) -> dist.Store:
        """Another connection to the store. One connection serves one call at a time."""
        connection: dist.Store = self.store.clone()  # type: ignore[attr-defined]  # not in stubs
        return connection

    def host_of(self, rank: int) -> str:
        """The name of the machine that ``rank`` runs on."""
        return str(json.loads(self.store.get(f"rank {rank}"))["host"])


def open_store(launch: LaunchEnvironment, timeout_seconds: float) -> dist.Store:
    """Connect to the store of all ranks. A single process has one of its own.

    Raises GroupError, which names the address, if no process answers for ``timeout_seconds``.
    """
    if launch.world_size == 1:
        return dist.HashStore()  # no port needed
    connection = _connect(launch, timeout_seconds)
    if not agent_keeps_the_store():
        return connection
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"/worker/attempt_{attempt}", connection)


def _connect(launch: LaunchEnvironment, timeout_seconds: float) -> dist.Store:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listens = launch.rank == 0 and not agent_keeps_the_store()
    if not listens:
        _wait_until_reached(address, port, launch, timeout_seconds)
    try:
        return dist.TCPStore(
            address,
            port,
            is_master=listens,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:  # torch's own DistError is one
        raise GroupError(
            f"rank {launch.rank} could not {'listen at' if listens else 'connect to'} "
            f"{address}:{port} (MASTER_ADDR, MASTER_PORT), the address of the store: MASTER_ADDR "
            "must be an address of rank 0's host, and MASTER_PORT a free port of that host. torch "
            f"reports: {error}"
        ) from error


def check_in(
    launch: LaunchEnvironment, configuration: Mapping[str, Any], timeout_seconds: float
) -> Meeting:
    """Meet all ranks, and compare their configurations with rank 0's. All ranks call this.

    Args:
        launch: this process's place among the ranks.
        configuration: what must be the same on every rank, as JSON values.
        timeout_seconds: how long this rank waits for the others.

    Raises:
        GroupError: names the ranks that did not check in.
        RanksDisagree: on every rank; names the keys that differ.
    """
    allow_open_files(launch.rank, launch.world_size)
    kept = round_ = None
    if agent_keeps_the_store():
        connection = _connect(launch, timeout_seconds)
        kept = dist.PrefixStore("megaspeed", connection)
    if launch.world_size == 1:
        alone = dist.HashStore()
        _sign_in(alone, 0, [])
        return Meeting(alone, launch, between_attempts=kept)
    waiting = _Waiting(launch, timeout_seconds)
    if kept is None:
        store = dist.PrefixStore("meeting", open_store(launch, timeout_seconds))
    else:
        round_ = _Round.join(connection, launch, waiting)
        store = dist.PrefixStore(f"meeting {round_.name}", connection)
    if launch.rank == 0:
        store.set("configuration", json.dumps(configuration))
    else:
        waiting.until_there(store, ["configuration"], lambda: [0])
    reference = json.loads(store.get("configuration"))
    _sign_in(store, launch.rank, _differences(reference, dict(configuration)))
    if launch.rank == 0:
        _give_verdict(store, launch.world_size, waiting, round_)
    else:
        waiting.until_there(store, ["verdict"], lambda: _missing_as_published(store))
    verdict = json.loads(store.get("verdict"))
    if verdict is not None:
        store.set(f"told {launch.rank}", "")
        if launch.rank == 0:  # the store may end with this process
            told = [f"told {rank}" for rank in range(launch.world_size)]
            with suppress(RuntimeError):
                store.wait(told, timedelta(seconds=_SECONDS_UNTIL_TOLD))
        raise RanksDisagree(verdict)
    together = json.loads(store.get(f"place {_place()}"))
    neighbours = tuple(Neighbour(*one) for one in together if one[0] != launch.rank)
    return Meeting(store, launch, neighbours, kept)


def say(line: str) -> None:
    """Write a line to standard error at once."""
    with suppress(OSError, ValueError):  # a full disk, a closed file
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def ranks_named(ranks: list[int]) -> str:
    """Such as "rank 3" or "ranks 1, 4, 5 and 12 more"."""
    listed = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}{more}"


class _Round:
    """One attempt of the ranks of a store that outlives them, under a name that all of them know.

        each rank    appends a random word to a list in the store
        rank 0       answers each word of the list with the name of the attempt

    The number of restarts does not name an attempt: torchrun does not count the restarts after
    which nodes have joined or left, so it may differ from node to node, or be that of an earlier
    attempt, whose keys are still in the store.
    """

    def __init__(self, store: dist.Store, name: str) -> None:
        self.name = name
        self._store = store
        self._answered: set[str] = set()

    @classmethod
    def join(cls, connection: dist.Store, launch: LaunchEnvironment, waiting: "_Waiting") -> Self:
        """All ranks call this; ranks other than 0 wait for rank 0."""
        store, own = dist.PrefixStore("rounds", connection), secrets.token_hex(8)
        if launch.rank == 0:
            store.append("arrivals", "")  # type: ignore[attr-defined]  # not in stubs
            return cls(store, own)
        store.append("arrivals", f"{own} ")  # type: ignore[attr-defined]  # not in stubs
        waiting.until_there(store, [f"round of {own}"], lambda: [0])
        return cls(store, store.get(f"round of {own}").decode())

    def answer_arrivals(self) -> None:
        """Rank 0: tell the name of the attempt to all ranks that have arrived, also to dead ones of
        earlier attempts.
        """
        arrived = set(self._store.get("arrivals").decode().split())
        for word in arrived - self._answered:
            self._store.set(f"round of {word}", self.name)
        self._answered = arrived


class _Waiting:
    """Waits for other ranks with a timeout, and reports from time to time what it waits for."""

    def __init__(self, launch: LaunchEnvironment, timeout_seconds: float) -> None:
        self._launch = launch
        self._timeout = timeout_seconds
        self._start = time.monotonic()
        self._tell_at = self._start + _SECONDS_UNTIL_TOLD

    @property
    def seconds(self) -> float:
        """How long this rank has waited until now."""
        return time.monotonic() - self._start

    def until_there(
        self,
        store: dist.Store,
        keys: list[str],
        missing: Callable[[], list[int]],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait for keys of the store.

        Args:
            store: where other ranks set the keys.
            keys: what to wait for.
            missing: returns the ranks that have not set them yet; called only for a message.
            meanwhile: called several times a second.
        """
        while True:
            try:
                meanwhile()
                store.wait(keys, timedelta(seconds=_SECONDS_A_TRY))
                return
            except dist.DistStoreError:  # not all keys are set yet
                self.say_or_end(lambda: self._waited_for(missing()))
            except dist.DistNetworkError as error:
                raise GroupError(
                    f"rank {self._launch.rank} lost the connection to the store (at "
                    f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}): the process that "
                    "keeps it has ended; look for the first error of rank 0 and of its launcher"
                ) from error

    def say_or_end(self, why: Callable[[], str], *, also_rank_1: bool = False) -> None:
        """Print why this rank waits, if it is time; one rank of each host does.

        Args:
            why: the message; empty if the wait is just over.
            also_rank_1: because rank 0, which is on the same host, may not have started.

        Raises:
            GroupError: the time is over.
        """
        if self.seconds >= self._timeout:
            raise GroupError(f"{why()}; no rank can continue without the others")
        if time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + 3 * _SECONDS_UNTIL_TOLD
            speaks = self._launch.local_rank == 0 or (also_rank_1 and self._launch.rank == 1)
            if speaks and (line := why()):
                say(f"{line}; the limit is {self._timeout:.0f} s")

    def _waited_for(self, absent: list[int]) -> str:
        if not absent:
            return ""
        return (
            f"rank {self._launch.rank} has waited {self.seconds:.0f} s for {ranks_named(absent)} "
            f"of {self._launch.world_size} (world size from {self._launch.source}). Each of them "
            f"must be started and reach {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        )


def agent_keeps_the_store() -> bool:
    """Whether torchrun's agent or rank 0's supervisor keeps the store after the ranks end."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _wait_until_reached(
    address: str, port: int, launch: LaunchEnvironment, timeout_seconds: float
) -> None:
    waiting = _Waiting(launch, timeout_seconds)
    while True:
        try:
            socket.create_connection((address, port), timeout=_SECONDS_UNTIL_TOLD).close()
            return
        except OSError as error:  # also raised if the name cannot be resolved
            why = (
                f"rank {launch.rank} has not reached the store of rank 0 at {address}:{port} "
                f"(MASTER_ADDR, MASTER_PORT) for {waiting.seconds:.0f} s: "
                f"{error.strerror or error}. Rank 0 must be started, and the address must be one "
                "of its host, not behind a firewall"
            )
            waiting.say_or_end(partial(str, why), also_rank_1=True)
            time.sleep(_SECONDS_A_TRY)


def _sign_in(store: dist.Store, rank: int, differences: list[str]) -> None:
    record = {
        "host": socket.gethostname(),
        "place": _place(),
        "process": os.getpid(),
        "error_file": os.environ.get("TORCHELASTIC_ERROR_FILE"),
        "differences": differences,
    }
    store.set(f"beat {rank}", json.dumps([0, "start-up", 0, 1.0]))  # before other ranks read it
    store.set(f"rank {rank}", json.dumps(record))


def _place() -> str:
    """Equal for processes on one host and in one PID namespace, which can see each other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        boot = namespace = ""
    return f"{socket.gethostname()} {boot} {namespace}"


def _publish_missing(store: dist.Store, world_size: int) -> list[int]:
    """Rank 0: the ranks that have not checked in. The others read this answer, because asking for
    each rank takes the store long if all ranks ask.
    """
    missing = [rank for rank in range(world_size) if not store.check([f"rank {rank}"])]
    store.set("missing", json.dumps(missing))
    return missing


def _missing_as_published(store: dist.Store) -> list[int]:
    published: list[int] = json.loads(store.get("missing")) if store.check(["missing"]) else []
    return published


def _give_verdict(
    store: dist.Store, world_size: int, waiting: _Waiting, round_: "_Round | None"
) -> None:
    """Rank 0: wait for every rank, compare them, and publish the ranks of each host."""
    keys = [f"rank {rank}" for rank in range(world_size)]
    waiting.until_there(
        store,
        keys,
        lambda: _publish_missing(store, world_size),
        meanwhile=(lambda: None) if round_ is None else round_.answer_arrivals,
    )
    records = [json.loads(record) for record in store.multi_get(keys)]
    places: dict[str, list[tuple[int, int, str | None]]] = {}
    for rank, record in enumerate(records):
        one = (rank, record["process"], record["error_file"])
        places.setdefault(record["place"], []).append(one)
    for place, ranks in places.items():
        store.set(f"place {place}", json.dumps(ranks))
    store.set("verdict", json.dumps(_verdict([record["differences"] for record in records])))


def _verdict(differences: list[list[str]]) -> str | None:
    ranks_by_difference: dict[tuple[str, ...], list[int]] = {}
    for rank, own in enumerate(differences):
        if own:
            ranks_by_difference.setdefault(tuple(own), []).append(rank)
    if not ranks_by_difference:
        return None
    lines = [
        f"  {ranks_named(ranks)}: {', '.join(own)}" for own, ranks in ranks_by_difference.items()
    ]
    return "\n".join(
        [
            "All ranks must have one configuration. These differ from rank 0's (rank 0 -> theirs):",
            *lines,
            "Give every node the same files and the same command line.",
        ]
    )


def _differences(reference: dict[str, Any], own: dict[str, Any]) -> list[str]:
    """Such as "parallel.tensor 2 -> 1"."""
    before, now = dict(leaves(reference)), dict(leaves(own))
    return [
        f"{key} {json.dumps(before.get(key))} -> {json.dumps(now.get(key))}"
        for key in dict.fromkeys([*before, *now])
        if before.get(key) != now.get(key)
    ][:_MOST_NAMED]

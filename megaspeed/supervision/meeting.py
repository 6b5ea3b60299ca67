"""The first step of a run: all ranks connect to one key-value store and compare their settings.

    rank 0       listens at MASTER_ADDR:MASTER_PORT (torchrun's agent does so in its place)
    others       connect
    every rank   checks in: host, process, and how configuration and code differ from rank 0's
    rank 0       writes the result: all ranks continue, or all raise the same error

Missing ranks, a wrong address, and different configurations or code are detected here, and the
error names them. Without these checks, each would be a silent hang or a mixture of two models.
"""

import dataclasses
import hashlib
import json
import os
import secrets
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from megaspeed.files.json_values import leaves
from megaspeed.supervision.process_end import SUPERVISOR
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.topology.process_settings import allow_open_files
from megaspeed.topology.store import (
    Waiting,
    agent_keeps_the_store,
    connect,
    open_store,
    ranks_named,
    wait_for_keys,
)
from megaspeed.version import __version__

_SECONDS_UNTIL_READ = 10.0  # for other ranks to read why the run cannot start
_MOST_NAMED = 16
_CODE = Path(__file__).parents[1]


def software() -> dict[str, str]:
    """The versions of what determines the result of training, by name; takes about 10 ms.

    The version of megaspeed includes a hash of its source, because two checkouts may have the same
    number.
    """
    code = hashlib.sha256()
    for file in sorted(_CODE.rglob("*.py")):
        code.update(str(file.relative_to(_CODE)).encode() + b"\0" + file.read_bytes() + b"\0")
    return {
        "megaspeed": f"{__version__} (code {code.hexdigest()[:12]})",
        "torch": str(torch.__version__),
        "deepspeed": version("deepspeed"),
    }


class RanksDisagree(RuntimeError):
    """Two ranks were started with different inputs."""


class LocalRank(NamedTuple):
    """Another rank of the same host."""

    rank: int
    process: int
    error_file: str | None  # the file in which torchrun looks for the reason why the rank ended


@dataclass(frozen=True)
class Meeting:
    """The store, and the other ranks of this host."""

    store: dist.Store
    launch: LaunchEnvironment
    local_ranks: tuple[LocalRank, ...] = ()
    between_attempts: dist.Store | None = None
    """A store that outlives this attempt, for the next one; None if no process keeps one."""
    spare_ranks: tuple[int, ...] = ()

    def without_spare_ranks(self, world_size: int) -> "Meeting":
        """The meeting of the first ``world_size`` ranks, which train; the others are spare."""
        launch = self.launch
        if launch.rank < world_size:
            launch = dataclasses.replace(launch, world_size=world_size)
        spare = tuple(range(world_size, self.launch.world_size))
        return dataclasses.replace(self, launch=launch, spare_ranks=spare)

    def own_connection(self) -> dist.Store:
        """Another connection to the store. One connection serves one call at a time."""
        connection: dist.Store = self.store.clone()  # type: ignore[attr-defined]  # not in stubs
        return connection

    def report_end(self, store: dist.Store, seconds: float, dead: set[int]) -> None:
        """Inform the other ranks that this rank has ended. If the store ends with this process,
        wait for ``seconds`` until all ranks that are not dead have ended.

        ``store`` is a connection that no other thread uses. Raises RuntimeError if it is lost.
        """
        # A stopped spare rank must see the end of the run. Otherwise its launcher waits for it.
        self.kill_local_ranks(self.spare_ranks, signal.SIGCONT)
        store.set(f"ended {self.launch.rank}", "")
        if self.launch.rank == 0 and not agent_keeps_the_store():
            others = {*range(self.launch.world_size), *self.spare_ranks} - dead
            wait_for_keys(store, [f"ended {rank}" for rank in others], seconds)

    def kill_local_ranks(self, ranks: Sequence[int], number: int = signal.SIGKILL) -> None:
        """Kill those of ``ranks`` that run on this host. A stopped process ignores SIGTERM, so a
        launcher would wait for it for half a minute.
        """
        for one in self.local_ranks:
            if one.rank in ranks:
                with suppress(OSError):
                    os.kill(one.process, number)


def check_in(
    launch: LaunchEnvironment, configuration: Mapping[str, Any], timeout_seconds: float
) -> Meeting:
    """Meet all ranks, and compare configurations and software with rank 0's. All ranks call this.

    Raises:
        GroupError: names the ranks that did not check in.
        RanksDisagree: on every rank; names the ranks, their hosts, and what differs.
    """
    allow_open_files(launch.rank, launch.world_size)
    kept = attempt = None
    if agent_keeps_the_store():
        connection = connect(launch, timeout_seconds)
        kept = dist.PrefixStore("megaspeed", connection)
    if launch.world_size == 1:
        alone = dist.HashStore()
        _write_record(alone, 0, "")
        return Meeting(alone, launch, between_attempts=kept)
    compared = {"software": software(), **configuration}
    waiting = Waiting(launch, timeout_seconds)
    if kept is None:
        store = dist.PrefixStore("meeting", open_store(launch, timeout_seconds))
    else:
        attempt = _Attempt.join(connection, launch, waiting)
        store = dist.PrefixStore(f"meeting {attempt.name}", connection)
    if launch.rank == 0:
        store.set("configuration", json.dumps(compared))
    else:
        waiting.wait_for_keys(store, ["configuration"], lambda: [0])
    reference = json.loads(store.get("configuration"))
    _write_record(store, launch.rank, _differences(reference, compared))
    if launch.rank == 0:
        _write_result(store, launch.world_size, waiting, attempt)
    else:
        store.compare_set("missing", "", "[]")  # rank 0 writes the missing ranks
        waiting.wait_for_keys(store, ["result"], lambda: list(json.loads(store.get("missing"))))
    problem = json.loads(store.get("result"))
    if problem is not None:
        store.set(f"read {launch.rank}", "")
        if launch.rank == 0:  # the store may end with this process
            with suppress(RuntimeError):
                read = [f"read {rank}" for rank in range(launch.world_size)]
                store.wait(read, timedelta(seconds=_SECONDS_UNTIL_READ))
        raise RanksDisagree(problem)
    on_this_host = [LocalRank(*one) for one in json.loads(store.get(f"host {_host_id()}"))]
    others = tuple(one for one in on_this_host if one.rank != launch.rank)
    return Meeting(store, launch, others, kept)


class _Attempt:
    """One attempt of the ranks, in a store that outlives it, under a name that all ranks know.

        each rank    appends a random word to a list in the store
        rank 0       answers each word of the list with the name of the attempt

    The number of restarts does not name an attempt: torchrun does not count the restarts after
    which nodes have joined or left, so it may differ from node to node, or be that of an earlier
    attempt, whose keys are still in the store. Supervisors count every attempt, and one may keep a
    rank of an earlier attempt for a while, so there only ranks with the same number meet.
    """

    def __init__(self, store: dist.Store, name: str) -> None:
        self.name = name
        self._store = store
        self._answered: set[str] = set()

    @classmethod
    def join(cls, connection: dist.Store, launch: LaunchEnvironment, waiting: "Waiting") -> Self:
        """All ranks call this. Ranks other than 0 wait for the name from rank 0."""
        number = os.environ["TORCHELASTIC_RESTART_COUNT"] if SUPERVISOR in os.environ else ""
        store, word = dist.PrefixStore(f"attempts{number}", connection), secrets.token_hex(8)
        if launch.rank == 0:
            store.append("words", "")  # type: ignore[attr-defined]  # not in stubs
            return cls(store, word)
        store.append("words", f"{word} ")  # type: ignore[attr-defined]  # not in stubs
        waiting.wait_for_keys(store, [f"attempt of {word}"], lambda: [0])
        return cls(store, store.get(f"attempt of {word}").decode())

    def answer(self) -> None:
        """Rank 0: write the name of the attempt for all ranks that have arrived, also for dead ones
        of earlier attempts.
        """
        words = set(self._store.get("words").decode().split())
        for word in words - self._answered:
            self._store.set(f"attempt of {word}", self.name)
        self._answered = words


def _write_record(store: dist.Store, rank: int, differences: str) -> None:
    record = {
        "host": socket.gethostname(),
        "host_id": _host_id(),
        "local_rank": LocalRank(rank, os.getpid(), os.environ.get("TORCHELASTIC_ERROR_FILE")),
        "differences": differences,
    }
    # Other ranks may read the heartbeat as soon as they have read the record.
    store.set(f"heartbeat {rank}", json.dumps([0, "start-up", 0, 1.0, 0]))
    store.set(f"rank {rank}", json.dumps(record))


def _host_id() -> str:
    """Equal for processes on one host and in one PID namespace, which can see each other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        boot = namespace = ""
    return f"{socket.gethostname()} {boot} {namespace}"


def _write_result(
    store: dist.Store, world_size: int, waiting: Waiting, attempt: _Attempt | None
) -> None:
    """Rank 0: wait for every rank, compare them, and write the ranks of each host."""
    keys = [f"rank {rank}" for rank in range(world_size)]

    def publish_missing_ranks() -> list[int]:
        # The other ranks read this answer, because the store could not serve so many requests if
        # each of them asked for each rank.
        missing = [rank for rank in range(world_size) if not store.check([keys[rank]])]
        store.set("missing", json.dumps(missing))
        return missing

    answer = attempt.answer if attempt is not None else (lambda: None)
    waiting.wait_for_keys(store, keys, publish_missing_ranks, meanwhile=answer)
    records = [json.loads(record) for record in store.multi_get(keys)]
    hosts: dict[str, list[Any]] = {}
    for record in records:
        hosts.setdefault(record["host_id"], []).append(record["local_rank"])
    for host, local_ranks in hosts.items():
        store.set(f"host {host}", json.dumps(local_ranks))
    ranks_by_difference: dict[str, list[int]] = {}
    for rank, record in enumerate(records):
        if record["differences"]:
            own = f"{record['host']}: {record['differences']}"
            ranks_by_difference.setdefault(own, []).append(rank)
    lines = [f"  {ranks_named(ranks)} on {own}\n" for own, ranks in ranks_by_difference.items()]
    problem = (
        "All ranks must have one configuration and one installation. These differ (rank 0, on "
        f"{records[0]['host']} -> theirs):\n"
        f"{''.join(lines[:_MOST_NAMED])}Give every node the same code, files and command line."
    )
    store.set("result", json.dumps(problem if lines else None))


def _differences(reference: dict[str, Any], own: dict[str, Any]) -> str:
    """Such as "parallel.tensor 2 -> 1"; empty if the configurations are equal."""
    before, now = dict(leaves(reference)), dict(leaves(own))
    changes = [
        f"{key} {json.dumps(before.get(key))} -> {json.dumps(now.get(key))}"
        for key in dict.fromkeys([*before, *now])
        if before.get(key) != now.get(key)
    ]
    return ", ".join(changes[:_MOST_NAMED])

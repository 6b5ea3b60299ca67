"""A pool of rank processes, with which a test with several ranks costs milliseconds, not a launch.

    def sum_of_ranks(launch: LaunchEnvironment, scale: float) -> float:
        with ParallelContext.create(Grid(pp=1, dp=4, tp=1), launch, timeout_seconds=30) as context:
            total = torch.tensor(scale * context.rank)
            dist.all_reduce(total, group=context.data_group)
            return total.item()

    def test_every_rank_has_the_sum(pool: RankPool) -> None:
        assert pool.run(4, sum_of_ranks, 10.0) == [60.0] * 4

The function is at the top level of its module, because the ranks import it. If a rank raises, the
test fails at once with that rank's traceback. If a job hangs, the test fails with the stack of
every rank. Every job has fresh processes. Each is forked in milliseconds from a process that has
imported everything.
"""

import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import torch.distributed as dist

from megaspeed.topology.launch import LaunchEnvironment
from tests.support.fork_server import start_fork_server
from tests.support.machine import limit
from tests.support.rank_worker import STACK_SIGNAL, Job, Outcome, serve

T = TypeVar("T")

_SECONDS_TO_WRITE_STACKS = limit(1)

_LOST_PEER = re.compile("by peer|Broken pipe")
"""gloo's messages if another rank is gone. Its process may take a moment more to end."""
_SECONDS_TO_END = limit(5)


class RankFailure(AssertionError):
    """A rank raised or died, or the job did not end in time."""


@dataclass(frozen=True)
class _Rank:
    process: ForkServerProcess
    connection: Connection
    log: Path

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class RankPool:
    """Up to ``size`` rank processes on this machine. Each is started when it is first needed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: dict[int, _Rank] = {}
        self._logs = tempfile.TemporaryDirectory(prefix="ranks-")
        self._context = multiprocessing.get_context("forkserver")

    def __enter__(self) -> Self:
        start_fork_server()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._kill(range(self.size))
        self._logs.cleanup()

    def run(
        self,
        world_size: int,
        function: Callable[..., T],
        *args: object,
        timeout_seconds: float = 120,
    ) -> list[T]:
        """Call ``function(launch, *args)`` on the ranks 0 .. world_size - 1, and return their
        results.

        ``function``, ``args`` and the results must be picklable. Raises RankFailure as soon as one
        rank raises or dies, or if not all have returned after ``limit(timeout_seconds)``.
        """
        __tracebackhide__ = True
        if not 1 <= world_size <= self.size:
            raise ValueError(f"the pool has 1 to {self.size} ranks, not {world_size}")
        ranks = [self._started(rank) for rank in range(world_size)]
        try:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            jobs = _jobs(world_size, store.port, pickle.dumps((function, args)))
            for rank, job in zip(ranks, jobs, strict=True):
                rank.connection.send_bytes(pickle.dumps(job))
            outcomes = _collect(ranks, limit(timeout_seconds))
        except BaseException as error:
            if not isinstance(error, RankFailure):  # for example, the time limit of the test
                error.add_note(_stacks(ranks))
            raise
        finally:
            self._renew(range(world_size))
        return [pickle.loads(outcome.value or b"") for outcome in outcomes]

    def _renew(self, numbers: Iterable[int]) -> None:
        """Kill ranks that have run, and start new ones while the test continues."""
        self._kill(numbers)
        for number in numbers:
            self._started(number)

    def _started(self, number: int) -> _Rank:
        known = self._ranks.get(number)
        if known is not None and known.process.is_alive():
            return known
        log = Path(self._logs.name) / f"rank{number}.log"
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=serve, args=(theirs, log), name=f"rank {number}")
        process.start()
        theirs.close()
        self._ranks[number] = _Rank(process, ours, log)
        return self._ranks[number]

    def _kill(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number in self._ranks:
                self._ranks.pop(number).kill()


def _jobs(world_size: int, port: int, call: bytes) -> list[Job]:
    launches = [
        LaunchEnvironment(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
            source="RANK/WORLD_SIZE",
        )
        for rank in range(world_size)
    ]
    return [Job(list(sys.path), launch, _variables(launch, port), call) for launch in launches]


def _variables(launch: LaunchEnvironment, port: int) -> dict[str, str]:
    """Return torchrun's variables. As under torchrun, this process keeps the store, so that no rank
    waits for rank 0.
    """
    return {
        "RANK": str(launch.rank),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_RANK": str(launch.local_rank),
        "LOCAL_WORLD_SIZE": str(launch.local_world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _collect(ranks: list[_Rank], timeout_seconds: float) -> list[Outcome]:
    """Return the outcomes in the order of ranks. Raise RankFailure at the first failure."""
    __tracebackhide__ = True
    outcomes: dict[int, Outcome] = {}
    deadline = time.monotonic() + timeout_seconds
    while len(outcomes) < len(ranks):
        pending = {rank.connection: n for n, rank in enumerate(ranks) if n not in outcomes}
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailure(
                f"{len(pending)} of {len(ranks)} ranks did not return within "
                f"{timeout_seconds:.0f} s "
                f"(ranks {', '.join(map(str, pending.values()))})\n{_stacks(ranks)}"
            )
        for connection, n in pending.items():
            if connection in ready:
                outcomes[n] = _receive(ranks[n])
        if any(outcome.traceback is not None for outcome in outcomes.values()):
            first = _first(outcomes)
            if _LOST_PEER.search(outcomes[first].traceback or ""):
                outcomes |= _ended(ranks, [n for n in pending.values() if n not in outcomes])
                first = _first(outcomes)
            raise RankFailure(
                f"rank {first} of {len(ranks)} failed first\n"
                f"{outcomes[first].traceback}{_written(ranks[first])}"
            )
    return [outcomes[n] for n in range(len(ranks))]


def _first(outcomes: Mapping[int, Outcome]) -> int:
    """Return the rank that failed first."""
    failed = [n for n, outcome in outcomes.items() if outcome.traceback is not None]
    return min(failed, key=lambda n: outcomes[n].at_seconds)


def _ended(ranks: list[_Rank], others: list[int]) -> dict[int, Outcome]:
    """Return the outcomes of those of the other ranks whose processes end within moments."""
    sentinels = {ranks[n].process.sentinel: n for n in others}
    ended = wait(list(sentinels), timeout=_SECONDS_TO_END) if others else []
    return {n: _receive(ranks[n]) for sentinel, n in sentinels.items() if sentinel in ended}


def _receive(rank: _Rank) -> Outcome:
    try:
        outcome: Outcome = pickle.loads(rank.connection.recv_bytes())
    except (EOFError, ConnectionError):
        rank.process.join()
        code = rank.process.exitcode or 0
        reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        # A death comes before any error that it causes on other ranks.
        return Outcome(at_seconds=0.0, traceback=f"the process died: {reason}\n")
    return outcome


def _stacks(ranks: list[_Rank]) -> str:
    """Make every rank write its Python stacks, and return what all have written."""
    for rank in ranks:
        if rank.process.is_alive() and rank.process.pid is not None:
            os.kill(rank.process.pid, STACK_SIGNAL)
    time.sleep(_SECONDS_TO_WRITE_STACKS)
    return "\n".join(f"--- rank {n} ---{_written(rank)}" for n, rank in enumerate(ranks))


def _written(rank: _Rank) -> str:
    text = rank.log.read_text(errors="replace") if rank.log.exists() else ""
    return f"\nWhat it wrote:\n{text}" if text else ""

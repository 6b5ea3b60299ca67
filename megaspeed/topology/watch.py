"""Watches a run from inside each of its ranks, so that no failure is silent.

    what is seen                                    by whom                             found within
    this rank raised                                the rank itself                     at once
    another process of this host has ended          every rank of the host (pidfd)      1 s
    the launcher has ended                          every rank below it (pidfd)         1 s
    rank 0's process, which keeps the store, ended  every rank that asks the store      3 s
    a rank gives no sign of life                    rank 0 (and rank 1 watches rank 0)  hang timeout
    no progress                                     every rank                          hang timeout

Whoever sees something first claims it in the store: that rank alone writes to the console. All
others see the claim, write what they know to their log files, and end. A main thread that waits for
a dead rank, perhaps in a kernel of NCCL, is not asked.

Two threads run in each rank. One polls file descriptors and clocks, and can end the process. The
other asks the store, and may block if the store's host is gone.
"""

import contextlib
import faulthandler
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch.distributed as dist

from megaspeed.topology.activity import Activity
from megaspeed.topology.failure import describe_failure, place_of
from megaspeed.topology.grid import Grid
from megaspeed.topology.hang import RankState, explain_hang, pending_collectives
from megaspeed.topology.meeting import Meeting, Neighbour, agent_keeps_the_store, say
from megaspeed.topology.process_exit import EXIT_FAILED, EXIT_HANG, leave
from megaspeed.topology.processes import ProcessesAndPipe, launcher_processes
from megaspeed.topology.rank_log import RankLog
from megaspeed.topology.stop_signal import STOP_SIGNALS, StopSignal

Kind = Literal["failed", "hang"]

_PERIOD_SECONDS = 1.0
_SECONDS_FOR_THE_MAIN_THREAD = 12.0
"""After another rank's failure: a little longer than a save under way may take (10 s)."""
_SECONDS_TO_ANSWER = 6.0
"""After a hang was found, until each rank has said what it waits for."""
_SECONDS_FOR_A_BETTER_REASON = 4.0
"""A rank that lost a connection waits this long for the rank that knows why."""
_SECONDS_TO_SEE_THE_END = 10.0
"""How long the process that keeps the store waits for the others to be done with it."""
_PERIODS_OF_DOUBT = 3.0
"""A store that has not answered for so long is asked nothing, because the call may block."""
_SECONDS_OF_A_STANDSTILL = 20.0
_SECONDS_UNTIL_KILLED = 60.0
"""Whatever blocks a process that is to end, it ends then."""
_SECONDS_BETWEEN_CTRL_C = 1.0
"""Terminals and launchers may both send one Ctrl-C on."""

_REPORTED = "_megaspeed_reported"

_LOST_PEER = re.compile(
    "by peer|Broken pipe|Socket closed|NCCL|ncclRemoteError|remote process|Connection refused",
)
"""How gloo and NCCL tell that another rank is gone."""


@dataclass(frozen=True)
class _Claim:
    """What has ended the run, as the store has it."""

    kind: Kind
    by: int  # the rank that saw it, which tells the user

    def to_json(self) -> str:
        return json.dumps([self.kind, self.by])


class Watch:
    """Two threads beside the training; made and closed by the main thread.

    Args:
        meeting: the store, and the other ranks of this host.
        grid: the layout.
        activity: what this rank is doing.
        stop: what this process was told by signals.
        log: this rank's log file.
        hang_timeout_seconds: how long a rank may make no progress.
        end: ends this process at once.
    """

    def __init__(
        self,
        meeting: Meeting,
        grid: Grid,
        activity: Activity,
        stop: StopSignal,
        log: RankLog,
        *,
        hang_timeout_seconds: float,
        end: Callable[[int], None] = leave,
    ) -> None:
        self._meeting = meeting
        self._rank = meeting.launch.rank
        self._world = grid.world_size
        self._grid = grid
        self._activity = activity
        self._stop = stop
        self._log = log
        self._hang_timeout = hang_timeout_seconds
        # The store answers some thousand questions a second, and shares rank 0's processors.
        self._period = min(_PERIOD_SECONDS * (1 + self._world / 1024), hang_timeout_seconds / 8)
        self._end = end
        # A store's connection serves one call at a time, and a call may block.
        self._store = meeting.own_connection()
        self._claims = meeting.own_connection()
        self._host_of_rank_0 = meeting.host_of(0)
        self._memory_kills = _processes_killed_for_memory()
        self.speaks = False
        """Whether this rank was the first to raise an expected exception, and so tells of it."""
        self._claim: _Claim | None = None
        self._claimed = threading.Event()
        self._closing = threading.Event()
        self._dead: set[int] = set()  # ranks that ended without a word
        self._seconds_without_progress = 0.0
        self._last_contact = time.monotonic()
        self._store_lost: float | None = None
        self._is_silent = False  # the store: neither its end nor an answer has come
        self._signals, self._told = os.pipe()
        os.set_blocking(self._told, False)
        self._threads = [
            threading.Thread(target=self._guard, name="watch", daemon=True),
            threading.Thread(target=self._talk, name="watch: store", daemon=True),
        ]

    def __enter__(self) -> Self:
        # Even if the main thread is blocked, this pipe gets the number of each signal.
        signal.set_wakeup_fd(self._told, warn_on_full_buffer=False)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """This rank is done, well or not; nobody needs to wonder where it is."""
        self._closing.set()
        self._end_in_any_case()
        signal.set_wakeup_fd(-1)
        with contextlib.suppress(OSError):
            os.write(self._told, b"\0")
        for thread in self._threads:
            thread.join(_PERIOD_SECONDS)
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._claims.set(f"ended {self._rank}", "")
            if self._meeting.hosts_the_store:
                self._wait_for_the_others(self._claims)
        faulthandler.cancel_dump_traceback_later()
        if not self._threads[0].is_alive():
            os.close(self._signals)
            os.close(self._told)

    @contextmanager
    def failures_reported(self, *, expected: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Reports an exception that leaves this block, unless another rank's is the reason. Nested
        blocks report it once.

        Args:
            expected: exceptions that the caller tells in its own words. Other ranks learn of them.
        """
        try:
            yield
        except Exception as error:
            if hasattr(error, _REPORTED):
                raise
            setattr(error, _REPORTED, True)
            if isinstance(error, expected):
                self.speaks = self._claim_as("failed")
            else:
                self._report(error)
            raise

    @property
    def is_over(self) -> bool:
        """Whether rank 0 is done, or a rank has failed. Asks the store; for a rank that is spare.

        Raises RuntimeError if the store is gone.
        """
        return self._claimed.is_set() or self._claims.check(["ended 0"])

    @property
    def exit_code(self) -> int:
        """After a failure: of which kind the first one was."""
        return _exit_code(self._claim)

    def _report(self, error: Exception) -> None:
        text = describe_failure(error, self._grid, self._rank)
        self._log.write(text)
        if _LOST_PEER.search(str(error)) and self._world > 1:
            self._claimed.wait(_SECONDS_FOR_A_BETTER_REASON)
        if self._claim_as("failed"):
            sys.stderr.write(text)
            sys.stderr.flush()
            _leave_for_torchrun(os.environ.get("TORCHELASTIC_ERROR_FILE"), text)

    # The thread that polls.

    def _guard(self) -> None:
        neighbours = {one.process: one for one in self._meeting.neighbours}
        launchers = launcher_processes()
        interrupted: float | None = None
        beats, since, looked = -1, time.monotonic(), time.monotonic()
        with ProcessesAndPipe((*neighbours, *launchers), self._signals) as seen:
            while not self._closing.is_set():
                ended, told = seen.wait(_PERIOD_SECONDS)
                if self._closing.is_set():
                    return
                for process in ended:
                    if process in neighbours:
                        self._neighbour_ended(neighbours[process])
                    else:
                        self._launcher_ended(interrupted is not None)
                interrupted = self._signalled(told, interrupted)
                now = time.monotonic()
                if now - looked > _SECONDS_OF_A_STANDSTILL:
                    # This thread did not run either: the process was stopped, the machine slept, or
                    # something held Python's lock. What others did meanwhile is not known.
                    since = self._last_contact = now
                if self._activity.beats != beats:
                    beats, since = self._activity.beats, now
                self._look(now, since)
                looked = time.monotonic()

    def _look(self, now: float, since: float) -> None:
        """End this rank if the run is over, or claim that it is.

        Args:
            now: the time.
            since: when this rank made progress last.
        """
        if self._claimed.is_set():
            self._end_with_the_others()
        elif self._store_lost is not None:
            self._end_without_a_store()
        elif now - self._last_contact > self._hang_timeout:
            self._store_lost, self._is_silent = now, True
        elif (
            now - since > self._hang_timeout * self._activity.patience
            # A store that does not answer is not asked: the case above will speak of it.
            and now - self._last_contact < _PERIODS_OF_DOUBT * self._period
        ):
            self._claim_as("hang", now - since)

    def _neighbour_ended(self, neighbour: Neighbour) -> None:
        if neighbour.rank == 0 and not agent_keeps_the_store():
            self._store_lost = time.monotonic()
            return
        try:
            if self._claims.check([f"ended {neighbour.rank}"]):
                return
            doing = _doing(self._claims.get(f"beat {neighbour.rank}"))
        except RuntimeError:
            self._store_lost = time.monotonic()
            return
        self._dead.add(neighbour.rank)
        if self._claim_as("failed"):
            host = socket.gethostname()
            line = self._killed(neighbour.rank, doing, host, neighbour.process)
            say(line)
            _leave_for_torchrun(neighbour.error_file, line)

    def _killed(self, rank: int, doing: str, host: str, process: int | None = None) -> str:
        place = place_of(self._grid, rank, doing, host)
        which = "" if process is None else f" {process}"
        memory = ""
        if process is not None and _processes_killed_for_memory() > self._memory_kills:
            memory = "; the system has killed a process of this host because memory ran out"
        return (
            f"{place} was killed: its process{which} has ended without a word{memory}; meanwhile "
            f"rank {self._rank} is in {self._activity}"
        )

    def _launcher_ended(self, interrupted: bool) -> None:
        if interrupted:
            self._end(128 + signal.SIGINT)
        self._stop.received = signal.SIGHUP
        if self._stop.can_save:
            self._log.note("the launcher has ended: this run saves after its step, and ends")
        else:
            self._end_before_training("the launcher has ended")

    def _signalled(self, numbers: bytes, interrupted: float | None) -> float | None:
        """What to do at once; returns when Ctrl-C came first."""
        now = time.monotonic()
        for number in numbers:
            if number == signal.SIGINT:
                if interrupted is not None and now - interrupted > _SECONDS_BETWEEN_CTRL_C:
                    self._end(128 + signal.SIGINT)
                interrupted = interrupted or now
            # The main thread may be blocked, so that its handler has noted nothing.
            is_stop = number in STOP_SIGNALS
            if is_stop and not self._stop.can_save and not self._claimed.is_set():
                self._end_before_training(signal.Signals(number).name, 128 + number)
        return interrupted

    def _end_before_training(self, reason: str, code: int = EXIT_FAILED) -> None:
        if self._claim_as("failed"):
            say(f"{reason} before the training began: nothing is saved, and nothing is lost")
        self._end(code)

    def _end_with_the_others(self) -> None:
        assert self._claim is not None
        self._end_in_any_case()
        if self._claim.kind == "hang":
            self._write_stacks()
            self._explain_or_wait(self._claim.by)
        else:
            self._closing.wait(_SECONDS_FOR_THE_MAIN_THREAD)
            if self._closing.is_set():
                return  # the main thread has seen it too, and ends this rank in good order
            self._write_stacks()
        with contextlib.suppress(RuntimeError):
            self._claims.set(f"ended {self._rank}", "")
            if self._meeting.hosts_the_store:
                self._wait_for_the_others(self._claims)
        self._end(_exit_code(self._claim))

    def _end_in_any_case(self) -> None:
        """A call to the store may block for ever; this timer needs no Python thread."""
        faulthandler.dump_traceback_later(_SECONDS_UNTIL_KILLED, exit=True, file=self._log.stream)

    def _end_without_a_store(self) -> None:
        """Rank 0 is gone, so nobody can be asked: one rank of each host speaks."""
        self._end_in_any_case()
        if self._closing.wait(_SECONDS_FOR_A_BETTER_REASON):
            return
        launch = self._meeting.launch
        if launch.local_rank == 0 or launch.rank == 1:
            seen = [one.process for one in self._meeting.neighbours if one.rank == 0]
            host = self._host_of_rank_0
            if self._is_silent or agent_keeps_the_store():
                keeper = "the launcher's agent" if agent_keeps_the_store() else "rank 0"
                line = (
                    f"{place_of(self._grid, self._rank, str(self._activity))} lost the store "
                    f"that {keeper} keeps for all ranks ({host}): "
                    + ("no answer" if self._is_silent else "it has ended")
                    + f" for {time.monotonic() - self._last_contact:.0f} s. The process is stopped "
                    "or gone, or the network between the hosts is"
                )
            else:
                line = self._killed(0, "", host, seen[0] if seen else None)
            say(line)
            if seen:
                rank_0 = next(one for one in self._meeting.neighbours if one.rank == 0)
                _leave_for_torchrun(rank_0.error_file, line)
        self._write_stacks()
        self._end(EXIT_FAILED)

    # The thread that asks the store.

    def _talk(self) -> None:
        heard: dict[int, tuple[bytes, float]] = {}
        number, asked = 0, time.monotonic()
        while not self._closing.wait(self._period if number else 0):
            number += 1
            if time.monotonic() - asked > _SECONDS_OF_A_STANDSTILL:
                heard.clear()  # as in _guard
            asked = time.monotonic()
            try:
                beat = json.dumps([number, str(self._activity)])
                self._store.set(f"beat {self._rank}", beat)
                if self._claim is None and self._store.check(["claim"]):
                    self._learn(self._store.get("claim"))
                silent = self._silent(heard)
            except RuntimeError:  # DistNetworkError: the store's process has ended
                self._store_lost = time.monotonic()
                return
            self._last_contact = time.monotonic()
            if silent:
                self._claim_as("hang", self._hang_timeout)

    def _silent(self, heard: dict[int, tuple[bytes, float]]) -> list[int]:
        """Ranks whose beat has not changed for too long: rank 0 looks at all, rank 1 at rank 0."""
        watched = range(1, self._world) if self._rank == 0 else range(self._rank == 1)
        now = time.monotonic()
        beats = self._store.multi_get([f"beat {rank}" for rank in watched]) if watched else []
        for rank, beat in zip(watched, beats, strict=True):
            if rank not in heard or heard[rank][0] != beat:
                heard[rank] = (beat, now)
        late = [rank for rank in watched if now - heard[rank][1] > self._hang_timeout]
        return [rank for rank in late if not self._store.check([f"ended {rank}"])]

    # Claims.

    def _claim_as(self, kind: Kind, seconds: float = 0.0) -> bool:
        """Say what has ended the run; False if another rank said so first."""
        if self._claim is not None:
            return False
        own = _Claim(kind, self._rank).to_json()
        self._seconds_without_progress = seconds
        try:
            first = self._claims.compare_set("claim", "", own).decode() == own
            self._learn(self._claims.get("claim"))
        except RuntimeError:  # nobody can be asked, so this rank speaks for itself
            return True
        return first

    def _learn(self, claim: bytes) -> None:
        kind, by = json.loads(claim)
        self._claim = _Claim(kind, by)
        self._claimed.set()

    # A hang.

    def _write_stacks(self) -> None:
        self._log.note(f"stacks of all threads, in {self._activity}:")
        faulthandler.dump_traceback(self._log.stream, all_threads=True)

    def _explain_or_wait(self, by: int) -> None:
        calls = (*pending_collectives(), *self._activity.pending())
        for call in calls:
            self._log.note(f"  waiting in {call}")
        try:
            state = RankState(str(self._activity), calls)
            self._claims.set(f"state {self._rank}", state.to_json())
            if by == self._rank:
                time.sleep(min(_SECONDS_TO_ANSWER, 2 + self._hang_timeout / 4))
                states = self._states()
                say(self._explanation(states))
                silent = [rank for rank, state in states.items() if state is None]
                self._claims.set("silent", json.dumps(silent))
            else:
                deadline = time.monotonic() + 2 * _SECONDS_TO_ANSWER
                while not self._claims.check(["silent"]) and time.monotonic() < deadline:
                    time.sleep(_PERIOD_SECONDS / 4)
            if self._claims.check(["silent"]):
                self._kill_neighbours(json.loads(self._claims.get("silent")))
        except RuntimeError:
            say(f"no progress, and the store of all ranks does not answer: {self._activity}")

    def _states(self) -> dict[int, RankState | None]:
        states: dict[int, RankState | None] = {}
        for rank in range(self._world):
            answered = self._claims.check([f"state {rank}"])
            state = self._claims.get(f"state {rank}") if answered else None
            states[rank] = None if state is None else RankState.from_json(state)
        return states

    def _kill_neighbours(self, silent: list[int]) -> None:
        """A stopped process answers to no launcher, which would wait for it for half a minute."""
        for neighbour in self._meeting.neighbours:
            if neighbour.rank in silent:
                with contextlib.suppress(OSError):
                    os.kill(neighbour.process, signal.SIGKILL)

    def _explanation(self, states: dict[int, RankState | None]) -> str:
        lines = [explain_hang(states, self._seconds_without_progress)]
        for rank in [rank for rank, state in states.items() if state is None][:8]:
            doing = _doing(self._claims.get(f"beat {rank}"))
            lines.append("  " + place_of(self._grid, rank, doing, self._meeting.host_of(rank)))
        if self._log.path is not None:
            lines.append(f"  stacks of the ranks that answered: {self._log.path.parent}/")
        return "\n".join(lines)

    def _wait_for_the_others(self, store: dist.Store) -> None:
        """Until they are done with the store that ends with this process."""
        deadline = time.monotonic() + _SECONDS_TO_SEE_THE_END
        while time.monotonic() < deadline:
            others = {*range(self._world), *self._meeting.spare_ranks} - self._dead
            if all(store.check([f"ended {rank}"]) for rank in others):
                return
            time.sleep(0.05)


def _exit_code(claim: _Claim | None) -> int:
    return EXIT_HANG if claim is not None and claim.kind == "hang" else EXIT_FAILED


def _doing(beat: bytes) -> str:
    doing: str = json.loads(beat)[1]
    return doing


def _processes_killed_for_memory() -> int:
    """How many processes the kernel has ended on this host because memory ran out."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("oom_kill ")).split()[1])
    return 0


def _leave_for_torchrun(error_file: str | None, text: str) -> None:
    """Write the file in which torchrun looks for the reason why a rank has ended."""
    if error_file is None or Path(error_file).exists():
        return
    extra: dict[str, Any] = {"py_callstack": text, "timestamp": str(int(time.time()))}
    message = {"message": text.splitlines()[0], "extraInfo": extra}
    with contextlib.suppress(OSError):
        Path(error_file).write_text(json.dumps({"message": message}))

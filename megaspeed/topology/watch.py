"""Watches a run from inside each of its ranks, so that no failure is silent.

    failure                                         detected by                         within
    this rank raised an exception                   the rank itself                     at once
    another process of this host has ended          every rank of the host (pidfd)      1 s
    the launcher has ended                          every rank below it (pidfd)         1 s
    rank 0's process, which keeps the store, ended  every rank that asks the store      3 s
    a rank no longer responds                       rank 0 (all ranks watch rank 0)     hang timeout
    no rank makes progress                          rank 0, which sees all              hang timeout

The first rank that detects a failure claims it in the store, and only that rank writes to the
console. The other ranks see the claim, write what they know to their log files, and end. They do
not wait for their main threads, which may be blocked by a dead rank, for example in an NCCL kernel.

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
import threading
import time
import traceback as tracebacks
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from megaspeed.topology.activity import SECONDS_OF_A_STANDSTILL, Activity
from megaspeed.topology.failure import (
    describe_failure,
    place_of,
    processes_killed_for_memory,
    write_error_file,
)
from megaspeed.topology.grid import Grid
from megaspeed.topology.hang import (
    RankState,
    Survey,
    explain_hang,
    pending_collectives,
    states_of_ranks,
)
from megaspeed.topology.meeting import Meeting, Neighbour, agent_keeps_the_store, say
from megaspeed.topology.process_end import EXIT_FAILED, EXIT_HANG, STOP_SIGNALS, StopSignal, leave
from megaspeed.topology.processes import SUPERVISOR, ProcessesAndPipe
from megaspeed.topology.rank_log import RankLog

Kind = Literal["failed", "hang"]

_PERIOD_SECONDS = 1.0
_SECONDS_FOR_THE_MAIN_THREAD = 12.0
"""The main thread has this time to end after another rank failed. A save may take 10 s of it."""
_SECONDS_TO_WRITE_STACKS = 2.0
_SECONDS_TO_ANSWER = 6.0
"""Each rank has this time to report what it waits for, after a hang was detected."""
_SECONDS_FOR_A_BETTER_REASON = 4.0
"""A rank that lost a connection waits this long for the rank that knows why."""
_SECONDS_FOR_THE_OTHER_THREAD = 10.0
"""If the store was lost with a connection, the main thread leaves the report to the thread that
polls, which also waits for a better reason first."""
_SECONDS_TO_SEE_THE_END = 5.0
"""How long the process that keeps the store waits after a failure for the others to see it."""
_SECONDS_TO_FINISH = 45.0
"""At the end of a run, the process that keeps the store waits this long for the others."""
_SECONDS_UNTIL_KILLED = 60.0
"""A process that must end is killed after this time, even if it is blocked."""
_SECONDS_BETWEEN_CTRL_C = 1.0
"""One Ctrl-C may arrive twice: from the terminal and from the launcher."""

_REPORTED = "_megaspeed_reported"

_LOST_PEER = re.compile(
    "by peer|Broken pipe|Socket closed|NCCL|ncclRemoteError|remote process|Connection refused",
)
"""Matches the errors that gloo and NCCL raise if another rank has ended."""


@dataclass(frozen=True)
class _Claim:
    """The failure that ends the run, as it is kept in the store."""

    kind: Kind
    by: int  # the rank that detected it, which reports it to the user

    def to_json(self) -> str:
        return json.dumps([self.kind, self.by])


class Watch:
    """Two threads that run beside training. The main thread creates and closes them.

    Args:
        meeting: the store, and the other ranks of this host.
        grid: the layout.
        activity: what this rank is doing.
        stop: the stop signals that this process has received.
        log: this rank's log file.
        launchers: process numbers of the launchers above this process.
        hang_timeout_seconds: how long the run may make no progress.
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
        launchers: Sequence[int],
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
        # The store answers a few thousand requests a second, on the same processors as rank 0.
        self._period = min(_PERIOD_SECONDS * (1 + self._world / 1024), hang_timeout_seconds / 8)
        self._end = end
        self._launchers = launchers
        # A connection to the store handles one call at a time, and a call may block.
        self._store = meeting.own_connection()
        self._claims = meeting.own_connection()
        self._host_of_rank_0 = meeting.host_of(0)
        self._memory_kills = processes_killed_for_memory()
        self.speaks = False
        """Whether this rank raised an expected exception first, and therefore reports it."""
        self._claim: _Claim | None = None
        self._claimed = threading.Event()
        self._closing = threading.Event()
        self._dead: set[int] = set()  # ranks that ended without a report
        self._seconds_without_progress = 0.0
        self._last_contact = time.monotonic()
        self._store_lost: float | None = None
        self._launcher_is_gone = False
        self._is_silent = False  # the store neither answers nor is known to have ended
        self._earlier_pipe = -1
        self._signals, self._told = os.pipe()
        os.set_blocking(self._told, False)
        self._threads = [
            threading.Thread(target=self._guard, name="watch", daemon=True),
            threading.Thread(target=self._talk, name="watch: store", daemon=True),
        ]

    def __enter__(self) -> Self:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # of the timer of _end_in_any_case
        # Even if the main thread is blocked, this pipe gets the number of each signal.
        self._earlier_pipe = signal.set_wakeup_fd(self._told, warn_on_full_buffer=False)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Report that this rank has ended, with or without success, and stop both threads."""
        self._closing.set()
        self._end_in_any_case()
        signal.set_wakeup_fd(self._earlier_pipe)
        with contextlib.suppress(OSError):
            os.write(self._told, b"\0")
        for thread in self._threads:
            thread.join(_PERIOD_SECONDS)
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._claims.set(f"ended {self._rank}", "")
            if self._meeting.hosts_the_store:
                well = self._claim is None
                self._wait_for_the_others(_SECONDS_TO_FINISH if well else _SECONDS_TO_SEE_THE_END)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not self._threads[0].is_alive():
            os.close(self._signals)
            os.close(self._told)

    @contextmanager
    def failures_reported(self, *, expected: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Reports an exception that leaves this block, unless another rank caused it. Nested blocks
        report it once.

        Args:
            expected: exceptions that the caller reports itself. Other ranks are informed.
        """
        try:
            yield
        except Exception as error:
            if hasattr(error, _REPORTED):
                raise
            setattr(error, _REPORTED, True)
            if isinstance(error, expected):
                self._wait_for_a_better_reason(error)
                self.speaks = self._claim_as("failed")
            else:
                self._report(error)
            raise

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed, or the store of all ranks is gone."""
        return self._claimed.is_set() or self._store_lost is not None

    def rank_0_has_ended(self) -> bool:
        """Whether rank 0 has ended. If a rank has failed, ``has_failed`` is true from now on.

        Raises RuntimeError if the store is gone.
        """
        ended = self._claims.check(["ended 0"])
        if self._claims.check(["claim"]):
            self._learn(self._claims.get("claim"))
        return ended

    @property
    def exit_code(self) -> int:
        """The exit code after a failure; the first failure decides it."""
        return _exit_code(self._claim)

    def _report(self, error: Exception) -> None:
        text = describe_failure(error, self._grid, self._rank)
        gone = self._wait_for_a_better_reason(error)
        if self._claim_as("failed"):
            for rank in gone:
                doing, host = self._doing(rank), self._meeting.host_of(rank)
                say(f"{place_of(self._grid, rank, doing, host)} does not respond")
            say(text.rstrip("\n"))
            write_error_file(os.environ.get("TORCHELASTIC_ERROR_FILE"), text)
        # After all else: the run folder's disk may be what does not respond.
        self._log.open()
        self._log.write(text)

    def _wait_for_a_better_reason(self, error: Exception) -> list[int]:
        """Wait for another rank to report why a connection was lost. If none does, return the ranks
        that no longer respond.
        """
        if not _LOST_PEER.search(str(error)) or self._world == 1:
            return []
        if self._claimed.wait(_SECONDS_FOR_A_BETTER_REASON):
            return []
        try:
            keys = [f"beat {rank}" for rank in range(self._world)]
            before = self._claims.multi_get(keys)
            if self._claimed.wait(3 * self._period):
                return []
            pairs = enumerate(zip(before, self._claims.multi_get(keys), strict=True))
            still = [rank for rank, (beat, later) in pairs if beat == later and rank != self._rank]
            return [rank for rank in still if not self._claims.check([f"ended {rank}"])]
        except RuntimeError:
            # The store is gone, too. The other thread reports it, and ends the process.
            time.sleep(_SECONDS_FOR_THE_OTHER_THREAD)
            return []

    # The thread that polls.

    def _guard(self) -> None:
        try:
            self._guard_until_the_end()
        except Exception:  # only this thread can end a process whose main thread is blocked
            self._log.write(tracebacks.format_exc())
            self._end(EXIT_FAILED)

    def _guard_until_the_end(self) -> None:
        neighbours = {one.process: one for one in self._meeting.neighbours}
        launchers = self._launchers
        interrupted: float | None = None
        looked = time.monotonic()
        with ProcessesAndPipe((*neighbours, *launchers), self._signals) as seen:
            while not self._closing.is_set():
                ended, told = seen.wait(_PERIOD_SECONDS)
                if self._closing.is_set():
                    return
                for process in ended:
                    if process in neighbours:
                        self._neighbour_ended(neighbours[process])
                    else:
                        self._launcher_ended()
                interrupted = self._signalled(told, interrupted)
                now = time.monotonic()
                if now - looked > SECONDS_OF_A_STANDSTILL:
                    # This thread did not run either: the process was stopped, the machine slept, or
                    # another thread held Python's lock. What other ranks did meanwhile is unknown.
                    self._last_contact = now
                self._look(now)
                looked = time.monotonic()

    def _look(self, now: float) -> None:
        """End this rank if the run is over."""
        if self._claimed.is_set():
            self._end_with_the_others()
        elif self._store_lost is not None:
            # The store ends with torchrun's agent or with rank 0's supervisor. If this rank's own
            # agent has ended, or if rank 0 gets SIGTERM because of its supervisor, the run saves.
            may_save = self._launcher_is_gone or SUPERVISOR in os.environ
            saves = may_save and self._stop.can_save
            time_to_save = self._hang_timeout * self._activity.patience
            if not saves or now - self._store_lost > time_to_save:
                self._end_without_a_store()
        elif now - self._last_contact > self._hang_timeout:
            self._store_lost, self._is_silent = now, True

    def _neighbour_ended(self, neighbour: Neighbour) -> None:
        if neighbour.rank == 0 and not agent_keeps_the_store():
            self._store_lost = time.monotonic()
            return
        try:
            if self._claims.check([f"ended {neighbour.rank}"]):
                return
            doing = self._doing(neighbour.rank)
        except RuntimeError:
            self._store_lost = time.monotonic()
            return
        self._dead.add(neighbour.rank)
        if self._claim_as("failed"):
            host = socket.gethostname()
            line = self._killed(neighbour.rank, doing, host, neighbour.process)
            say(line)
            write_error_file(neighbour.error_file, line)

    def _killed(self, rank: int, doing: str, host: str, process: int | None = None) -> str:
        place = place_of(self._grid, rank, doing, host)
        which = "" if process is None else f" {process}"
        memory = ""
        if process is not None and processes_killed_for_memory() > self._memory_kills:
            memory = "; the system has killed a process of this host because memory ran out"
        return (
            f"{place} was killed: its process{which} has ended without a report{memory}; meanwhile "
            f"rank {self._rank} is in {self._activity}"
        )

    def _launcher_ended(self) -> None:
        self._launcher_is_gone = True
        self._stop.received = signal.SIGHUP
        if self._stop.can_save:
            self._log.note("the launcher has ended: this run finishes its step, saves and ends")
        else:
            self._end_before_training("the launcher has ended")

    def _signalled(self, numbers: bytes, interrupted: float | None) -> float | None:
        """Act on signals at once. Returns the time of the first Ctrl-C; None if there was none."""
        now = time.monotonic()
        for number in numbers:
            if number == signal.SIGINT:
                if interrupted is not None and now - interrupted > _SECONDS_BETWEEN_CTRL_C:
                    self._end(128 + signal.SIGINT)
                interrupted = interrupted or now
            # If the main thread is blocked, its signal handler has not run yet.
            is_stop = number in STOP_SIGNALS
            if is_stop and not self._stop.can_save and not self._claimed.is_set():
                self._end_before_training(signal.Signals(number).name, 128 + number)
        return interrupted

    def _end_before_training(self, reason: str, code: int = EXIT_FAILED) -> None:
        if self._claim_as("failed"):
            say(f"{reason} before training began: there is nothing to save")
        self._end(code)

    def _end_with_the_others(self) -> None:
        assert self._claim is not None
        self._end_in_any_case()
        if self._claim.kind == "hang":
            self._explain_or_wait(self._claim.by)
        else:
            self._closing.wait(_SECONDS_FOR_THE_MAIN_THREAD)
            if self._closing.is_set():
                return  # the main thread has detected the failure, too, and ends this rank itself
            self._write_stacks()
        with contextlib.suppress(RuntimeError):
            self._claims.set(f"ended {self._rank}", "")
            if self._meeting.hosts_the_store:
                self._wait_for_the_others(_SECONDS_TO_SEE_THE_END)
        self._end(_exit_code(self._claim))

    def _end_in_any_case(self) -> None:
        """Start a timer that ends this process even if its threads are blocked: the kernel sends
        SIGALRM, whose default action needs neither Python nor a disk.
        """
        signal.setitimer(signal.ITIMER_REAL, _SECONDS_UNTIL_KILLED)

    def _end_without_a_store(self) -> None:
        """The store is gone, so no claim is possible. One rank of each host reports it."""
        self._end_in_any_case()
        if self._closing.wait(_SECONDS_FOR_A_BETTER_REASON):
            return
        launch = self._meeting.launch
        if launch.local_rank == 0 or launch.rank == 1:
            neighbour = next((one for one in self._meeting.neighbours if one.rank == 0), None)
            host = self._host_of_rank_0
            keeper = "rank 0's supervisor" if SUPERVISOR in os.environ else "the launcher's agent"
            if not agent_keeps_the_store():
                keeper = "rank 0"
                process = None if neighbour is None else neighbour.process
                line = self._killed(0, "", host, process)
            if self._is_silent:
                line = (
                    f"no progress for {time.monotonic() - self._last_contact:.0f} s: {keeper} did "
                    f"not answer ({host}). It keeps the store of all ranks. It was stopped, or its "
                    f"machine or network has failed; rank {self._rank} is in "
                    f"{self._activity}"
                )
            elif agent_keeps_the_store():
                line = f"{keeper} ({host}), which keeps the store of all ranks, has ended"
            say(line)
            if neighbour is not None:
                write_error_file(neighbour.error_file, line)
        if self._is_silent and not agent_keeps_the_store():
            self._kill_neighbours([0])
        self._write_stacks()
        self._end(EXIT_HANG if self._is_silent else EXIT_FAILED)

    # The thread that asks the store.

    def _talk(self) -> None:
        ranks = range(self._world if self._rank == 0 else 1)
        survey = Survey(ranks, sees_all=self._rank == 0, period=self._period)
        number = 0
        while not self._closing.wait(self._period if number else 0):
            number += 1
            activity = self._activity
            beat = [number, str(activity), activity.beats, activity.patience]
            try:
                self._store.set(f"beat {self._rank}", json.dumps(beat))
                if self._claim is None and self._store.check(["claim"]):
                    self._learn(self._store.get("claim"))
                seconds = survey.seconds_of_a_hang(self._store, self._hang_timeout)
            except RuntimeError:  # DistNetworkError: the store's process has ended
                self._store_lost = time.monotonic()
                return
            self._last_contact = time.monotonic()
            # Only rank 0 sees all ranks, so only rank 0 reports that none of them makes progress.
            if seconds is not None:
                self._claim_as("hang", seconds)

    def _doing(self, rank: int) -> str:
        return f"last known phase: {json.loads(self._claims.get(f'beat {rank}'))[1]}"

    # Claims.

    def _claim_as(self, kind: Kind, seconds: float = 0.0) -> bool:
        """Claim what has ended the run. Returns False if another rank did so first."""
        if self._claim is not None:
            return False
        own = _Claim(kind, self._rank).to_json()
        self._seconds_without_progress = seconds
        try:
            first = self._claims.compare_set("claim", "", own).decode() == own
            self._learn(self._claims.get("claim"))
        except RuntimeError:  # the store is gone, so this rank reports its own failure
            return True
        return first

    def _learn(self, claim: bytes) -> None:
        kind, by = json.loads(claim)
        self._claim = _Claim(kind, by)
        self._claimed.set()

    # A hang.

    def _write_stacks(self, calls: Sequence[str] = ()) -> None:
        """Write the stacks of all threads to the log, unless its disk does not respond."""

        def write() -> None:
            self._log.open()
            for call in calls:
                self._log.note(f"  waiting in {call}")
            self._log.note(f"stacks of all threads, in {self._activity}:")
            faulthandler.dump_traceback(self._log.stream, all_threads=True)

        writer = threading.Thread(target=write, name="watch: stacks", daemon=True)
        writer.start()
        writer.join(_SECONDS_TO_WRITE_STACKS)

    def _explain_or_wait(self, by: int) -> None:
        calls = (*pending_collectives(), *self._activity.pending())
        # A rank learns of the claim after one period, and then polls once more.
        seconds_to_answer = min(_SECONDS_TO_ANSWER, 2 + self._hang_timeout / 4) + 2 * self._period
        try:
            state = RankState(str(self._activity), calls)
            self._claims.set(f"state {self._rank}", state.to_json())
            self._write_stacks(calls)
            if by == self._rank:
                deadline = time.monotonic() + seconds_to_answer
                keys = [f"state {rank}" for rank in range(self._world)]
                while not self._claims.check(keys) and time.monotonic() < deadline:
                    time.sleep(_PERIOD_SECONDS / 4)
                states = states_of_ranks(self._claims, self._world)
                say(self._explanation(states))
                silent = [rank for rank, state in states.items() if state is None]
                self._claims.set("silent", json.dumps(silent))
            else:
                deadline = time.monotonic() + 2 * seconds_to_answer
                while not self._claims.check(["silent"]) and time.monotonic() < deadline:
                    time.sleep(_PERIOD_SECONDS / 4)
            if self._claims.check(["silent"]):
                self._kill_neighbours(json.loads(self._claims.get("silent")))
        except RuntimeError:
            say(f"no progress, and the store of all ranks does not answer: {self._activity}")

    def _kill_neighbours(self, silent: list[int]) -> None:
        """A launcher would wait half a minute for a stopped process, which handles no SIGTERM."""
        for neighbour in self._meeting.neighbours:
            if neighbour.rank in silent:
                with contextlib.suppress(OSError):
                    os.kill(neighbour.process, signal.SIGKILL)

    def _explanation(self, states: dict[int, RankState | None]) -> str:
        lines = [explain_hang(states, self._seconds_without_progress)]
        for rank in [rank for rank, state in states.items() if state is None][:8]:
            doing = self._doing(rank)
            lines.append("  " + place_of(self._grid, rank, doing, self._meeting.host_of(rank)))
        if self._log.path is not None:
            lines.append(f"  stacks of the ranks that answered: {self._log.path.parent}/")
        return "\n".join(lines)

    def _wait_for_the_others(self, seconds: float) -> None:
        """Wait until the other ranks no longer need the store, which ends with this process."""
        store, deadline = self._claims, time.monotonic() + seconds
        while time.monotonic() < deadline:
            others = {*range(self._world), *self._meeting.spare_ranks} - self._dead
            if all(store.check([f"ended {rank}"]) for rank in others):
                return
            time.sleep(0.05)


def _exit_code(claim: _Claim | None) -> int:
    return EXIT_HANG if claim is not None and claim.kind == "hang" else EXIT_FAILED

"""Watches a run from inside each of its ranks, so that no failure is silent.

    failure                                         detected by                     within
    this rank raised an exception                   the rank itself                 at once
    another process of this host has ended          every rank of the host          1 s
    the launcher has ended                          every rank below it             1 s
    rank 0's process, which keeps the store, ended  every rank that asks the store  3 s
    a rank no longer responds                       rank 0 (all ranks watch rank 0) hang timeout
    no rank makes progress                          rank 0, which sees all          hang timeout

The first rank that detects a failure claims it in the store, and only that rank writes to the
console. The other ranks see the claim, write what they know to their log files, and end. They do
not wait for their main threads, which may be blocked by a dead rank, for example in an NCCL kernel.

Two threads run in each rank. The first one polls processes, signals and clocks, and can end this
process. The second one exchanges heartbeats, and may block if the store's host is gone.
"""

import contextlib
import faulthandler
import json
import os
import re
import select
import signal
import threading
import time
import traceback as tracebacks
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Literal, NamedTuple, Self

from megaspeed.topology.activity import SUSPENDED_SECONDS, Activity
from megaspeed.topology.failure import (
    RankLog,
    describe_failure,
    place_of,
    print_error,
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
from megaspeed.topology.meeting import LocalRank, Meeting, agent_keeps_the_store
from megaspeed.topology.process_end import (
    EXIT_FAILED,
    EXIT_HANG,
    STOP_SIGNALS,
    SUPERVISOR,
    StopSignal,
    exit_now,
    has_ended,
)

_PERIOD_SECONDS = 1.0
_SECONDS_BETWEEN_CTRL_C = 1.0  # one Ctrl-C may arrive twice: from the terminal and the launcher
_SECONDS_FOR_OTHER_REPORTS = 4.0
"""A rank that lost a connection waits this long for the rank that knows why."""
_SECONDS_FOR_THE_FIRST_THREAD = 10.0
"""If the store was lost with a connection, the main thread leaves the report to the first thread,
which also waits for other reports before it writes one."""
_SECONDS_FOR_THE_MAIN_THREAD = 12.0
"""The main thread has this time to end after another rank failed. A save may take 10 s of it."""
_SECONDS_TO_ANSWER = 6.0  # for each rank to report what it waits for, after a hang was detected
_SECONDS_TO_WRITE_STACKS = 2.0
# The process that keeps the store waits this long for the other ranks:
_SECONDS_TO_SEE_THE_END = 5.0  # after a failure
_SECONDS_TO_FINISH = 45.0  # after a run that has succeeded
_SECONDS_UNTIL_KILLED = 60.0  # for a process that must end, even if it is blocked

_REPORTED = "_megaspeed_reported"

_LOST_PEER = re.compile(
    "by peer|Broken pipe|Socket closed|NCCL|ncclRemoteError|remote process|Connection refused",
)
"""Matches the errors that gloo and NCCL raise if another rank has ended."""


class _Claim(NamedTuple):
    """The failure that ends the run, as JSON in the store."""

    kind: Literal["failed", "hang"]
    by: int  # the rank that detected it, and reports it to the user


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
        self._launchers = launchers
        # A connection to the store handles one call at a time, and a call may block.
        self._heartbeats = meeting.own_connection()
        self._store = meeting.own_connection()
        self._host_of_rank_0 = meeting.host_of(0)
        self._memory_kills = processes_killed_for_memory()
        self.must_report = False
        """Whether this rank was the first to raise an expected exception, which it reports."""
        self._claim: _Claim | None = None
        self._claimed = threading.Event()
        self._closing = threading.Event()
        self._dead: set[int] = set()  # ranks that ended without a report
        self._seconds_without_progress = 0.0
        self._last_contact = time.monotonic()
        self._store_lost: float | None = None  # since when
        self._launcher_is_gone = False
        self._is_silent = False  # the store neither answers nor is known to have ended
        self._earlier_pipe = -1
        self._signals, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        self._threads = [
            threading.Thread(target=self._run_first_thread, name="watch", daemon=True),
            threading.Thread(target=self._exchange_heartbeats, name="watch: store", daemon=True),
        ]

    def __enter__(self) -> Self:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # for the timer that kills this process
        # Even if the main thread is blocked, this pipe gets the number of each signal.
        self._earlier_pipe = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
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
        self._start_kill_timer()
        signal.set_wakeup_fd(self._earlier_pipe)
        with contextlib.suppress(OSError):
            os.write(self._wakeup, b"\0")
        for thread in self._threads:
            thread.join(_PERIOD_SECONDS)
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._report_end(_SECONDS_TO_FINISH if self._claim is None else _SECONDS_TO_SEE_THE_END)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not self._threads[0].is_alive():
            os.close(self._signals)
            os.close(self._wakeup)

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
                self._wait_for_other_reports(error)
                self.must_report = self._claim_failure(_Claim("failed", self._rank))
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
        ended = self._store.check(["ended 0"])
        if self._store.check(["claim"]):
            self._set_claim(self._store.get("claim"))
        return ended

    @property
    def exit_code(self) -> int:
        """The exit code after a failure; the first failure decides it."""
        return EXIT_HANG if self._claim is not None and self._claim.kind == "hang" else EXIT_FAILED

    # The main thread.

    def _report(self, error: Exception) -> None:
        text = describe_failure(error, self._grid, self._rank)
        silent = self._wait_for_other_reports(error)
        if self._claim_failure(_Claim("failed", self._rank)):
            for rank in silent:
                print_error(f"{self._last_known_place(rank)} does not respond")
            print_error(text.rstrip("\n"))
            write_error_file(os.environ.get("TORCHELASTIC_ERROR_FILE"), text)
        # After all else: the run folder's disk may be what does not respond.
        self._log.open()
        self._log.write(text)

    def _wait_for_other_reports(self, error: Exception) -> list[int]:
        """Wait for another rank to report why a connection was lost. If none does, return the ranks
        that no longer respond.
        """
        if not _LOST_PEER.search(str(error)) or self._world == 1:
            return []
        if self._claimed.wait(_SECONDS_FOR_OTHER_REPORTS):
            return []
        try:
            keys = [f"heartbeat {rank}" for rank in range(self._world)]
            before = self._store.multi_get(keys)
            if self._claimed.wait(3 * self._period):
                return []
            pairs = enumerate(zip(before, self._store.multi_get(keys), strict=True))
            silent = [rank for rank, (old, new) in pairs if old == new and rank != self._rank]
            return [rank for rank in silent if not self._store.check([f"ended {rank}"])]
        except RuntimeError:
            # The store is gone, too. The first thread reports it, and ends the process.
            time.sleep(_SECONDS_FOR_THE_FIRST_THREAD)
            return []

    # The first thread: processes, signals and clocks.

    def _run_first_thread(self) -> None:
        try:
            self._poll()
        except Exception:  # only this thread can end a process whose main thread is blocked
            self._log.write(tracebacks.format_exc())
            exit_now(EXIT_FAILED)

    def _poll(self) -> None:
        local_ranks = {one.process: one for one in self._meeting.local_ranks}
        running = {*local_ranks, *self._launchers}
        poller = select.poll()
        poller.register(self._signals, select.POLLIN)
        first_ctrl_c: float | None = None
        last_poll = time.monotonic()
        while not self._closing.is_set():
            signals = b""
            if poller.poll(_PERIOD_SECONDS * 1000):
                signals = os.read(self._signals, 64)
            if self._closing.is_set():
                return
            for process in [process for process in running if has_ended(process)]:
                running.remove(process)
                if process in local_ranks:
                    self._local_rank_ended(local_ranks[process])
                else:
                    self._launcher_ended()
            first_ctrl_c = self._handle_signals(signals, first_ctrl_c)
            now = time.monotonic()
            if now - last_poll > SUSPENDED_SECONDS:
                # This thread did not run either: the process was stopped, the machine slept, or
                # another thread held Python's lock. What other ranks did meanwhile is unknown.
                self._last_contact = now
            self._end_if_the_run_is_over(now)
            last_poll = time.monotonic()

    def _end_if_the_run_is_over(self, now: float) -> None:
        if self._claimed.is_set():
            self._end_with_the_others()
        elif self._store_lost is not None:
            # The store ends with torchrun's agent or with rank 0's supervisor. If this rank's own
            # agent has ended, or if rank 0 gets SIGTERM because of its supervisor, the run saves.
            may_save = self._launcher_is_gone or SUPERVISOR in os.environ
            saves = may_save and self._stop.can_save
            if not saves or now - self._store_lost > self._hang_timeout * self._activity.timeouts:
                self._end_without_a_store()
        elif now - self._last_contact > self._hang_timeout:
            self._store_lost, self._is_silent = now, True

    def _local_rank_ended(self, ended: LocalRank) -> None:
        if ended.rank == 0 and not agent_keeps_the_store():
            self._store_lost = time.monotonic()
            return
        try:
            if self._store.check([f"ended {ended.rank}"]):
                return
            place = self._last_known_place(ended.rank)
        except RuntimeError:
            self._store_lost = time.monotonic()
            return
        self._dead.add(ended.rank)
        if self._claim_failure(_Claim("failed", self._rank)):
            line = self._killed(place, ended.process)
            print_error(line)
            write_error_file(ended.error_file, line)

    def _killed(self, place: str, process: int | None) -> str:
        number = "" if process is None else f" {process}"
        memory = ""
        if process is not None and processes_killed_for_memory() > self._memory_kills:
            memory = "; the system has killed a process of this host because memory ran out"
        return (
            f"{place} was killed: its process{number} has ended without a report{memory}; "
            f"meanwhile rank {self._rank} is in {self._activity}"
        )

    def _launcher_ended(self) -> None:
        self._launcher_is_gone = True
        self._stop.received = signal.SIGHUP
        if self._stop.can_save:
            self._log.note("the launcher has ended: this run finishes its step, saves and ends")
        else:
            self._end_before_training("the launcher has ended")

    def _handle_signals(self, numbers: bytes, first_ctrl_c: float | None) -> float | None:
        """Act on signals at once. Returns the time of the first Ctrl-C; None if there was none."""
        now = time.monotonic()
        for number in numbers:
            if number == signal.SIGINT:
                if first_ctrl_c is not None and now - first_ctrl_c > _SECONDS_BETWEEN_CTRL_C:
                    exit_now(128 + signal.SIGINT)
                first_ctrl_c = first_ctrl_c or now
            # If the main thread is blocked, its signal handler has not run yet.
            is_stop = number in STOP_SIGNALS
            if is_stop and not self._stop.can_save and not self._claimed.is_set():
                self._end_before_training(signal.Signals(number).name, 128 + number)
        return first_ctrl_c

    def _end_before_training(self, reason: str, code: int = EXIT_FAILED) -> None:
        if self._claim_failure(_Claim("failed", self._rank)):
            print_error(f"{reason} before training began: there is nothing to save")
        exit_now(code)

    def _end_with_the_others(self) -> None:
        assert self._claim is not None
        self._start_kill_timer()
        if self._claim.kind == "hang":
            self._report_hang(self._claim.by)
        else:
            self._closing.wait(_SECONDS_FOR_THE_MAIN_THREAD)
            if self._closing.is_set():
                return  # the main thread has detected the failure, too, and ends this rank itself
            self._write_stacks()
        with contextlib.suppress(RuntimeError):
            self._report_end(_SECONDS_TO_SEE_THE_END)
        exit_now(self.exit_code)

    def _end_without_a_store(self) -> None:
        """The store is gone, so no claim is possible. One rank of each host reports it."""
        self._start_kill_timer()
        if self._closing.wait(_SECONDS_FOR_OTHER_REPORTS):
            return
        launch, host = self._meeting.launch, self._host_of_rank_0
        if launch.local_rank == 0 or launch.rank == 1:
            rank_0 = next((one for one in self._meeting.local_ranks if one.rank == 0), None)
            keeper = "rank 0's supervisor" if SUPERVISOR in os.environ else "the launcher's agent"
            keeper = keeper if agent_keeps_the_store() else "rank 0"
            if self._is_silent:
                line = (
                    f"no progress for {time.monotonic() - self._last_contact:.0f} s: {keeper} did "
                    f"not answer ({host}). It keeps the store of all ranks. It was stopped, or its "
                    f"machine or network has failed; rank {self._rank} is in {self._activity}"
                )
            elif agent_keeps_the_store():
                line = f"{keeper} ({host}), which keeps the store of all ranks, has ended"
            else:
                place = place_of(self._grid, 0, host=host)
                line = self._killed(place, rank_0.process if rank_0 is not None else None)
            print_error(line)
            if rank_0 is not None:
                write_error_file(rank_0.error_file, line)
        if self._is_silent and not agent_keeps_the_store():
            self._kill_local_ranks([0])
        self._write_stacks()
        exit_now(EXIT_HANG if self._is_silent else EXIT_FAILED)

    def _start_kill_timer(self) -> None:
        """Start a timer that ends this process even if its threads are blocked: the kernel sends
        SIGALRM, whose default action needs neither Python nor a disk.
        """
        signal.setitimer(signal.ITIMER_REAL, _SECONDS_UNTIL_KILLED)

    # The second thread.

    def _exchange_heartbeats(self) -> None:
        ranks = range(self._world if self._rank == 0 else 1)
        survey = Survey(ranks, sees_all=self._rank == 0, period=self._period)
        number, activity, store = 0, self._activity, self._heartbeats
        while not self._closing.wait(self._period if number else 0):
            number += 1
            heartbeat = [number, str(activity), activity.progress, activity.timeouts]
            try:
                store.set(f"heartbeat {self._rank}", json.dumps(heartbeat))
                if self._claim is None and store.check(["claim"]):
                    self._set_claim(store.get("claim"))
                seconds = survey.seconds_of_a_hang(store, self._hang_timeout)
            except RuntimeError:  # DistNetworkError: the store's process has ended
                self._store_lost = time.monotonic()
                return
            self._last_contact = time.monotonic()
            # Only rank 0 sees all ranks, so only rank 0 reports that none of them makes progress.
            if seconds is not None:
                self._seconds_without_progress = seconds
                self._claim_failure(_Claim("hang", self._rank))

    # All threads.

    def _claim_failure(self, claim: _Claim) -> bool:
        """Claim what has ended the run. Returns False if another rank did so first."""
        if self._claim is not None:
            return False
        own = json.dumps(claim)
        try:
            first = self._store.compare_set("claim", "", own).decode() == own
            self._set_claim(self._store.get("claim"))
        except RuntimeError:  # the store is gone, so this rank reports its own failure
            return True
        return first

    def _set_claim(self, claim: bytes) -> None:
        self._claim = _Claim(*json.loads(claim))
        self._claimed.set()

    def _last_known_place(self, rank: int) -> str:
        phase = json.loads(self._store.get(f"heartbeat {rank}"))[1]
        doing, host = f"last known phase: {phase}", self._meeting.host_of(rank)
        return place_of(self._grid, rank, doing, host)

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

    def _report_hang(self, by: int) -> None:
        """Write this rank's state to the store. The rank ``by`` reports the states of all ranks."""
        calls = [*pending_collectives(), *self._activity.pending()]
        # A rank sees the claim after one period, and then polls once more.
        seconds = min(_SECONDS_TO_ANSWER, 2 + self._hang_timeout / 4) + 2 * self._period
        try:
            state = RankState(str(self._activity), calls)
            self._store.set(f"state {self._rank}", json.dumps(state))
            self._write_stacks(calls)
            if by == self._rank:
                self._wait_for_keys([f"state {rank}" for rank in range(self._world)], seconds)
                states = states_of_ranks(self._store, self._world)
                silent = [rank for rank, state in states.items() if state is None]
                lines = [explain_hang(states, self._seconds_without_progress)]
                lines += [f"  {self._last_known_place(rank)}" for rank in silent[:8]]
                if self._log.path is not None:
                    lines.append(f"  stacks of the ranks that answered: {self._log.path.parent}/")
                print_error("\n".join(lines))
                self._store.set("silent", json.dumps(silent))
            else:
                self._wait_for_keys(["silent"], 2 * seconds)
            if self._store.check(["silent"]):
                self._kill_local_ranks(json.loads(self._store.get("silent")))
        except RuntimeError:
            print_error(
                f"no progress, and the store of all ranks does not answer: {self._activity}"
            )

    def _wait_for_keys(self, keys: list[str], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(_PERIOD_SECONDS / 4)

    def _kill_local_ranks(self, silent: list[int]) -> None:
        """Kill stopped processes. They ignore SIGTERM, so a launcher would wait half a minute."""
        for one in self._meeting.local_ranks:
            if one.rank in silent:
                with contextlib.suppress(OSError):
                    os.kill(one.process, signal.SIGKILL)

    def _report_end(self, seconds: float) -> None:
        """Inform the others that this rank has ended. If the store ends with this process, wait for
        ``seconds`` until they no longer need it.
        """
        self._store.set(f"ended {self._rank}", "")
        deadline = time.monotonic() + seconds
        while self._meeting.hosts_the_store and time.monotonic() < deadline:
            others = {*range(self._world), *self._meeting.spare_ranks} - self._dead
            if all(self._store.check([f"ended {rank}"]) for rank in others):
                return
            time.sleep(0.05)

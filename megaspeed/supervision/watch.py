"""Watches a run from inside each of its ranks, so that no failure is silent.

    failure                                         detected by                     within
    this rank raised an exception                   the rank itself                 at once
    another process of this host has ended          every rank of the host          1 s
    the launcher has ended                          every rank below it             1 s
    rank 0's process, which keeps the store, ended  every rank that asks the store  3 s
    a rank no longer responds                       rank 0 (all ranks watch rank 0) hang timeout
    no rank makes progress                          rank 0, which sees all          hang timeout
    no thread of any rank can run                   each rank's watchdog process    30 s later

The first rank that detects a failure claims it in the store, and only that rank writes to the
console. The other ranks see the claim, write what they know to their log files, and end. They do
not wait for their main threads, which may be blocked by a dead rank, for example in an NCCL kernel.

Two threads run in each rank. The first one polls processes, signals and clocks, and can end this
process. The second one exchanges heartbeats, and may block if the store's host is gone.
"""

import contextlib
import json
import math
import os
import select
import signal
import threading
import time
import traceback as tracebacks
from collections.abc import Sequence
from typing import Self

from megaspeed.supervision.answers import describe
from megaspeed.supervision.failure import (
    SECONDS_FOR_OTHER_REPORTS,
    Failures,
    RankLog,
    place_of,
    processes_killed_for_memory,
    write_error_file,
)
from megaspeed.supervision.hang import (
    RankState,
    Survey,
    explain_hang,
    pending_collectives,
    wait_for_states,
    write_heartbeat,
)
from megaspeed.supervision.meeting import LocalRank, Meeting
from megaspeed.supervision.process_end import (
    EXIT_FAILED,
    EXIT_HANG,
    STOP_SIGNALS,
    SUPERVISOR,
    StopSignal,
    exit_now,
    has_ended,
)
from megaspeed.supervision.watchdog import Watchdog
from megaspeed.topology.activity import SUSPENDED_SECONDS, Activity
from megaspeed.topology.grid import Grid
from megaspeed.topology.store import agent_keeps_the_store, print_error, wait_for_keys

_PERIOD_SECONDS = 1.0
_SECONDS_BETWEEN_CTRL_C = 1.0  # one Ctrl-C may arrive twice: from the terminal and the launcher
_SECONDS_FOR_RANK_0 = 0.3
"""If a stop signal arrives before training, the other ranks wait this long, so that rank 0 reports
it: the bar on the terminal is rank 0's."""
_SECONDS_FOR_THE_MAIN_THREAD = 12.0
"""The main thread has this time to end after another rank failed. A save may take 10 s of it."""
_SECONDS_TO_ANSWER = 6.0  # for each rank to report what it waits for, after a hang was detected
# The process that keeps the store waits this long for the other ranks:
_SECONDS_TO_SEE_THE_END = 5.0  # after a failure
_SECONDS_TO_FINISH = 45.0  # after a run that has succeeded
_SECONDS_UNTIL_KILLED = 60.0  # for a process that must end, even if it is blocked
_SECONDS_AFTER_A_HANG = 30.0
"""If no thread of this rank can run, other ranks have this time to report it and to end it."""
_SECONDS_TO_WRITE_STACKS = 1.0


class Watch:
    """Two threads that run beside training. The main thread creates and closes them.

    If the run makes no progress for ``hang_timeout_seconds``, it hangs. ``launchers`` are the
    process numbers of the launchers above this process.
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
        self._all_ranks = grid.world_size + len(meeting.spare_ranks)
        self._grid = grid
        self._activity = activity
        self._stop = stop
        self._log = log
        self._hang_timeout = hang_timeout_seconds
        # The store answers a few thousand requests a second, on the same processors as rank 0.
        self._period = min(_PERIOD_SECONDS * (1 + self._all_ranks / 1024), hang_timeout_seconds / 8)
        self._launchers = launchers
        # A connection to the store handles one call at a time, and a call may block.
        self._heartbeats = meeting.own_connection()
        self._store = meeting.own_connection()
        self._memory_kills = processes_killed_for_memory()
        self.failures = Failures(
            self._store, grid, self._rank, log, self._period, own_steps=lambda: activity.steps
        )
        self._host_of_rank_0 = self.failures.host_of(0)
        self._closing = threading.Event()
        self._dead: set[int] = set()  # ranks that ended without a report
        self._seconds_without_progress = 0.0
        self._last_contact = time.monotonic()
        self._store_lost: float | None = None  # since when
        self._launcher_is_gone = False
        self._first_ctrl_c = math.inf
        self._is_silent = False  # the store does not answer, but may not have ended
        self._earlier_pipe = -1
        self._signals, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)  # set_wakeup_fd requires it
        self._threads = [
            threading.Thread(target=self._run_first_thread, name="watch", daemon=True),
            threading.Thread(target=self._exchange_heartbeats, name="watch: store", daemon=True),
        ]

    def __enter__(self) -> Self:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # for the timer that kills this process
        self._log.handle_quit()
        self._watchdog = Watchdog(place_of(self._grid, self._rank)[1:-1])
        # Even if the main thread is blocked, this pipe gets the number of each signal.
        self._earlier_pipe = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Report that this rank has ended, with or without success, and stop both threads."""
        self._closing.set()
        self._start_kill_timer()
        signal.set_wakeup_fd(self._earlier_pipe)
        with contextlib.suppress(OSError):
            os.write(self._wakeup, b"\0")
        for thread in self._threads:
            thread.join(_PERIOD_SECONDS)
        failed = self.failures.known.is_set()
        self._report_end(_SECONDS_TO_SEE_THE_END if failed else _SECONDS_TO_FINISH)
        signal.setitimer(signal.ITIMER_REAL, 0)
        # A thread that still runs may use the pipe.
        if not self._threads[0].is_alive():
            os.close(self._signals)
            os.close(self._wakeup)
            self._watchdog.close()

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed, or the store of all ranks is gone."""
        return self.failures.known.is_set() or self._store_lost is not None

    def rank_0_has_ended(self) -> bool:
        """Whether rank 0 has ended. If a rank has failed, ``has_failed`` is true from now on.

        Raises RuntimeError if the store is gone.
        """
        ended = self._store.check(["ended 0"])
        self.failures.read(self._store)
        return ended

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
        last_poll = time.monotonic()
        while not self._closing.is_set():
            patience = self._hang_timeout * self._activity.timeouts + _SECONDS_AFTER_A_HANG
            self._watchdog.beat(str(self._activity), patience)
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
            now = time.monotonic()
            self._handle_signals(signals, now)
            if now - last_poll > SUSPENDED_SECONDS:
                # This thread did not run either: the process was stopped, the machine slept, or
                # another thread held Python's GIL. What other ranks did meanwhile is unknown.
                self._last_contact = now
            self._end_if_the_run_is_over(now)
            last_poll = time.monotonic()

    def _end_if_the_run_is_over(self, now: float) -> None:
        if self.failures.known.is_set():
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
            place = self.failures.last_known_place(ended.rank)
        except RuntimeError:
            self._store_lost = time.monotonic()
            return
        self._dead.add(ended.rank)
        if self.failures.claim():
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

    def _handle_signals(self, numbers: bytes, now: float) -> None:
        """Act on signals at once, because the main thread may be blocked."""
        for number in numbers:
            if number == signal.SIGINT:
                if now - self._first_ctrl_c > _SECONDS_BETWEEN_CTRL_C:
                    exit_now(128 + signal.SIGINT)
                self._first_ctrl_c = min(self._first_ctrl_c, now)
            is_stop = number in STOP_SIGNALS
            if is_stop and not self._stop.can_save:
                self._end_before_training(signal.Signals(number).name, 128 + number)

    def _end_before_training(self, reason: str, code: int = EXIT_FAILED) -> None:
        if self._rank != 0:
            self._closing.wait(_SECONDS_FOR_RANK_0)
            try:
                self._store.check(["failure"])
            except RuntimeError:  # rank 0 kept the store, and has reported the signal
                exit_now(code)
        if self.failures.claim():
            print_error(f"{reason} before training began: there is nothing to save")
        exit_now(code)

    def _end_with_the_others(self) -> None:
        self._start_kill_timer()
        if self.failures.is_hang:
            self._report_hang()
        else:
            self._closing.wait(_SECONDS_FOR_THE_MAIN_THREAD)
            if self._closing.is_set():
                return  # the main thread has detected the failure, too, and ends this rank itself
            self._log.write_stacks(self._activity)
        self._report_end(_SECONDS_TO_SEE_THE_END)
        exit_now(self.failures.exit_code)

    def _end_without_a_store(self) -> None:
        """The store is gone, so no claim is possible. One rank of each host reports it."""
        self._start_kill_timer()
        reports = self._is_first_of_its_host()  # now, because the first one will have ended soon
        if self._closing.wait(SECONDS_FOR_OTHER_REPORTS):
            return
        if reports:
            rank_0 = next((one for one in self._meeting.local_ranks if one.rank == 0), None)
            line = self._describe_lost_store(None if rank_0 is None else rank_0.process)
            print_error(line)
            if rank_0 is not None:
                write_error_file(rank_0.error_file, line)
        if self._is_silent and not agent_keeps_the_store():
            self._meeting.kill_local_ranks([0])
        self._log.write_stacks(self._activity)
        exit_now(EXIT_HANG if self._is_silent else EXIT_FAILED)

    def _is_first_of_its_host(self) -> bool:
        """Whether no rank before this one runs on this host, apart from rank 0."""
        own = self._meeting.launch.rank
        before = [one.process for one in self._meeting.local_ranks if 0 < one.rank < own]
        return all(has_ended(process, or_stopped=True) for process in before)

    def _describe_lost_store(self, rank_0_process: int | None) -> str:
        host, keeper = self._host_of_rank_0, "rank 0"
        if agent_keeps_the_store():
            keeper = "rank 0's supervisor" if SUPERVISOR in os.environ else "the launcher's agent"
        if self._is_silent:
            return (
                f"no progress for {time.monotonic() - self._last_contact:.0f} s: {keeper} did not "
                f"answer ({host}). It keeps the store of all ranks. It was stopped, or its machine "
                f"or network has failed; rank {self._rank} is in {self._activity}"
            )
        if agent_keeps_the_store():
            return f"{keeper} ({host}), which keeps the store of all ranks, has ended"
        return self._killed(place_of(self._grid, 0, host=host), rank_0_process)

    def _report_end(self, seconds: float) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._meeting.report_end(self._store, seconds, self._dead)

    def _start_kill_timer(self) -> None:
        """Start a timer that ends this process even if its threads are blocked: the kernel sends
        SIGALRM, whose default action needs neither Python nor a disk. The timer replaces the
        watchdog.
        """
        signal.setitimer(signal.ITIMER_REAL, _SECONDS_UNTIL_KILLED)
        self._watchdog.stop()

    # The second thread.

    def _exchange_heartbeats(self) -> None:
        ranks = range(self._all_ranks if self._rank == 0 else 1)
        survey = Survey(ranks, sees_all=self._rank == 0, period=self._period)
        number, store = 0, self._heartbeats
        while not self._closing.wait(self._period if number else 0):
            number += 1
            try:
                write_heartbeat(store, self._rank, number, self._activity)
                self.failures.read(store)
                seconds = survey.seconds_of_a_hang(store, self._hang_timeout)
            except RuntimeError:  # DistNetworkError: the store's process has ended
                self._store_lost = time.monotonic()
                return
            self._last_contact = time.monotonic()
            # Only rank 0 sees all ranks, so only rank 0 reports that none of them makes progress.
            if seconds is not None:
                self._seconds_without_progress = seconds
                self.failures.claim(is_hang=True)

    def _report_hang(self) -> None:
        """Write this rank's state to the store. The rank that has claimed the hang reports all."""
        calls = pending_collectives()
        try:
            calls += self._activity.pending()
        except Exception as error:  # after some CUDA errors, every CUDA call raises
            reason = describe(error).splitlines()[0]
            calls.append(f"unknown messages of the pipeline (asking failed: {reason})")
        # A rank sees the claim after one period, and then polls once more.
        seconds = min(_SECONDS_TO_ANSWER, 2 + self._hang_timeout / 4) + 2 * self._period
        try:
            state = RankState(str(self._activity), calls)
            self._store.set(f"state {self._rank}", json.dumps(state))
            self._log.write_stacks(self._activity, calls)
            if self.failures.by == self._rank:
                states = wait_for_states(self._store, self._all_ranks, seconds)
                # A spare rank that answers never waits for others, and none waits for it.
                for rank in self._meeting.spare_ranks:
                    if states[rank] is not None:
                        del states[rank]
                silent = [rank for rank, state in states.items() if state is None]
                lines = [explain_hang(states, self._seconds_without_progress)]
                lines += [f"  {self.failures.last_known_place(rank)}" for rank in silent[:8]]
                if self._log.path is not None:
                    lines.append(f"  stacks of the ranks that answered: {self._log.path.parent}/")
                print_error("\n".join(lines))
                self._store.set("silent", json.dumps(silent))
            elif not wait_for_keys(self._store, ["silent"], 2 * seconds):
                return
            if silent := json.loads(self._store.get("silent")):
                self._meeting.kill_local_ranks(silent, signal.SIGQUIT)
                time.sleep(_SECONDS_TO_WRITE_STACKS)
                self._meeting.kill_local_ranks(silent)
        except RuntimeError:
            print_error(
                f"no progress, and the store of all ranks does not answer: {self._activity}"
            )

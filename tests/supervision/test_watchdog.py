"""A process whose threads cannot run is ended with its stacks. A suspended process continues."""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from megaspeed.supervision import watch
from megaspeed.supervision.failure import RankLog
from megaspeed.supervision.meeting import check_in
from megaspeed.supervision.process_end import StopSignal
from megaspeed.topology.activity import SAVE_TIMEOUTS, START_UP_TIMEOUTS, Activity
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from tests.support.forked import Forked
from tests.support.machine import limit
from tests.support.rank_pool import RankPool

LIMIT = math.ceil(limit(3))

PROGRAM = f"""
import ctypes, faulthandler, os, signal, threading, time
from pathlib import Path
from megaspeed.supervision.failure import RankLog
from megaspeed.supervision.watchdog import Watchdog

def beat():
    while True:
        is_patient = Path("patient").exists()
        watchdog.beat("step 4", {20 * LIMIT} if is_patient else {LIMIT})
        with open("beats", "a") as beats:
            beats.write("P" if is_patient else "I")
        time.sleep(0.2)

faulthandler.register(signal.SIGQUIT)  # as pytest and some launchers do
with RankLog(Path(), 0) as log:
    log.handle_quit()
    log.open()
    watchdog = Watchdog("gpu17, rank 0")
    threading.Thread(target=beat, daemon=True).start()
    child = os.fork()  # it has the pipe, too
    if not child:
        time.sleep(10**6)
        os._exit(0)
    Path("started").touch()
    while not Path("end").exists():
        if Path("lock").exists():
            Path("locked").touch()
            ctypes.PyDLL(None).sleep(int(Path("lock").read_text()))
        time.sleep(0.1)
    watchdog.stop()
"""


class Program(Forked):
    def __init__(self, folder: Path) -> None:
        (folder / "program.py").write_text(PROGRAM)
        self.folder, self.console = folder, folder / "err"
        arguments: list[str | Path] = [folder / "program.py"]
        super().__init__(arguments, folder, os.environ, folder / "out", self.console)
        (folder / "beats").touch()
        self._wait_until((folder / "started").exists)

    def wait_for_beats(self, kind: Literal["patient", "impatient"]) -> None:
        """Wait until the program has written two more beats of this kind."""
        letter, beats = kind[0].upper(), self.folder / "beats"
        number = beats.read_text().count(letter)
        self._wait_until(lambda: beats.read_text().count(letter) >= number + 2)

    def lock(self, seconds: int) -> None:
        """Let the program hold Python's GIL for this many seconds."""
        (self.folder / "lock.new").write_text(str(seconds))
        (self.folder / "lock.new").rename(self.folder / "lock")
        self._wait_until((self.folder / "locked").exists)

    def _wait_until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            assert self.poll() is None, self.console.read_text()
            time.sleep(0.05)

    @property
    def watchdog(self) -> psutil.Process:
        children = psutil.Process(self.pid).children()
        (found,) = (one for one in children if "watchdog.py" in " ".join(one.cmdline()))
        return found

    @property
    def stacks(self) -> str:
        return (self.folder / "logs" / "rank-00000.log").read_text()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    started = Program(tmp_path)
    yield started
    started.end_session()


@pytest.mark.waits
def test_a_call_that_holds_pythons_gil_is_ended_with_its_stacks(program: Program) -> None:
    since = time.monotonic()
    program.lock(10**6)
    assert program.wait(30) == 3
    assert LIMIT - 1 < time.monotonic() - since < LIMIT + limit(10)
    line = program.console.read_text()
    report = f"[gpu17, rank 0, last known phase: step 4] no thread could run for {LIMIT} s"
    assert line.startswith(report)
    assert "Current thread" in program.stacks and "in beat" in program.stacks, "all threads"


@pytest.mark.waits
def test_a_phase_that_may_take_long_is_not_ended(program: Program) -> None:
    """A save may hold the GIL for longer than a step."""
    (program.folder / "patient").touch()
    program.wait_for_beats("patient")
    program.lock(LIMIT + 3)
    time.sleep(LIMIT + 1)
    (program.folder / "end").touch()
    assert program.wait(30) == 0
    assert program.console.read_text() == ""


@pytest.mark.waits
def test_the_last_of_several_reports_counts(program: Program) -> None:
    """The watchdog may read several lines at once, the first with less patience than the last."""
    program.watchdog.suspend()
    program.wait_for_beats("impatient")
    (program.folder / "patient").touch()
    program.wait_for_beats("patient")
    program.lock(LIMIT + 3)
    program.watchdog.resume()
    time.sleep(LIMIT + 1)
    (program.folder / "end").touch()
    assert program.wait(30) == 0


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.parametrize("everything", [True, False])
def test_a_suspended_process_continues(program: Program, everything: bool) -> None:
    """A run may be suspended with all its processes. A debugger may suspend one rank alone."""
    suspended = [psutil.Process(program.pid), *([program.watchdog] if everything else [])]
    for process in suspended:
        process.suspend()
    time.sleep(LIMIT + 3)
    for process in suspended:
        process.resume()
    time.sleep(limit(2))
    (program.folder / "end").touch()
    assert program.wait(30) == 0
    assert program.console.read_text() == ""


def patience_of_phases(launch: LaunchEnvironment, folder: Path) -> list[float]:
    """Return the seconds that a watch reports in start-up, in a step and in a save."""
    reported: list[float] = []
    activity = Activity()

    class Noting:
        def __init__(self, name: str) -> None: ...

        def beat(self, doing: str, seconds: float) -> None:
            reported.append(seconds)

        def stop(self) -> None: ...

        close = stop

    with pytest.MonkeyPatch.context() as patch, StopSignal() as stop, RankLog(folder, 0) as log:
        patch.setattr(watch, "Watchdog", Noting)
        meeting = check_in(launch, {}, limit(5))
        patience: dict[str, Any] = {"launchers": [], "hang_timeout_seconds": 10.0}
        with watch.Watch(meeting, Grid(pp=1, dp=1, tp=1), activity, stop, log, **patience):
            phases = []
            for timeouts in (START_UP_TIMEOUTS, 1.0, SAVE_TIMEOUTS):
                with activity.during("a phase", timeouts=timeouts):
                    beats = len(reported)
                    while len(reported) < beats + 2:  # the first may be of the phase before
                        time.sleep(0.1)
                    phases.append(reported[-1])
    return phases


def test_a_watch_reports_how_long_the_phase_may_take(pool: RankPool, tmp_path: Path) -> None:
    """The watchdog then waits 30 s more, in which other ranks report the hang."""
    assert pool.run(1, patience_of_phases, tmp_path) == [[40 + 30, 10 + 30, 240 + 30]]


def test_a_watchdog_ends_with_its_process(program: Program) -> None:
    """The watchdog ends even if a child that the process has forked keeps the pipe open."""
    watchdog = program.watchdog
    program.kill()
    watchdog.wait(timeout=limit(2))


def test_a_user_sees_the_stacks_with_sigquit(program: Program) -> None:
    program.send_signal(signal.SIGQUIT)
    assert program.wait(30) == 3
    assert "program.py" in program.stacks and "in beat" in program.stacks


def report_of_a_hang(launch: LaunchEnvironment, folder: Path) -> str:
    """Return the report of a rank on which each call of CUDA raises an error."""
    activity = Activity()

    def is_completed() -> list[str]:
        raise RuntimeError("CUDA error: an illegal memory access\nCUDA kernel errors might be ...")

    activity.pending = is_completed
    with StopSignal() as stop, RankLog(folder, 0) as log, redirect_stderr(StringIO()) as printed:
        log.open()
        meeting = check_in(launch, {}, limit(5))
        patience: dict[str, Any] = {"launchers": [], "hang_timeout_seconds": limit(1)}
        watching = watch.Watch(meeting, Grid(pp=1, dp=1, tp=1), activity, stop, log, **patience)
        watching.failures.claim(is_hang=True)
        watching._report_hang()
        return printed.getvalue()


def test_a_hang_is_reported_although_calls_of_cuda_raise(pool: RankPool, tmp_path: Path) -> None:
    """An earlier version's thread ended with the error, and nothing was reported."""
    (report,) = pool.run(1, report_of_a_hang, tmp_path)
    assert "no progress for " in report
    assert "unknown messages of the pipeline (asking failed: CUDA error: an illegal" in report

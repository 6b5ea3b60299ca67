"""Ends a rank in which no thread can run: a call holds Python's GIL and does not return.

    rank       its watch thread writes what it does and how long that may take  -> a pipe
    watchdog   a process that runs this file and reads the pipe; it needs nothing of the rank

The rank writes a line each second. If none comes for this time, the watchdog sends SIGQUIT. The
handler of the rank does not need the GIL: it writes the stacks of all threads and ends the rank
(``RankLog.handle_quit``).

The time is counted in periods in which the watchdog ran and the rank was not stopped. So a run that
was suspended (SIGSTOP, a container or a machine that sleeps) continues. The clock of
``faulthandler.dump_traceback_later`` also counts the time of a suspension, so it would end it.
"""

import contextlib
import ctypes
import math
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_PERIOD_SECONDS = 1.0
_SECONDS_TO_WRITE_STACKS = 5.0
_STANDARD_INPUT, _STANDARD_ERROR = 0, 2
_PR_SET_PDEATHSIG = 1


class Watchdog:
    """The watchdog of this process. It ends with the thread that creates it.

    Args:
        name: the name of this process, for the message on standard error.
    """

    def __init__(self, name: str) -> None:
        # In a session of its own, it gets no signals of the terminal. With -I and -S, it starts
        # without site-packages and the user's variables, so these cannot break it.
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), name]
        self._process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        # A watchdog that was stopped reads nothing. A full pipe must not block the watch.
        os.set_blocking(self._pipe.fileno(), False)

    def beat(self, doing: str, seconds: float) -> None:
        """Report what this process does, and thereby that one of its threads can run. Without
        another report, the watchdog ends this process after ``seconds``.
        """
        with contextlib.suppress(OSError):  # the watchdog was stopped, or has ended
            self._pipe.write(f"{seconds} {doing}\n".encode())

    def stop(self) -> None:
        """End the watchdog. Any thread may call this."""
        self._process.kill()

    def close(self) -> None:
        """Close the pipe, which no other thread may use any more."""
        with self._process:
            self.stop()


def watch(process: int, name: str) -> None:
    """End the process if standard input gets no line for the time that its last line states."""
    # A scheduler may signal all processes. The rank then saves, and must be watched until it ends.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # not one of the ignored signals
    limit, doing, silent = math.inf, "", 0.0
    while os.getppid() == process and silent < limit:
        if select.select([_STANDARD_INPUT], [], [], _PERIOD_SECONDS)[0]:
            text = os.read(_STANDARD_INPUT, 1 << 16)
            if not text:
                return
            seconds, _, doing = text.decode(errors="replace").splitlines()[-1].partition(" ")
            limit, silent = float(seconds), 0.0
        elif _state(process) not in ("T", "t"):  # stopped by a signal, or by a debugger
            silent += _PERIOD_SECONDS
    if os.getppid() == process:
        with contextlib.suppress(OSError):  # nobody reads the console any more
            line = (
                f"[{name}, last known phase: {doing}] no thread could run for {silent:.0f} s: a "
                "call holds Python's GIL and does not return; the log file has the stacks\n"
            )
            os.write(_STANDARD_ERROR, line.encode())
        os.kill(process, signal.SIGQUIT)
        time.sleep(_SECONDS_TO_WRITE_STACKS)  # when the process ends, this one is killed
        os.kill(process, signal.SIGKILL)


def _state(process: int) -> str:
    """Its state as in ps, such as "S"; "X" if the process has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return "X"


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2])

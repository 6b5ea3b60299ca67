"""How a process of a run ends: stop signals, the exit itself, and output that nobody reads."""

import atexit
import contextlib
import errno
import faulthandler
import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self, TextIO

# Stop signals: after one, a run finishes its step, saves, and ends with exit code 0.
#
#     SIGTERM, SIGUSR1   from a scheduler, a launcher or a user
#     SIGINT             Ctrl-C; the second one ends the process at once
#     SIGHUP             a closed terminal, unless it is ignored already (``nohup``)
#     launcher ended     counts as SIGHUP, because no process waits for this one any more
#
#     rank 0   step 6   step 7 --- max(0, 10) --- save, end
#     rank 1   step 6   step 7 --- max(10, 0) --- save, end
#                           ^ SIGUSR1 (10)
#
# A scheduler may signal one process or all of them, at any time. The handler stores the signal and
# does nothing else. The ranks exchange what they have stored with the gradient norm of each step
# (``Worker.train_step``), so they stop after the same step. A signal that arrives later in a step,
# or during validation, stops the run after the next step.

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


class StopSignal:
    """Stores the stop signals of this process inside a ``with`` block; for the main thread.

    At the end of the block, the earlier handlers are restored.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The latest stop signal of this process."""
        self.can_save = False
        """Whether the run checks `received` and saves. Before training starts, it only ends."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        noted = [one for one in STOP_SIGNALS if one is not signal.SIGHUP or not ignored]
        self._before = {number: signal.signal(number, self._note) for number in noted}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            # None: the handler was not installed from Python, so Python cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)


# Ending a process that has had process groups.
#
# The thread of a gloo group releases the tensors of its last collective at some later time, and
# needs the interpreter lock for this. If the interpreter is shutting down, the thread cannot get
# the lock, and C++ ends the process: "terminate called without an active exception", SIGABRT, exit
# code -6 of a successful run (torch 2.13; seen once in some dozens of runs on a busy machine).
# Destroying a group joins its thread only if nothing refers to the group any more, and DeepSpeed
# keeps references in its modules until the process ends.

_SECONDS_FOR_EXIT_FUNCTIONS = 60.0
_SECONDS_TO_FLUSH = 5.0
_STANDARD_ERROR = 2

EXIT_DONE, EXIT_FAILED, EXIT_WRONG_INPUT, EXIT_HANG = 0, 1, 2, 3


def end_process(code: int) -> NoReturn:
    """End with this exit code like `sys.exit`, but without shutting down the interpreter.

    Functions registered with `atexit` are called, and output is flushed.
    """
    faulthandler.dump_traceback_later(_SECONDS_FOR_EXIT_FUNCTIONS, exit=True, file=_STANDARD_ERROR)
    atexit._run_exitfuncs()
    leave(code)


def leave(code: int) -> NoReturn:
    """End at once, from any thread. Only flushes the output."""
    # A stream blocks if its reader does not read, or if a blocked thread holds its lock.
    faulthandler.dump_traceback_later(_SECONDS_TO_FLUSH, exit=True, file=_STANDARD_ERROR)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader has ended
            stream.flush()
    os._exit(code)


# Standard output and error that still accept writes after their reader has ended.
#
# With ``deepspeed ... | tee log``, Ctrl-C also ends ``tee``, and a terminal may be closed. Then
# every write would raise an exception, and the run would end before it has saved.

_READER_GONE = (errno.EPIPE, errno.EIO)


def keep_output_open() -> None:
    """From now on, output is discarded without an error after its reader has ended."""
    sys.stdout = _Lasting(sys.stdout)
    sys.stderr = _Lasting(sys.stderr)


class _Lasting:
    """A text stream that switches to the null device after its reader has ended."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._turn_away(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._turn_away(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _turn_away(self, error: OSError) -> None:
        if error.errno not in _READER_GONE:
            raise error
        nobody = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nobody, self._stream.fileno())
        os.close(nobody)

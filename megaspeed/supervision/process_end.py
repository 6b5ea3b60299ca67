"""How processes end: stop signals, the exit of this process, and the end of other processes.

After a stop signal a run finishes its step, saves, and ends with exit code 0:

    SIGTERM, SIGUSR1   from a scheduler, a launcher or a user
    SIGINT             Ctrl-C; the second one ends the process at once
    SIGHUP             a closed terminal, unless it is ignored already (``nohup``)
    launcher ended     counts as SIGHUP, because nobody waits for this process any more

A scheduler may signal one process or all of them, at any time. The handler only stores the signal.
The ranks exchange what they have stored with the gradient norm of each step
(``Worker.train_step``), so they stop after the same step:

    rank 0   step 6   step 7 --- max(0, 10) --- save, end
    rank 1   step 6   step 7 --- max(10, 0) --- save, end
                          ^ SIGUSR1 (10)

A signal that arrives later in a step, or during validation, stops the run after the next step.
"""

import atexit
import contextlib
import ctypes
import errno
import faulthandler
import os
import signal
import sys
from collections.abc import Iterator
from itertools import pairwise
from multiprocessing import parent_process
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any, NoReturn, Self, TextIO

import psutil

EXIT_DONE, EXIT_FAILED, EXIT_WRONG_INPUT, EXIT_HANG = 0, 1, 2, 3

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)

SUPERVISOR = "MEGASPEED_SUPERVISOR"
"""The environment variable with the process number of the supervisor of this process."""

_SECONDS_FOR_EXIT_FUNCTIONS = 60.0
_SECONDS_TO_FLUSH = 5.0
_STANDARD_ERROR = 2
_END_BAR = b"\r\x1b[2K\x1b[?25h"  # erases its line, and shows the cursor
_PR_SET_PDEATHSIG = 1
_READER_GONE = (errno.EPIPE, errno.EIO)
LAUNCHER_PROGRAMS = {"deepspeed", "torchrun", "megaspeed"}
_LAUNCHER_MODULES = {
    "deepspeed.launcher.launch",
    "deepspeed.launcher.runner",
    "torch.distributed.run",
    "torch.distributed.launch",
    "megaspeed.cli",
}


class StopSignal:
    """Stores the stop signals of this process inside a ``with`` block; for the main thread.

    At the end of the block, the earlier handlers are restored.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The latest stop signal of this process."""
        self.can_save = False
        """Whether the run saves after a signal. Before training starts, a signal only ends it."""
        self._earlier: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        stored = [one for one in STOP_SIGNALS if one is not signal.SIGHUP or not ignored]
        self._earlier = {number: signal.signal(number, self._store) for number in stored}
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._earlier.items():
            # None: the handler was not installed from Python, so Python cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _store(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)


@contextlib.contextmanager
def ended_on_termination() -> Iterator[None]:
    """Raises KeyboardInterrupt on SIGTERM and SIGHUP too; for the main thread.

    It must enclose the start of every process, and the creation of every temporary folder.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # nohup
                signal.signal(number, stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_parent(parent: int) -> None:
    """Make the kernel send SIGTERM to this process if its parent ends, even if it is killed.

    ``parent`` is the process number of the parent, which may have ended already. The end of the
    thread that started this process counts, too.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the kernel was asked, which then sends nothing
        os.kill(os.getpid(), signal.SIGTERM)


def end_with_starter() -> None:
    """End this process of multiprocessing if the process that started it ends, even if killed.

    Not ``end_with_parent``: the parent may be a fork server, which lives as long as its children.
    """
    starter = parent_process()
    assert starter is not None, "multiprocessing has started this process"

    def end() -> None:
        wait([starter.sentinel])
        os._exit(EXIT_FAILED)

    Thread(target=end, daemon=True).start()


def end_process(code: int) -> NoReturn:
    """End with this exit code like ``sys.exit``, but without shutting down the interpreter.

    Functions registered with ``atexit`` are called, and output is flushed.

    A process that has had process groups must end this way. The thread of a gloo group releases the
    tensors of its last collective at some later time, and needs the interpreter lock for this.
    During a shutdown it cannot get the lock, and C++ ends the process: "terminate called without an
    active exception", exit code -6 of a successful run (torch 2.13; seen once in some dozens of
    runs on a busy machine). Destroying a group joins its thread only if nothing refers to the group
    any more, and DeepSpeed keeps references in its modules until the process ends.
    """
    faulthandler.dump_traceback_later(_SECONDS_FOR_EXIT_FUNCTIONS, exit=True, file=_STANDARD_ERROR)
    atexit._run_exitfuncs()
    exit_now(code)


def exit_now(code: int) -> NoReturn:
    """End at once, from any thread. Only flushes the output."""
    # A stream blocks if its reader does not read, or if a blocked thread holds its lock.
    faulthandler.dump_traceback_later(_SECONDS_TO_FLUSH, exit=True, file=_STANDARD_ERROR)
    if os.isatty(_STANDARD_ERROR):
        with contextlib.suppress(OSError):
            os.write(_STANDARD_ERROR, _END_BAR)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader has ended
            stream.flush()
    os._exit(code)


def keep_output_open() -> None:
    """Make this process discard output, without an error, if its reader has ended.

    With ``deepspeed ... | tee log``, Ctrl-C also ends ``tee``, and a terminal may be closed. Every
    write would then raise an exception, and the run would end before it has saved.
    """
    sys.stdout = _LastingStream(sys.stdout)
    sys.stderr = _LastingStream(sys.stderr)


class _LastingStream:
    """A text stream that switches to the null device after its reader has ended."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._discard(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._discard(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _discard(self, error: OSError) -> None:
        if error.errno not in _READER_GONE:
            raise error
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)


def launcher_processes() -> list[int]:
    """Process numbers of the launchers above this process, from the parent upwards.

        deepspeed (runner)  ->  python -m deepspeed.launcher.launch    ->  this rank
        torchrun, megaspeed train                                      ->  this rank
        any of them, or none  ->  supervisor (job/supervisor.py)  ->  this rank

    DeepSpeed's runner does not forward signals to a launcher on the same host. If the runner is
    stopped, only the runner ends, and this process continues without it.
    """
    found: list[int] = []
    with contextlib.suppress(psutil.Error):  # it has ended, or this user may not read about it
        for process in psutil.Process().parents():
            supervises = os.environ.get(SUPERVISOR) == str(process.pid)
            if not supervises and not _is_launcher(process.cmdline()):
                break
            found.append(process.pid)
    return found


def _is_launcher(command: list[str]) -> bool:
    """Whether a command line is a launcher's, such as ``python -m torch.distributed.run ...``."""
    program = [Path(word).name for word in command[:3] if not word.startswith("-")]
    # The interpreter and its script, or the script alone; never the argument of a shell's -c.
    if any(name in LAUNCHER_PROGRAMS for name in program[:2]):
        return True
    return any(flag == "-m" and module in _LAUNCHER_MODULES for flag, module in pairwise(command))


def has_ended(process: int, *, or_stopped: bool = False) -> bool:
    """Whether the process with this number has ended, even if its parent has not noticed it yet.

    With ``or_stopped``, also whether a signal such as SIGSTOP has stopped it.
    """
    without_progress = {psutil.STATUS_ZOMBIE} | ({psutil.STATUS_STOPPED} if or_stopped else set())
    try:
        return psutil.Process(process).status() in without_progress
    except psutil.NoSuchProcess:
        return True

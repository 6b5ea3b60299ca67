"""Ending a process that has had process groups.

The thread of a gloo group releases the tensors of its last collective at some later time, and needs
the interpreter lock for this. If the interpreter is shutting down, the thread cannot get the lock,
and C++ ends the process: "terminate called without an active exception", SIGABRT, exit code -6 of a
successful run (torch 2.13; seen once in some dozens of runs on a busy machine). Destroying a group
joins its thread only if nothing refers to the group any more, and DeepSpeed keeps references in
its modules until the process ends.
"""

import atexit
import contextlib
import faulthandler
import os
import sys
from typing import NoReturn

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

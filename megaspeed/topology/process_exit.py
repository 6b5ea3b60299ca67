"""Ending a process that has had process groups.

The thread of a gloo group lets go of the tensors of its last collective in its own time, and needs
the interpreter to do so. If the interpreter is being torn down by then, the thread cannot have it,
and C++ ends the process: "terminate called without an active exception", SIGABRT, exit code -6 of a
run that went well (torch 2.13; seen once in some dozens of runs on a busy machine). Destroying a
group joins its thread only when nothing refers to the group any more, and DeepSpeed keeps
references in its modules until the very end.
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
    """End with this exit code as `sys.exit` does, but leave tearing down to the operating system.

    What was registered with `atexit` is called, and what was written is flushed.
    """
    faulthandler.dump_traceback_later(_SECONDS_FOR_EXIT_FUNCTIONS, exit=True, file=_STANDARD_ERROR)
    atexit._run_exitfuncs()
    leave(code)


def leave(code: int) -> NoReturn:
    """End at once, from any thread; only what was written is flushed."""
    # A stream blocks if its reader does not read, or if a blocked thread holds its lock.
    faulthandler.dump_traceback_later(_SECONDS_TO_FLUSH, exit=True, file=_STANDARD_ERROR)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # whoever read it has gone
            stream.flush()
    os._exit(code)

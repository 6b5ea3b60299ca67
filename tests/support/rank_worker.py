"""One rank process of the pool. It runs one job, reports how the job ended, and ends.

A process runs only one job. What a job leaves behind would slow down or change the next: threads of
process groups that still have references, DeepSpeed's module globals, patched functions.

A rank writes its output and its stacks to a log file of its own. If a job fails, the pool shows
this file.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from megaspeed.topology.launch import LaunchEnvironment

# On this signal, a rank writes the Python stacks of its threads, even from inside a collective.
# (SIGTERM and SIGUSR1 stop a training run.)
STACK_SIGNAL = signal.SIGUSR2


@dataclass(frozen=True)
class Job:
    """One rank's part of a job. ``call`` is pickled separately, because loading it needs
    ``search_path``.
    """

    search_path: list[str]  # the sys.path that can import the function
    launch: LaunchEnvironment
    variables: dict[str, str]  # set in os.environ while the job runs
    call: bytes  # pickled (function, args)


@dataclass(frozen=True)
class Outcome:
    """How one rank's part ended: a pickled return value, or a traceback."""

    at_seconds: float  # time.monotonic(), one clock for all processes of a machine
    value: bytes | None = None
    traceback: str | None = None


def serve(connection: Connection, log: Path) -> None:
    """Receive a Job, run it, send an Outcome, and wait to be killed.

    A rank that finishes first must not tear down process groups that other ranks still use.
    """
    threading.Thread(target=_die_with_the_pool, daemon=True).start()
    _write_to(log)
    torch.set_num_threads(1)
    job: Job = pickle.loads(connection.recv_bytes())
    connection.send_bytes(pickle.dumps(_run(job)))
    signal.pause()


def _run(job: Job) -> Outcome:
    sys.path += [folder for folder in job.search_path if folder not in sys.path]
    os.environ.update(job.variables)
    try:
        function: Callable[..., Any]
        function, args = pickle.loads(job.call)
        result = function(job.launch, *args)
        value = pickle.dumps([*result] if isinstance(result, Iterator) else result)
    except BaseException:  # SystemExit and pytest.fail too, or the pool would wait in vain
        return Outcome(time.monotonic(), traceback=traceback.format_exc())
    return Outcome(time.monotonic(), value=value)


def _die_with_the_pool() -> None:
    """Die with the pool. Ranks of a killed test run would wait for each other in a collective."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "serve runs in a child process"
    parent.join()
    os._exit(1)


def _write_to(log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    sys.stdout.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)

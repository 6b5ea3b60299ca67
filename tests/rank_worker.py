"""One rank process of the pool: it runs jobs, says how they ended, and is clean again afterwards.

What a rank writes, its stacks included, goes to one log file of its own, which the pool shows when
a job fails.
"""

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from megaspeed.topology import LaunchEnvironment

# On this signal a rank writes the Python stacks of its threads, even from inside a collective.
STACK_SIGNAL = signal.SIGUSR1

# Modules that keep one process's communication state in their globals.
_STATEFUL_MODULES = ("deepspeed.comm.comm", "deepspeed.utils.groups")


@dataclass(frozen=True)
class Job:
    """One rank's part of a job. `call` is pickled apart, because loading it needs `search_path`."""

    search_path: list[str]  # the sys.path with which the function can be imported
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
    """Run jobs until the connection closes. For each: receive a Job, send an Outcome, wait, clean.

    The wait is for the pool's word that every rank has an outcome. Without it, a rank that is done
    first would tear down its process groups under the others.
    """
    threading.Thread(target=_die_with_the_pool, daemon=True).start()
    _write_to(log)
    torch.set_num_threads(1)
    clean = _CleanState()
    while True:
        try:
            job: Job = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        os.truncate(log, 0)
        connection.send_bytes(pickle.dumps(_run(job)))
        connection.recv_bytes()
        clean.restore()


def _run(job: Job) -> Outcome:
    sys.path += [folder for folder in job.search_path if folder not in sys.path]
    os.environ.update(job.variables)
    try:
        function: Callable[..., Any]
        function, args = pickle.loads(job.call)
        value = pickle.dumps(function(job.launch, *args))
    except BaseException:  # SystemExit and pytest.fail too, or the pool would wait for nothing
        return Outcome(time.monotonic(), traceback=traceback.format_exc())
    return Outcome(time.monotonic(), value=value)


def _die_with_the_pool() -> None:
    """A killed test run must not leave ranks behind that wait for each other in a collective."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "serve runs in a child process"
    parent.join()
    os._exit(1)


def _write_to(log: Path) -> None:
    # Appending, so that a truncated log is written from its beginning again.
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stdout.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)


class _CleanState:
    """What a job may change in its process, as it was before the first one."""

    def __init__(self) -> None:
        gc.freeze()  # a collection walks what jobs leave, and not the whole of torch each time
        self._environ = dict(os.environ)
        self._folder = Path.cwd()
        self._dtype = torch.get_default_dtype()
        self._globals = {
            module: _plain_globals(importlib.import_module(module)) for module in _STATEFUL_MODULES
        }

    def restore(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name, values in self._globals.items():
            module = sys.modules[name]
            for key, value in values.items():
                setattr(module, key, value.copy() if isinstance(value, dict) else value)
        os.environ.clear()
        os.environ.update(self._environ)
        os.chdir(self._folder)
        torch.set_default_dtype(self._dtype)
        torch.manual_seed(0)
        gc.collect()


def _plain_globals(module: ModuleType) -> dict[str, Any]:
    """The module's variables of plain types: neither its functions, classes nor imports."""
    return {
        name: value.copy() if isinstance(value, dict) else value
        for name, value in vars(module).items()
        if not name.startswith("__")
        and (value is None or isinstance(value, bool | int | float | str | dict))
    }

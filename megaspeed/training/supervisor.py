"""Restarts ranks after a failure, if the launcher does not: ``training.restart``.

    launcher  ->  supervisor of rank 0 (keeps the store)  ->  rank 0      attempt 0, 1, 2, ...
              ->  supervisor of rank 1                    ->  rank 1      attempt 0, 1, 2, ...

Each process that the launcher has started becomes a supervisor, and the rank is its child. If a
child fails, its supervisor raises the attempt's number in the store. All supervisors look there
once a second, end their children, and start the next ones. A child gets the same
environment variables for the store and the attempt as from torchrun's agent.

torch's own agent (torch.distributed.elastic) is not used, because it starts all ranks of a host
from one process. If srun gives each task its own GPU and processors, only that task can use them.
Signals, exit codes and memory limits also belong to a task.

Exit codes 0 (done, or stopped by a signal) and 2 (wrong input) end all ranks. Others restart them.
"""

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from megaspeed.config.errors import ConfigError
from megaspeed.config.loading import read_config
from megaspeed.config.overrides import add_config_options
from megaspeed.config.training import TrainingConfig
from megaspeed.topology.launch import LaunchEnvironment, LaunchError, read_launch_environment
from megaspeed.topology.process_exit import EXIT_DONE, EXIT_FAILED, EXIT_WRONG_INPUT
from megaspeed.topology.processes import SUPERVISOR
from megaspeed.topology.stop_signal import STOP_SIGNALS

if TYPE_CHECKING:
    from torch.distributed import Store

_PERIOD_SECONDS = 1.0
_SECONDS_TO_END = 20.0
"""After a failure, the other children have this time to end. They may be saving or reporting."""
_SECONDS_TO_GATHER = 60.0
"""Within this time, all supervisors must start their next child after a failure, or be done."""
_SECONDS_TO_SEE_THE_END = 10.0
_PR_SET_PDEATHSIG = 1


def run_supervised(train: Callable[[], int]) -> int:
    """Calls ``train`` in this process, or becomes the supervisor of a child that does.

    Returns the exit code. The child gets the command line of this process.
    """
    supervisor = None
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        with contextlib.suppress(ConfigError, LaunchError, ValueError):  # the rank reports it
            training = _training_of(sys.argv[1:])
            if training.restart:
                supervisor = _Supervisor(read_launch_environment(os.environ), training)
    if supervisor is not None:
        return supervisor.run()
    _end_with_the_supervisor()
    return train()


class _Supervisor:
    """Starts one rank as a child, and restarts it after a failure of any rank."""

    def __init__(self, launch: LaunchEnvironment, training: TrainingConfig) -> None:
        self._rank, self._world = launch.rank, launch.world_size
        self._launch = launch
        self._restarts = training.restart
        self._patience = training.hang_timeout_seconds
        self._command = [sys.executable, "-u", *sys.argv]
        self._variables: dict[str, str] = {}
        self._child: subprocess.Popen[bytes] | None = None
        self._attempt = 0
        self._gathering: tuple[float, str] | None = None  # until when, and what each rank writes
        self._told: int | None = None

    def run(self) -> int:
        """From the first attempt to the exit code of the run."""
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._pass_on)
        try:
            store = self._open_store()
            store.compare_set("attempt", "", "0")
            code = self._supervise(store)
        except RuntimeError as error:  # of the store; GroupError is one
            self._say(f"lost the store of all ranks, which rank 0's supervisor keeps: {error}")
            code = EXIT_FAILED
        self._end_child()
        return code

    def _open_store(self) -> "Store":
        # Imported here: only a supervisor needs it, and torch takes seconds to import.
        import torch.distributed as dist

        from megaspeed.topology.meeting import open_store

        if self._world == 1:
            alone = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(alone.port)}
            return alone
        return open_store(self._launch, self._patience)

    def _supervise(self, store: "Store") -> int:
        self._start(store)
        while True:
            ended = self._exit_code_of_child()
            if ended is not None:
                self._report(store, ended)
            attempt = int(store.get("attempt"))
            if store.check(["end"]):
                return self._leave(store)
            if attempt > self._attempt:
                self._end_child()
                self._attempt = attempt
                self._start(store)
            self._look_for_the_others(store)

    def _start(self, store: "Store") -> None:
        self._gather(store, f"started in attempt {self._attempt}")
        variables = {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(self._attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(self._restarts),
            SUPERVISOR: str(os.getpid()),
        }
        environment = {**os.environ, **self._variables, **variables}
        self._child = subprocess.Popen(self._command, env=environment)
        if self._told is not None:  # in the meantime
            self._child.send_signal(self._told)

    def _exit_code_of_child(self) -> int | None:
        """The exit code of the child; None if it still runs. Waits for at most one period."""
        assert self._child is not None
        if self._child.returncode is not None:  # ended; the others may still run
            time.sleep(_PERIOD_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._child.wait(_PERIOD_SECONDS)
        return None

    def _report(self, store: "Store", code: int) -> None:
        """Informs the other supervisors how the child of this attempt has ended."""
        if code == EXIT_DONE:
            if not self._missing(store, self._gather(store, f"done in attempt {self._attempt}")):
                store.compare_set("end", "", str(EXIT_DONE))
            return
        given_up = store.check(["megaspeed/given up"])
        wrong = code == EXIT_WRONG_INPUT
        if wrong or given_up or self._told is not None or self._attempt == self._restarts:
            final = str(128 - code if code < 0 else code)
            first = store.compare_set("end", "", final).decode() == final
            if first and self._restarts == self._attempt and not wrong and not given_up:
                self._say(f"{_how(code)}, and no restart is left (training.restart)")
            return
        following = str(self._attempt + 1)
        before = store.get("attempt").decode()
        if before == str(self._attempt):
            store.compare_set("attempt", before, following)
            self._say(f"{_how(code)}: restart {following} of {self._restarts} of all ranks")

    def _gather(self, store: "Store", what: str) -> str:
        """Store that this supervisor has reached a point that all must reach in time."""
        store.set(f"{what}: {self._rank}", "")
        if self._gathering is None or self._gathering[1] != what:
            self._gathering = (time.monotonic() + _SECONDS_TO_GATHER, what)
        return what

    def _missing(self, store: "Store", what: str) -> list[int]:
        return [rank for rank in range(self._world) if not store.check([f"{what}: {rank}"])]

    def _look_for_the_others(self, store: "Store") -> None:
        """Detect a supervisor that was killed. Otherwise the others would wait for its rank."""
        if self._gathering is None or time.monotonic() < self._gathering[0]:
            return
        what, self._gathering = self._gathering[1], None
        # The launcher may take any time to start all ranks. Each rank itself waits for the others.
        missing = [] if what == "started in attempt 0" else self._missing(store, what)
        if missing:
            store.compare_set("end", "", str(EXIT_FAILED))
            self._say(f"ends: no answer from the supervisor of rank {', '.join(map(str, missing))}")

    def _leave(self, store: "Store") -> int:
        code = int(store.get("end"))
        self._end_child()
        store.set(f"gone: {self._rank}", "")
        if self._rank == 0:  # the store ends with this process
            seen = [f"gone: {rank}" for rank in range(self._world)]
            with contextlib.suppress(RuntimeError):
                store.wait(seen, timedelta(seconds=_SECONDS_TO_END + _SECONDS_TO_SEE_THE_END))
        return code

    def _end_child(self) -> None:
        if self._child is None:
            return
        try:
            self._child.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._told = number
        if self._child is not None:
            self._child.send_signal(number)

    def _say(self, line: str) -> None:
        sys.stderr.write(f"rank {self._rank} {line}\n")
        sys.stderr.flush()


def _how(code: int) -> str:
    return (
        f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    )


class _Parser(argparse.ArgumentParser):
    """Raises an exception for a wrong command line. The rank's own parser reports the error."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _training_of(arguments: Sequence[str]) -> TrainingConfig:
    """The ``training`` section. Raises ConfigError or ValueError if it cannot be read."""
    parser = _Parser(add_help=False)
    add_config_options(parser)
    options, _ = parser.parse_known_args(arguments)
    return read_config(options.config, options.overrides).training


def _end_with_the_supervisor() -> None:
    """Let this process end with its supervisor, if it has one."""
    supervisor = os.environ.get(SUPERVISOR)
    if supervisor is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(supervisor):
            os.kill(os.getpid(), signal.SIGTERM)

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

Exit codes 0 (done, or stopped by a signal), 2 (wrong input) and 128 + a stop signal end all ranks.
Others restart them.

    failure                                       detected by                   within
    a supervisor was killed, or its host failed   rank 0's supervisor           hang timeout
    rank 0's supervisor does not work any more    rank 1's supervisor           hang timeout
    rank 0's supervisor has ended                 every supervisor that asks    2 s
    the store does not answer                     each supervisor               hang timeout
"""

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Self

from megaspeed.config.document import add_config_options
from megaspeed.config.errors import ConfigError
from megaspeed.config.loading import read_config
from megaspeed.config.training import TrainingConfig
from megaspeed.topology.activity import (
    SAVE_TIMEOUTS,
    START_UP_TIMEOUTS,
    SUSPENDED_SECONDS,
)
from megaspeed.topology.grid import TopologyError
from megaspeed.topology.launch import LaunchEnvironment, LaunchError, read_launch_environment
from megaspeed.topology.process_end import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_WRONG_INPUT,
    STOP_SIGNALS,
    SUPERVISOR,
)

if TYPE_CHECKING:
    from torch.distributed import Store

_PERIOD_SECONDS = 1.0
_SECONDS_TO_END = 20.0
"""After a failure, the other children have this time to end and to report what they know."""
_SECONDS_TO_SEE_THE_END = 10.0
_NOT_STARTED = "0"
_PR_SET_PDEATHSIG = 1


def run_supervised(train: Callable[[], int]) -> int:
    """Calls ``train`` in this process, or becomes the supervisor of a child that does.

    Returns the exit code. The child gets the command line of this process. The caller must leave by
    ``end_process``: a thread may still wait for the store.
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


class _State(NamedTuple):
    """What all supervisors read in the store."""

    attempt: int
    code: int | None  # the exit code of the run, if it ends
    seconds: float  # children that must end may take this long
    by: int  # the rank whose supervisor has written this state

    @classmethod
    def read(cls, store: "Store") -> Self:
        return cls(*json.loads(store.get("state")))

    def to_json(self) -> str:
        return json.dumps(self)


class _Supervisor:
    """Starts one rank as a child, and restarts it after a failure of any rank.

    One thread asks the store, which may block, and handles the child. The main thread handles
    signals, and ends this process if the store does not answer.
    """

    def __init__(self, launch: LaunchEnvironment, training: TrainingConfig) -> None:
        self._rank, self._world = launch.rank, launch.world_size
        self._launch = launch
        self._restarts = training.restart
        self._hang_timeout = training.hang_timeout_seconds
        self._seconds_to_save = SAVE_TIMEOUTS * self._hang_timeout
        # Slower with more ranks, because one process answers all of them.
        self._period = min(_PERIOD_SECONDS * (1 + self._world / 1024), self._hang_timeout / 8)
        self._command = [sys.executable, "-u", *sys.argv]
        self._variables: dict[str, str] = {}
        self._child: subprocess.Popen[bytes] | None = None
        self._reported = False  # whether the other supervisors know how the child has ended
        self._attempt = 0
        self._told: int | None = None
        self._beats = 0
        self._heard: dict[int, tuple[bytes, float]] = {}  # the beat of a supervisor, and since when
        self._missing: list[int] = []
        self._looked = self._last_contact = 0.0  # for the others, and with the store
        self._leaves = False
        # The kernel signals the child if the thread that has started it ends.
        self._worker = ThreadPoolExecutor(1, "supervisor")

    def run(self) -> int:
        """From the first attempt to the exit code of the run."""
        try:
            store = self._open_store()
        except (TopologyError, RuntimeError) as error:  # GroupError is a RuntimeError
            sys.stderr.write(f"{error}\n")
            return EXIT_FAILED
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._pass_on)
        work = self._worker.submit(self._supervise, store)
        try:
            self._guard(work)
            return work.result()
        except RuntimeError as error:  # of the store
            self._say(f"lost the store of all ranks, which rank 0's supervisor keeps: {error}")
        self._leaves = True
        self._end_child(self._seconds_to_save)
        return EXIT_FAILED

    def _guard(self, work: "Future[int]") -> None:
        """Wait for the other thread. Raises RuntimeError if the store does not answer it."""
        looked = self._last_contact = time.monotonic()
        while not wait([work], _PERIOD_SECONDS).done:
            now = time.monotonic()
            if now - looked > SUSPENDED_SECONDS:
                self._last_contact = now
            looked = now
            if now - self._last_contact > self._hang_timeout:
                raise RuntimeError(
                    f"no answer for {self._hang_timeout:.0f} s. That supervisor was stopped, or "
                    "its machine or network has failed"
                )

    def _open_store(self) -> "Store":
        # Imported here: only a supervisor needs it, and torch takes seconds to import.
        import torch.distributed as dist

        from megaspeed.topology.meeting import open_store
        from megaspeed.topology.process_settings import allow_open_files

        if self._world == 1:
            alone = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(alone.port)}
            return alone
        allow_open_files(self._rank, self._world)
        return open_store(self._launch, START_UP_TIMEOUTS * self._hang_timeout)

    # The thread that asks the store.

    def _supervise(self, store: "Store") -> int:
        store.compare_set("state", "", _State(0, None, 0.0, 0).to_json())
        if self._rank == 0:  # all beats exist before they are read
            for rank in range(self._world):
                store.set(_beat(rank), _NOT_STARTED)
        self._start()
        over = 0.0  # since when the child must end
        while not self._leaves:
            ended = self._exit_code_of_child()
            if ended is not None and not self._reported:
                self._reported = True
                self._report(store, ended)
            state = self._ask(store)
            if state.code is None and state.attempt == self._attempt:
                continue
            over = over or time.monotonic()
            told = self._told is not None
            seconds = max(state.seconds, self._seconds_to_save if told else 0.0)
            if ended is None and time.monotonic() - over < seconds:
                continue
            self._end_child(0)
            if state.code is not None:
                self._leave(store, seconds)
                return state.code
            self._attempt, over = state.attempt, 0.0
            self._start()
        return EXIT_FAILED

    def _start(self) -> None:
        variables = {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(self._attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(self._restarts),
            SUPERVISOR: str(os.getpid()),
        }
        environment = {**os.environ, **self._variables, **variables}
        self._reported = False
        self._child = subprocess.Popen(self._command, env=environment)
        if self._told is not None:  # in the meantime
            self._child.send_signal(self._told)

    def _exit_code_of_child(self) -> int | None:
        """The exit code of the child; None if it still runs. Waits for at most one period."""
        assert self._child is not None
        if self._child.returncode is not None:  # ended; the others may still run
            time.sleep(self._period)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._child.wait(self._period)
        return None

    def _ask(self, store: "Store") -> _State:
        """The state in the store; also writes this supervisor's beat, and reads others'."""
        self._beats += 1
        store.set(_beat(self._rank), str(self._beats))
        state = _State.read(store)
        if state.code is None:
            self._look_for_the_others(store)
        self._last_contact = time.monotonic()
        return state

    def _report(self, store: "Store", code: int) -> None:
        """Informs the other supervisors how the child of this attempt has ended."""
        if code == EXIT_DONE:
            if store.add(f"done in attempt {self._attempt}", 1) == self._world:
                self._move(store, EXIT_DONE)
            return
        final = 128 - code if code < 0 else code
        told = self._told is not None or final - 128 in STOP_SIGNALS
        if final == EXIT_WRONG_INPUT or told or store.check(["megaspeed/given up"]):
            self._move(store, final)
        elif self._attempt == self._restarts:
            if self._move(store, final):
                self._say(f"{_how(code)}, and no restart is left (training.restart)")
        elif self._move(store, None):
            restart = f"restart {self._attempt + 1} of {self._restarts} of all ranks"
            self._say(f"{_how(code)}: {restart}")

    def _move(self, store: "Store", code: int | None, *, saves: bool = False) -> bool:
        """End the run with ``code``, or start the attempt after this one if it is None.

        The other children may end a save if the run ``saves``.

        Returns False if another supervisor has already done so. An end replaces a restart.
        """
        attempt = self._attempt + (code is None)
        seconds = self._seconds_to_save if saves else _SECONDS_TO_END
        own = _State(attempt, code, seconds, self._rank).to_json()
        while True:
            before = _State.read(store)
            if before.code is not None or (code is None and before.attempt >= attempt):
                return False
            if store.compare_set("state", before.to_json(), own).decode() == own:
                return True

    def _look_for_the_others(self, store: "Store") -> None:
        """End all ranks if a supervisor was killed. Otherwise the others would wait for its rank.

        Rank 0's supervisor looks for all others, and rank 1's for rank 0's.
        """
        if self._rank > 1 or self._world == 1:
            return
        watched = range(1, self._world) if self._rank == 0 else range(1)
        beats = store.multi_get([_beat(rank) for rank in watched])
        now = time.monotonic()
        if now - self._looked > self._period + SUSPENDED_SECONDS:
            self._heard.clear()
        self._looked = now
        for rank, beat in zip(watched, beats, strict=True):
            if self._heard.get(rank, (b"", now))[0] != beat:
                self._heard[rank] = (beat, now)
        self._missing = [
            rank
            for rank, (beat, since) in self._heard.items()
            if now - since
            > self._hang_timeout * (START_UP_TIMEOUTS if beat.decode() == _NOT_STARTED else 1)
        ]
        # The rank of a supervisor that was killed saves, and all others with it.
        if self._missing and self._move(store, EXIT_FAILED, saves=True):
            named = ", ".join(map(str, self._missing))
            self._say(f"ends: no answer from the supervisor of rank {named}")

    def _leave(self, store: "Store", seconds: float) -> None:
        """Rank 0's supervisor ends last. Children may take ``seconds``, and need its store."""
        gone = store.add("gone", 1)
        if self._rank == 0:  # the store ends with this process
            deadline = time.monotonic() + seconds + _SECONDS_TO_SEE_THE_END
            while gone + len(self._missing) < self._world and time.monotonic() < deadline:
                time.sleep(self._period / 4)
                gone = store.add("gone", 0)
                self._last_contact = time.monotonic()

    # Both threads.

    def _end_child(self, seconds: float) -> None:
        if self._child is None:
            return
        try:
            self._child.wait(seconds)
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


def _beat(rank: int) -> str:
    return f"beat {rank}"


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

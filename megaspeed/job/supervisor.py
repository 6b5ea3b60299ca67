"""Restarts of the ranks after a failure: by torchrun, or by ``training.restart``.

    attempt 0    --fresh: step 0 ... 63, fails
    restart 1    auto: from the checkpoint of step 60 ... 61, fails for another reason
    restart 2    auto: from the checkpoint of step 60 ...

``resume.Restarts`` makes the decisions of an attempt. This file starts the attempts.

torchrun restarts ranks by itself. For other launchers, ``training.restart`` does it: each process
that the launcher has started becomes a supervisor, and the rank is its child.

    launcher  ->  supervisor of rank 0 (keeps the store)  ->  rank 0      attempt 0, 1, 2, ...
              ->  supervisor of rank 1                    ->  rank 1      attempt 0, 1, 2, ...

If a child fails, its supervisor increments the number of the attempt in the store. All supervisors
read it once a second. If it has changed, they end their children and start new ones. A child gets
the environment variables for the store and the attempt that torchrun's agent would set. torch's own
agent is not used, because it starts all ranks of a host from one process. If srun gives each task
its own GPU, processors and memory, that process can use only those of its own task.

Exit codes 0 (done, or stopped by a signal), 2 (wrong input) and 128 + a stop signal end all ranks.
Others restart them.

    failure                                       detected by                   within
    a supervisor was killed, or its host failed   rank 0's supervisor           hang timeout
    rank 0's supervisor hangs                     rank 1's supervisor           hang timeout
    rank 0's supervisor has ended                 each supervisor               2 s
    the store does not answer                     each supervisor               hang timeout
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import FrameType
from typing import NamedTuple, NoReturn, Self

import torch.distributed as dist

from megaspeed.config.document import add_config_options
from megaspeed.config.errors import ConfigError
from megaspeed.config.loading import read_config
from megaspeed.config.run import RunConfig
from megaspeed.supervision.process_end import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_WRONG_INPUT,
    STOP_SIGNALS,
    SUPERVISOR,
    end_with_parent,
)
from megaspeed.topology.activity import SAVE_TIMEOUTS, START_UP_TIMEOUTS, SUSPENDED_SECONDS
from megaspeed.topology.grid import TopologyError
from megaspeed.topology.launch import LaunchEnvironment, LaunchError, read_launch_environment
from megaspeed.topology.process_settings import allow_open_files
from megaspeed.topology.store import connect, print_error

_PERIOD_SECONDS = 1.0
_SECONDS_TO_END = 20.0
"""After a failure, the other children have this time to end and to report what they know."""
_SECONDS_TO_SEE_THE_END = 10.0
_NOT_STARTED = "0"

FINAL_CODE = "final code"
"""The key of the store with the exit code after which no attempt may follow."""

SMALLER_SIZE = "smaller micro-batch"
"""The key of the store with the size of micro-batches after the first step ran out of memory. The
restart with this size is not one of ``training.restart``."""


def run_supervised(
    train: Callable[[], int], arguments: Sequence[str], *, by_megaspeed: bool = False
) -> int:
    """Call ``train`` in this process, or become the supervisor of a child that calls it.

    ``arguments`` are those of the main job. If ``megaspeed train`` started this process, its agent
    does not restart a run with "auto".

    Returns the exit code. The child gets the command line of this process. The caller must exit
    with ``end_process``, because a thread may still wait for the store.
    """
    supervisor = None
    has_agent = "TORCHELASTIC_RESTART_COUNT" in os.environ
    if by_megaspeed or not has_agent:
        with contextlib.suppress(ConfigError, LaunchError, ValueError):  # the rank reports it
            config = _read_config(arguments)
            restarts = 0 if has_agent else config.training.restart
            if restarts or config.train_micro_batch_size_per_gpu == "auto":
                supervisor = _Supervisor(read_launch_environment(os.environ), config)
    if supervisor is not None:
        return supervisor.run()
    if SUPERVISOR in os.environ:
        end_with_parent(int(os.environ[SUPERVISOR]))
    return train()


class _Parser(argparse.ArgumentParser):
    """Raises an exception for a wrong command line. The rank's own parser reports the error."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _read_config(arguments: Sequence[str]) -> RunConfig:
    """The configuration. Raises ConfigError or ValueError if it cannot be read."""
    parser = _Parser(add_help=False)
    add_config_options(parser)
    options, _ = parser.parse_known_args(arguments)
    return read_config(options.config, options.overrides)


class _State(NamedTuple):
    """The state of the run in the store, which all supervisors read."""

    attempt: int
    code: int | None  # the exit code of the run, if it ends
    seconds: float  # children that must end may take this long
    by: int  # the rank whose supervisor has written this state

    @classmethod
    def read(cls, store: dist.Store) -> Self:
        return cls(*json.loads(store.get("state")))

    def to_json(self) -> str:
        return json.dumps(self)


class _Supervisor:
    """Starts one rank as a child, and restarts it after a failure of any rank.

    One thread reads and writes the store, which may block, and handles the child. The main thread
    handles signals, and ends this process if the store does not answer.
    """

    def __init__(self, launch: LaunchEnvironment, config: RunConfig) -> None:
        self._rank, self._world = launch.rank, launch.world_size
        self._launch = launch
        self._restarts = config.training.restart
        self._hang_timeout = config.training.hang_timeout_seconds
        self._seconds_to_save = SAVE_TIMEOUTS * self._hang_timeout
        # Slower with more ranks, because one process answers all of them.
        self._period = min(_PERIOD_SECONDS * (1 + self._world / 1024), self._hang_timeout / 8)
        self._store_variables: dict[str, str] = {}
        self._child: subprocess.Popen[bytes] | None = None
        self._reported = False  # whether the other supervisors know how the child has ended
        self._attempt = 0
        self._signal: int | None = None  # the last stop signal of this process
        self._beats = 0
        self._last_beats: dict[int, tuple[bytes, float]] = {}  # last beat, and when it changed
        self._missing: list[int] = []
        self._last_check = 0.0  # when this supervisor last checked the others
        self._last_contact = 0.0  # when the store last answered
        self._ends = False
        # One thread, because the kernel signals the child if the thread that started it ends.
        self._executor = ThreadPoolExecutor(1, "supervisor")

    def run(self) -> int:
        """Run all attempts. Returns the exit code of the run."""
        try:
            store = self._open_store()
        except (TopologyError, RuntimeError) as error:  # GroupError is a RuntimeError
            print_error(str(error))
            return EXIT_FAILED
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._forward)
        work = self._executor.submit(self._supervise, store)
        try:
            self._wait_for(work)
            return work.result()
        except RuntimeError as error:  # of the store
            self._print(f"lost the store of all ranks, which rank 0's supervisor keeps: {error}")
        self._ends = True
        self._end_child(self._seconds_to_save)
        return EXIT_FAILED

    def _wait_for(self, work: "Future[int]") -> None:
        """Wait for the other thread. Raises RuntimeError if the store does not answer it."""
        last_look = self._last_contact = time.monotonic()
        while not wait([work], _PERIOD_SECONDS).done:
            now = time.monotonic()
            if now - last_look > SUSPENDED_SECONDS:
                self._last_contact = now
            last_look = now
            if now - self._last_contact > self._hang_timeout:
                raise RuntimeError(
                    f"no answer for {self._hang_timeout:.0f} s. That supervisor was stopped, or "
                    "its machine or network has failed"
                )

    def _open_store(self) -> dist.Store:
        if self._world == 1:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._store_variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
            return store
        allow_open_files(self._rank, self._world)
        return connect(self._launch, START_UP_TIMEOUTS * self._hang_timeout)

    # These methods run in the thread that uses the store.

    def _supervise(self, store: dist.Store) -> int:
        store.compare_set("state", "", _State(0, None, 0.0, 0).to_json())
        if self._rank == 0:  # all beats exist before they are read
            for rank in range(self._world):
                store.set(f"beat {rank}", _NOT_STARTED)
        self._start_child()
        must_end_since = 0.0
        while not self._ends:
            code = self._exit_code_of_child()
            if code is not None and not self._reported:
                self._reported = True
                self._report(store, code)
            state = self._exchange(store)
            if state.code is None and state.attempt == self._attempt:
                continue
            must_end_since = must_end_since or time.monotonic()
            saves = self._signal is not None
            seconds = max(state.seconds, self._seconds_to_save if saves else 0.0)
            if code is None and time.monotonic() - must_end_since < seconds:
                continue
            self._end_child(0)
            if state.code is not None:
                self._wait_for_the_others(store, seconds)
                return state.code
            self._attempt, must_end_since = state.attempt, 0.0
            self._start_child()
        return EXIT_FAILED

    def _start_child(self) -> None:
        variables = {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(self._attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(max(self._restarts, self._attempt)),
            SUPERVISOR: str(os.getpid()),
        }
        self._reported = False
        self._child = subprocess.Popen(
            [sys.executable, "-u", *sys.orig_argv[1:]],
            env={**os.environ, **self._store_variables, **variables},
        )
        if self._signal is not None:  # it arrived between two children
            self._child.send_signal(self._signal)

    def _exit_code_of_child(self) -> int | None:
        """The exit code of the child; None if it still runs. Waits for at most one period."""
        assert self._child is not None
        if self._child.returncode is not None:  # ended; the others may still run
            time.sleep(self._period)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._child.wait(self._period)
        return None

    def _exchange(self, store: dist.Store) -> _State:
        """Write this supervisor's beat, check the beats of others, and read the state."""
        self._beats += 1
        store.set(f"beat {self._rank}", str(self._beats))
        state = _State.read(store)
        if state.code is None:
            self._check_the_others(store)
        self._last_contact = time.monotonic()
        return state

    def _report(self, store: dist.Store, code: int) -> None:
        """Write to the store how the child of this attempt has ended, for the other supervisors."""
        if code == EXIT_DONE:
            if store.add(f"done in attempt {self._attempt}", 1) == self._world:
                self._set_state(store, EXIT_DONE)
            return
        ended = f"ended with exit code {code}"
        if code < 0:
            ended = f"was ended by {signal.Signals(-code).name}"
        final = 128 - code if code < 0 else code
        stopped = self._signal is not None or final - 128 in STOP_SIGNALS
        restarts = self._restarts + store.check([f"megaspeed/{SMALLER_SIZE}"])
        if final == EXIT_WRONG_INPUT or stopped or store.check([f"megaspeed/{FINAL_CODE}"]):
            self._set_state(store, final)
        elif self._attempt == restarts:
            if self._set_state(store, final) and restarts:
                self._print(f"{ended}, but no restart is left (training.restart)")
        elif self._set_state(store, None):
            self._print(f"{ended}: restart {self._attempt + 1} of {restarts} of all ranks")

    def _set_state(self, store: dist.Store, code: int | None, *, saves: bool = False) -> bool:
        """End the run with ``code``; if it is None, start the next attempt.

        If the run ``saves``, the other children have enough time to complete a save.

        Returns False if another supervisor has already done this. If one supervisor ends the run
        and another restarts it, the run ends.
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

    def _check_the_others(self, store: dist.Store) -> None:
        """End all ranks if a supervisor was killed. Otherwise they would wait for its rank.

        Rank 0's supervisor checks all others, and rank 1's checks rank 0's.
        """
        if self._rank > 1 or self._world == 1:
            return
        watched = range(1, self._world) if self._rank == 0 else range(1)
        beats = store.multi_get([f"beat {rank}" for rank in watched])
        now = time.monotonic()
        if now - self._last_check > self._period + SUSPENDED_SECONDS:
            self._last_beats.clear()
        self._last_check = now
        for rank, beat in zip(watched, beats, strict=True):
            if self._last_beats.get(rank, (b"", now))[0] != beat:
                self._last_beats[rank] = (beat, now)
        self._missing = [
            rank
            for rank, (beat, since) in self._last_beats.items()
            if now - since
            > self._hang_timeout * (START_UP_TIMEOUTS if beat.decode() == _NOT_STARTED else 1)
        ]
        # The rank of a killed supervisor gets SIGTERM and saves, and so do all others.
        if self._missing and self._set_state(store, EXIT_FAILED, saves=True):
            named = ", ".join(map(str, self._missing))
            self._print(f"ends: no answer from the supervisor of rank {named}")

    def _wait_for_the_others(self, store: dist.Store, seconds: float) -> None:
        """Rank 0's supervisor waits for the others, because it keeps the store.

        The children of the others may take ``seconds`` to end, and need the store until then.
        """
        ended = store.add("ended", 1)
        if self._rank == 0:
            deadline = time.monotonic() + seconds + _SECONDS_TO_SEE_THE_END
            while ended + len(self._missing) < self._world and time.monotonic() < deadline:
                time.sleep(self._period / 4)
                ended = store.add("ended", 0)
                self._last_contact = time.monotonic()

    # Both threads call these methods.

    def _end_child(self, seconds: float) -> None:
        """Wait for the child, and kill it after ``seconds``."""
        if self._child is None:
            return
        try:
            self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        if self._child is not None:
            self._child.send_signal(number)

    def _print(self, line: str) -> None:
        print_error(f"rank {self._rank} {line}")

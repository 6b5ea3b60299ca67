"""Run a function on every rank of a layout, in processes of this machine.

    run_on_ranks --start--> rank 0   function(launch, ...) --> a file with its result or failure
                            rank 1   ...                       which run_on_ranks reads
                            ...

All ranks are ended if one of them fails, if they take too long, and on Ctrl-C, SIGTERM and SIGHUP.
They end themselves if the process that started them is killed.
"""

import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import torch
import torch.multiprocessing as mp

from megaspeed.files.durable import write_file
from megaspeed.supervision.process_end import end_process, end_with_starter, ended_on_termination
from megaspeed.topology.launch import LaunchEnvironment, free_port

_RANKS_PER_PROCESSOR = 16

DeviceType = Literal["cpu", "cuda"]

_OUTCOME, _YIELDED = "outcome", "yielded"  # names of a rank's files, before its number

_LONGEST_WAIT_SECONDS = 86_400.0  # of one system call, which limits it

# When one rank fails, the others usually fail too. This is the time for them to write why.
_SECONDS_FOR_OTHER_FAILURES = 2.0


class RanksFailed(RuntimeError):
    """The ranks did not finish. The text states why.

    Args:
        reason: the text.
        yielded: the values that each rank has yielded, by rank; empty if any rank has yielded none.
    """

    def __init__(self, reason: str, yielded: Sequence[list[Any]] = ()) -> None:
        super().__init__(reason)
        self.yielded = yielded


@dataclass(frozen=True)
class _Failure:
    """Why one rank failed."""

    reason: str  # one line, with the rank
    out_of_memory: bool
    at_seconds: float  # by the machine's clock, to find the first of several failures


def run_on_ranks(
    function: Callable[..., Any],
    *arguments: Any,
    world_size: int,
    device_type: DeviceType,
    log: Path | None = None,
    timeout_seconds: float | None = None,
) -> list[Any]:
    """Call ``function(launch, *arguments)`` on each rank, and return the results by rank.

    The result of a generator is the list of what it yields.

    Args:
        function: a function of a module. ``launch`` is the ``LaunchEnvironment`` of its rank.
        arguments: anything that can be pickled.
        world_size: the number of ranks.
        device_type: "cpu", or "cuda" with a GPU for each rank.
        log: the file for what the ranks print; if omitted, they print to this process's streams.
        timeout_seconds: the time limit; if omitted, there is none.

    Raises:
        RanksFailed: a rank raised an exception or was killed, or the time limit was exceeded.
    """
    # A fork of a process that has looked for GPUs cannot use them.
    context = mp.get_context("forkserver") if device_type == "cpu" else mp.get_context("spawn")
    ranks: list[BaseProcess] = []
    with ended_on_termination(), tempfile.TemporaryDirectory(prefix="megaspeed-ranks-") as name:
        folder = Path(name)
        try:
            with children_on(device_type):
                # Imports take seconds, so one process does them, and all ranks are forked from it.
                imports = ["megaspeed.supervision.fork_server", "torch._dynamo"]
                context.set_forkserver_preload([*imports, function.__module__])
                # That process may have started in another environment.
                environment = dict(os.environ)
                given = (function, arguments, world_size, free_port(), folder, log, environment)
                for rank in range(world_size):
                    process = context.Process(None, _rank_main, None, (rank, *given), daemon=True)
                    ranks.append(process)
                    process.start()
            finished = _wait(ranks, timeout_seconds)
            codes = [rank.exitcode for rank in ranks]
        finally:
            # A start may have been interrupted. Such a rank ends with this process.
            started = [each for each in ranks if each.pid is not None]
            for each in started:
                each.kill()
            for each in started:
                each.join()
        outcomes = _read(folder, _OUTCOME, world_size)
        yielded = _read(folder, _YIELDED, world_size)
    reason = _failure_to_report(outcomes, codes, None if finished else timeout_seconds)
    if reason is not None:
        raise RanksFailed(reason, yielded if len(yielded) == world_size else ())
    return outcomes


def _failure_to_report(
    outcomes: Sequence[Any], codes: Sequence[int | None], exceeded_seconds: float | None
) -> str | None:
    """Return why the ranks failed; None if they did not.

    If one rank ends, the others fail, too. So only one failure is reported: a rank that was out of
    memory, else a rank that was killed, else the first exception.

    Args:
        outcomes: what the ranks have written: a result or a failure. A killed rank writes nothing.
        codes: the exit code of each rank; None if it had not ended.
        exceeded_seconds: the time limit, if it was exceeded.
    """
    failures = [outcome for outcome in outcomes if isinstance(outcome, _Failure)]
    failures.sort(key=lambda failure: (not failure.out_of_memory, failure.at_seconds))
    killed = -signal.SIGKILL in codes
    if failures and (failures[0].out_of_memory or not killed):
        return failures[0].reason
    if exceeded_seconds is not None:
        limit = f"{exceeded_seconds:g} s; raise --timeout, the limit of a measurement"
        return f"not finished after {limit}"
    if len(outcomes) == len(codes) and not failures:
        return None
    if killed:
        return "a rank was killed by SIGKILL; the system does this if memory runs out"
    code = next((code for code in codes if code), 0)
    if code < 0:
        return f"a rank was killed by signal {-code} ({signal.strsignal(-code)})"
    return f"a rank ended without a result, with exit code {code}"


def _read(folder: Path, name: str, world_size: int) -> list[Any]:
    """Return what the ranks have written, without those that have written nothing."""
    files = [folder / f"{name}{rank}" for rank in range(world_size)]
    return [torch.load(file, weights_only=False) for file in files if file.exists()]


def _wait(ranks: Sequence[BaseProcess], timeout_seconds: float | None) -> bool:
    """Wait until all ranks have ended, or one has failed. Return False at the time limit."""
    deadline = time.monotonic() + (timeout_seconds or float("inf"))
    running = list(ranks)
    while running:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        wait([rank.sentinel for rank in running], min(left, _LONGEST_WAIT_SECONDS))
        running = [rank for rank in running if rank.exitcode is None]
        if running and any(rank.exitcode for rank in ranks):
            deadline_of_others = time.monotonic() + _SECONDS_FOR_OTHER_FAILURES
            for rank in running:
                rank.join(max(0.0, deadline_of_others - time.monotonic()))
            return True
    return True


def _rank_main(
    rank: int,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    world_size: int,
    port: int,
    folder: Path,
    log: Path | None,
    environment: Mapping[str, str],
) -> None:
    end_with_starter()
    # On Ctrl-C, a rank ends without a message. The process that started it reports the end.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if log is not None:
        with log.open("a") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
    os.environ.clear()
    os.environ.update(
        environment,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    launch = LaunchEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        source="--world-size",
    )
    try:
        outcome = function(launch, *arguments)
        if isinstance(outcome, Iterator):
            values, outcome = outcome, []
            for value in values:
                outcome.append(value)
                _write(outcome, folder / f"{_YIELDED}{rank}")  # kept if the rank fails later
    except Exception as error:
        traceback.print_exc()
        outcome = _failure(error, rank)
    _write(outcome, folder / f"{_OUTCOME}{rank}")
    end_process(1 if isinstance(outcome, _Failure) else 0)


def _write(outcome: Any, file: Path) -> None:
    write_file(file, lambda stream: torch.save(outcome, stream))


def _failure(error: Exception, rank: int) -> _Failure:
    # torch's CPU allocator raises a plain RuntimeError.
    out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        "DefaultCPUAllocator" in str(error)
    )
    first_line = (str(error).strip().splitlines() or [""])[0]
    what = "out of memory: " if out_of_memory else ""
    return _Failure(
        reason=f"{what}{type(error).__name__}: {first_line} (rank {rank})",
        out_of_memory=out_of_memory,
        at_seconds=time.time(),
    )


@contextmanager
def children_on(device_type: DeviceType) -> Iterator[None]:
    """Set the device type of processes that start in this block. torch reads it at import.

    If this process itself was started by torchrun, its variables do not apply to these processes.
    """
    before = dict(os.environ)
    for name in before:
        if name.startswith("TORCHELASTIC_"):
            del os.environ[name]
    os.environ["DS_ACCELERATOR"] = device_type
    if device_type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # Ranks share the cores. By default, each rank would start a thread for every core.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def too_many_ranks(
    world_size: int, device_type: DeviceType, option: str = "--world-size"
) -> list[str]:
    """Return the problem if this machine cannot run that many ranks.

    All ranks run on this machine. Each needs its own GPU; ranks can share a processor.
    """
    if device_type == "cuda":
        most, have = torch.cuda.device_count(), f"{torch.cuda.device_count()} GPUs"
    else:
        processors = os.cpu_count() or 1
        most, have = processors * _RANKS_PER_PROCESSOR, f"{processors} processors"
    if world_size <= most:
        return []
    return [
        f"{option} {world_size} is more than the {most} ranks that this machine with {have} "
        "can run; reduce it, or use megaspeed plan, which starts no ranks"
    ]

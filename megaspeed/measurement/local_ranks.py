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
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import torch
import torch.multiprocessing as mp

from megaspeed.files.durable import write_file
from megaspeed.supervision.process_end import end_process, end_with_starter, ended_on_termination
from megaspeed.topology.launch import LaunchEnvironment, free_port
from megaspeed.topology.process_settings import ranks_of_a_gpu

_RANKS_PER_PROCESSOR = 16

DeviceType = Literal["cpu", "cuda"]

_VALUE, _FAILURE = "value", "failure"  # names of a rank's files, before its number
_OUT_OF_MEMORY = "out of memory: "

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
        device_type: "cpu", or "cuda". ``too_many_ranks`` states how many ranks a GPU may have.
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
        values = [
            torch.load(file, weights_only=False)
            for rank in range(world_size)
            if (file := folder / f"{_VALUE}{rank}").exists()
        ]
        failures = sorted(folder.glob(f"{_FAILURE}*"), key=lambda file: file.stat().st_mtime_ns)
        reasons = [file.read_text(encoding="utf-8") for file in failures]
    yielded = values if len(values) == world_size else []
    if reasons or any(codes) or not finished or not yielded:
        reason = _failure_to_report(reasons, codes, None if finished else timeout_seconds)
        raise RanksFailed(reason, yielded)
    return values


def _failure_to_report(
    reasons: Sequence[str], codes: Sequence[int | None], exceeded_seconds: float | None
) -> str:
    """Return why the ranks failed.

    If one rank ends, the others fail, too. So only one failure is reported: a rank that was out of
    memory, else a rank that was killed, else the first exception.

    Args:
        reasons: one for each rank that raised an exception, the first one first.
        codes: the exit code of each rank; None if it had not ended.
        exceeded_seconds: the time limit, if it was exceeded.
    """
    for reason in reasons:
        if reason.startswith(_OUT_OF_MEMORY):
            return reason
    if -signal.SIGKILL in codes and exceeded_seconds is None:
        return "a rank was killed by SIGKILL; the system does this if memory runs out"
    if reasons:
        return reasons[0]
    if exceeded_seconds is not None:
        limit = f"{exceeded_seconds:g} s; raise --timeout, the limit of a measurement"
        return f"not finished after {limit}"
    code = next((code for code in codes if code), 0)
    if code < 0:
        return f"a rank was killed by signal {-code} ({signal.strsignal(-code)})"
    return f"a rank ended without a result, with exit code {code}"


def _wait(ranks: Sequence[BaseProcess], timeout_seconds: float | None) -> bool:
    """Wait until all ranks have ended, or one has failed. Return False at the time limit."""
    deadline = time.monotonic() + (timeout_seconds or float("inf"))
    running = list(ranks)
    while running:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        wait([rank.sentinel for rank in running], min(left, 86_400.0))  # a system call's limit
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
    launch = LaunchEnvironment(rank, world_size, rank, world_size, source="--world-size")
    value, code = folder / f"{_VALUE}{rank}", 0
    try:
        result = function(launch, *arguments)
        if isinstance(result, Iterator):
            yielded = []
            for each in result:
                yielded.append(each)
                _write(yielded, value)  # kept if the rank fails later
        else:
            _write(result, value)
    except Exception as error:
        traceback.print_exc()
        (folder / f"{_FAILURE}{rank}").write_text(_reason(error, rank), encoding="utf-8")
        code = 1
    end_process(code)


def _write(value: Any, file: Path) -> None:
    write_file(file, lambda stream: torch.save(value, stream))


def _reason(error: Exception, rank: int) -> str:
    """One line."""
    # torch's CPU allocator raises a plain RuntimeError.
    out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        "DefaultCPUAllocator" in str(error)
    )
    first_line = (str(error).strip().splitlines() or [""])[0]
    what = _OUT_OF_MEMORY if out_of_memory else ""
    return f"{what}{type(error).__name__}: {first_line} (rank {rank})"


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

    All ranks run on this machine. Each needs its own GPU, unless NCCL lets several share one. They
    can share a processor.
    """
    if device_type == "cuda":
        gpus = torch.cuda.device_count()
        most, have = gpus * ranks_of_a_gpu(os.environ), f"{gpus} GPUs"
    else:
        processors = os.cpu_count() or 1
        most, have = processors * _RANKS_PER_PROCESSOR, f"{processors} processors"
    if world_size <= most:
        return []
    return [
        f"{option} {world_size} is more than the {most} ranks that this machine with {have} "
        "can run; reduce it, or use megaspeed plan, which starts no ranks"
    ]

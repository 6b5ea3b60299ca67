"""One row as processes: started by DeepSpeed's launcher, watched, and ended to the last one.

    compare --> deepspeed's runner --> deepspeed's launch --> rank 0, rank 1, ...
                \\_____________ one process group of the operating system __________/

Whatever happens - the row ends, takes too long, Ctrl-C - the whole group is ended.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from megaspeed.analysis.compare.rank_record import (
    RankFailure,
    RankRecord,
    Task,
    read_outcomes,
    write_task,
)
from megaspeed.topology.launch import free_port

_SECONDS_TO_END_IN_PEACE = 5.0
_KILLED = re.compile(r"exits with return code = -(\d+)")
# What an outer launcher told this process is not true of the ranks that are started here.
_OTHER_LAUNCHERS = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|LOCAL_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|TORCHELASTIC_\w+|OMPI_COMM_WORLD_\w+|SLURM_NTASKS|SLURM_PROCID|SLURM_LOCALID|SLURM_STEP_ID"
)


class RowFailed(RuntimeError):
    """The row's training did not come to its end; the text says why."""


def run_task(task: Task, folder: Path, log: Path, *, timeout_seconds: float) -> list[RankRecord]:
    """Carries out ``task`` on as many processes of this machine as its run has ranks.

    Args:
        task: what to do.
        folder: an empty folder for what this process and the ranks tell each other.
        log: where all that they print goes.
        timeout_seconds: how long it may take.

    Returns:
        What each rank found, by rank.

    Raises:
        RowFailed: a rank failed, died, or all together took too long.
    """
    write_task(folder, task)
    with log.open("w") as output, ended_on_termination():
        process = subprocess.Popen(
            _command(task, folder),
            env=_environment(task.device_type),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            in_time = _wait(process, timeout_seconds)
        finally:
            _end_all(process)
    outcomes = read_outcomes(folder, task.run.grid.world_size)
    records = [outcome for outcome in outcomes if isinstance(outcome, RankRecord)]
    if len(records) == task.run.grid.world_size:
        return records
    failures = [outcome for outcome in outcomes if isinstance(outcome, RankFailure)]
    raise RowFailed(_reason(failures, log, None if in_time else timeout_seconds))


def _command(task: Task, folder: Path) -> list[str]:
    # The same program as `deepspeed`, of this very environment, whatever PATH says.
    return [
        *(sys.executable, "-m", "deepspeed.launcher.runner"),
        *("--hostfile", str(folder / "this machine alone")),  # there is none: no other machine
        *_devices(task.device_type, task.run.grid.world_size),
        *("--master_port", str(free_port())),
        *("--no_local_rank", "--module", "megaspeed.analysis.compare.rank_program"),
        *("--folder", str(folder)),
    ]


def _devices(device_type: str, world_size: int) -> list[str]:
    """The launcher takes GPUs 0 to N - 1, even where CUDA_VISIBLE_DEVICES names others."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if device_type == "cuda" and all(index.strip().isdigit() for index in visible):
        return ["--include", f"localhost:{','.join(visible[:world_size])}"]
    return ["--num_accelerators", str(world_size)]


def _environment(device_type: str) -> Mapping[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not _OTHER_LAUNCHERS.fullmatch(k)}
    if device_type == "cpu":
        # Ranks share the cores: with torch's default each would start a thread for every core.
        inherited.setdefault("OMP_NUM_THREADS", "1")
        inherited["CUDA_VISIBLE_DEVICES"] = ""
    return inherited


def _wait(process: subprocess.Popen[bytes], timeout_seconds: float) -> bool:
    """Whether it ended within that time."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout_seconds)
        return True
    return False


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """Ends the launcher, if it still runs, and whatever it has left behind."""
    try:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            _wait(process, _SECONDS_TO_END_IN_PEACE)
    finally:  # a second Ctrl-C cuts the wait short, and spares nobody
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def ended_on_termination() -> Iterator[None]:
    """SIGTERM and a closed terminal end this process as Ctrl-C does: with what it has started."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reason(failures: list[RankFailure], log: Path, timeout_seconds: float | None) -> str:
    """What went wrong first; others often fail only because one of them is gone."""
    if failures:
        first = min(failures, key=lambda failure: (not failure.out_of_memory, failure.at_seconds))
        what = "out of memory: " if first.out_of_memory else ""
        return f"{what}{first.reason} (rank {first.rank})"
    if timeout_seconds is not None:
        return f"not done after {timeout_seconds:g} s; --timeout sets how long a row may take"
    killed = _KILLED.search(log.read_text(errors="replace"))
    if killed is None:
        return "the launcher ended before the ranks did"
    number = int(killed[1])
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    cause = ", as the system does when memory runs out" if number == signal.SIGKILL else ""
    return f"a rank was killed by {name}{cause}"

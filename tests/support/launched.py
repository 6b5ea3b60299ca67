"""Training runs that are started as a user starts them, and watched until they end."""

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.machine import limit

_POLL_SECONDS = 0.05
_TIMEOUT_SECONDS = limit(240)
_TRIPWIRES = ("cc", "c++", "gcc", "g++", "clang", "clang++", "nvcc", "hipcc", "ninja", "make")
_RANDOM = random.SystemRandom()  # a test's seed does not change it
_LAUNCHERS_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launched:
    """A launch that has ended.

    Attributes:
        code: exit code of the launcher.
        out, err: the output of all its processes.
        processor_seconds_to_first_step: processor time of all its processes together, until the
            first line of metrics.jsonl appears. None if there is no such line.
        compilers_called: names of compilers that any of its processes started.
        compiled: files in the folder where torch keeps compiled code while a run lasts.
    """

    code: int
    out: str
    err: str
    processor_seconds_to_first_step: float | None
    compilers_called: list[str]
    compiled: list[str]


def launch(
    command: Sequence[str | Path],
    folder: Path,
    run_dir: Path,
) -> Launched:
    """Run ``command`` to its end. None of its processes can reach a compiler.

    Args:
        command: its first word is an absolute path, because PATH contains only stand-ins for
            compilers, which record each call.
        folder: an empty folder for temporary files. It is also the working directory.
        run_dir: the folder where the run will write metrics.jsonl.
    """
    tripwires, extensions = folder / "bin", folder / "extensions"
    tripped = _lay_tripwires(tripwires)
    extensions.mkdir()
    environment = _environment(
        PATH=str(tripwires),
        TORCH_EXTENSIONS_DIR=str(extensions),
        MEGASPEED_CACHE=str(folder / "cache"),
        CUDA_VISIBLE_DEVICES="",
        DS_ACCELERATOR="cpu",
        OMP_NUM_THREADS="1",
    )
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        start = time.monotonic()
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=folder,
            env=environment,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            first_step = _watch(process, run_dir / "metrics.jsonl", start)
        finally:
            _end_all(process)
    return Launched(
        process.returncode,
        (folder / "out").read_text(),
        (folder / "err").read_text(),
        first_step,
        tripped.read_text().split() if tripped.exists() else [],
        [file.name for file in extensions.rglob("*")],
    )


def free_port() -> int:
    """Return a port that nobody listens on, so launches on one machine use different ports.

    The port is below the range that systems give to outgoing connections. Otherwise a connection
    could take it in the seconds before a rank listens there.
    """
    while True:
        port = _RANDOM.randrange(10_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


def _lay_tripwires(folder: Path) -> Path:
    folder.mkdir()
    tripped = folder.with_name("tripped")
    shell = shutil.which("sh")
    for name in _TRIPWIRES:
        program = folder / name
        program.write_text(f"#!{shell}\necho {name} >> {tripped}\nexit 1\n")
        program.chmod(0o755)
    return tripped


def _environment(**variables: str) -> Mapping[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k not in _LAUNCHERS_VARIABLES}
    return {**inherited, **variables}


def _watch(process: subprocess.Popen[bytes], metrics: Path, start: float) -> float | None:
    first_step = None
    before = _size(metrics)
    while process.poll() is None:
        now = time.monotonic()
        if first_step is None and _size(metrics) > before:
            first_step = _processor_seconds(process.pid)
        if now - start > _TIMEOUT_SECONDS:
            raise TimeoutError(f"{process.args!r} did not end within {_TIMEOUT_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS)
    return first_step


def _processor_seconds(launcher: int) -> float:
    """Processor time of the launcher, of its descendants, and of those that have ended."""
    total = 0.0
    for one in (psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            # User and system time of the process itself and of the children that it has waited for.
            total += sum(one.cpu_times()[:4])
    return total


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """Kill all processes that a launcher may have left running."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

"""Runs of ``scripts/pretrain.py`` under any launcher, whose processes can all be found.

job = Job(tmp_path, "torchrun", "parallel.pipeline=2", fault="kill rank=1 step=4")
job.wait_until_training()
ended = job.ended()
assert ended.code != 0 and "was killed" in ended.err
"""

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from tests.support.forked import Forked
from tests.support.launched import free_port
from tests.support.machine import limit
from tests.support.tiny import GPT2

SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain.py"
TEXT = Path(__file__).parents[2] / "LICENSE"
HOST = socket.gethostname()
HANG_SECONDS = limit(8)
"""The hang timeout of a job, if no change states another one."""

CONFIG = {
    "model": GPT2,
    "data": {"train": [str(TEXT)], "validation_fraction": 0, "sequence_length": 16},
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 3,
}
"""The run of a job, without its section ``training``."""

Launcher = Literal["forked", "agent", "deepspeed", "torchrun", "megaspeed"]


@dataclass
class Ended:
    """A launch that has ended.

    Attributes:
        code: exit code of the launcher.
        out, err: the output to the console.
        seconds: from the fault to the end of the last process.
        run_dir: the run folder.
    """

    code: int
    out: str
    err: str
    seconds: float
    run_dir: Path

    def log(self, rank: int) -> str:
        """Return the log of a rank."""
        return (self.run_dir / "logs" / f"rank-{rank:05d}.log").read_text()

    @property
    def saved(self) -> bool:
        """Return whether the run has saved a checkpoint."""
        return any((self.run_dir / "checkpoints").glob("step-*"))


class Job:
    """A run under a launcher. All processes that it starts can be found, and end with it.

    If the launcher does not matter, the ranks are forked (``tests/support/forked.py``). With
    "agent" the store is kept as torchrun's agent keeps it. Other launchers are forked, too, but
    start their ranks as new programs.
    """

    def __init__(
        self,
        folder: Path,
        launcher: Launcher,
        *changes: str,
        fault: str = "",
        ranks: int = 2,
        arguments: Sequence[str] = (),
        launcher_options: Sequence[str] = (),
        **variables: str,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.run_dir = folder / "run"
        training = {"steps": 100_000, "run_dir": str(self.run_dir), "log_interval": 1000}
        training["hang_timeout_seconds"] = HANG_SECONDS
        (folder / "tiny.json").write_text(json.dumps({**CONFIG, "training": training}))
        self.mark = f"mark-{free_port()}-{os.getpid()}"
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "MEGASPEED_CACHE": str(folder / "cache"),
            "MEGASPEED_FAULT": fault,
            "MEGASPEED_TEST_MARK": self.mark,
            **variables,
        }
        self._out, self._err = folder / "out", folder / "err"
        command = [str(folder / "tiny.json")]  # the same as with --config
        command += [*arguments, "--set", *changes] if changes else arguments
        start = [*_launcher(launcher, ranks), *launcher_options]
        start += [] if launcher == "megaspeed" else [str(SCRIPT)]
        self.launcher = Forked(
            [*start, *command],
            folder,
            environment,
            self._out,
            self._err,
            ranks if launcher in ("forked", "agent") else 1,
            keeps_store=launcher == "agent",
        )
        self._since = time.monotonic()

    def processes(self) -> list[psutil.Process]:
        """Return the living processes of this job, even if their launcher is dead."""
        found = []
        for process in psutil.process_iter():
            try:
                # A forked process shows the variables of the process that it was forked from.
                ours = os.getsid(process.pid) == self.launcher.pid
                ours = ours or process.environ().get("MEGASPEED_TEST_MARK") == self.mark
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, ProcessLookupError):
                continue
        return found

    def console(self) -> str:
        """Return the output so far."""
        return "".join(file.read_text() for file in (self._out, self._err) if file.exists())

    def wait_until_training(self) -> None:
        """Wait until three steps are recorded."""
        metrics = self.run_dir / "metrics.jsonl"
        deadline = time.monotonic() + limit(240)
        runs = True
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 3):
            assert runs and time.monotonic() < deadline, self.console()
            time.sleep(0.1)
            runs = self.launcher.poll() is None
        self._since = time.monotonic()

    def wait_until_said(self, words: str, seconds: float = 60) -> None:
        """Wait until these words are in the output."""
        deadline = time.monotonic() + limit(seconds)
        while words not in self.console():
            assert time.monotonic() < deadline, self.console()
            time.sleep(0.1)
        self._since = time.monotonic()

    def ended(self, within: float = 120) -> Ended:
        """Wait until all processes have ended. Processes that are left after ``within`` seconds are
        killed.
        """
        try:
            code = self.launcher.wait(timeout=within)
            while self.processes():
                assert time.monotonic() - self._since < limit(within), "processes are left"
                time.sleep(0.2)
            seconds = time.monotonic() - self._since
        finally:
            for process in self.processes():
                process.kill()
            self.launcher.wait()
        out, err = self._out.read_text(), self._err.read_text()
        return Ended(code, out, err, seconds, self.run_dir)


def rank_alone(folder: Path, *changes: str, fault: str = "", **variables: str) -> Job:
    """Start one rank of two without the other one."""
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | variables
    patience = f"training.hang_timeout_seconds={limit(5)}"
    return Job(folder, "forked", patience, *changes, fault=fault, ranks=1, **place)


def _launcher(name: str, ranks: int) -> list[str]:
    """Return the command line between Python and the script."""
    port = str(free_port())
    if name in ("forked", "agent"):
        return []
    if name == "deepspeed":
        program = str(Path(sys.executable).with_name("deepspeed"))
        return [program, "--num_accelerators", str(ranks), "--master_port", port]
    if name == "torchrun":
        options = ["--nproc-per-node", str(ranks), "--master-port", port]
        return ["-m", "torch.distributed.run", *options]
    return ["-m", "megaspeed.cli", "train", "--world-size", str(ranks)]

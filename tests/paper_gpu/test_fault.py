"""A rank that fails reports it and ends, although its process groups cannot be ended."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from megaspeed.supervision.failure import describe_failure
from megaspeed.topology.activity import Activity, note_phase
from megaspeed.topology.grid import Grid
from tests.support.launched import free_port
from tests.support.machine import limit
from tests.support.tiny import GPT2

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
SECONDS_TO_END = limit(30)
"""From the first line of the report to the end of the process."""


@dataclass
class Rank:
    """A process and what it writes to standard error, each line with its time."""

    process: subprocess.Popen[str]
    lines: list[tuple[float, str]]
    ended: float = float("inf")

    def watch(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append((time.monotonic(), line))
        self.process.wait()
        self.ended = time.monotonic()

    @property
    def text(self) -> str:
        return "".join(line for _, line in self.lines)

    def time_of(self, beginning: str) -> float:
        return next(at for at, line in self.lines if line.startswith(beginning))


def run_two_stages(folder: Path) -> list[Rank]:
    """Train with a pipeline stage on each of two ranks. Rank 1 fails in step 2."""
    config = folder / "tiny.json"
    values = {
        "model": GPT2,
        "data": {"train": [str(ROOT / "LICENSE")], "validation_fraction": 0, "sequence_length": 16},
        "training": {"steps": 50, "run_dir": str(folder / "run")},
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 3,
        "parallel": {"pipeline": 2},
    }
    config.write_text(json.dumps(values))
    together = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    together |= {"MASTER_PORT": str(free_port()), "MEGASPEED_CACHE": str(folder / "cache")}
    together |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.paper_gpu.failing_rank", "1", "--config", str(config)]
    ranks = []
    for number in ("0", "1"):
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **together, "RANK": number, "LOCAL_RANK": number},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        ranks.append(Rank(process, []))
    watchers = [threading.Thread(target=rank.watch, daemon=True) for rank in ranks]
    for watcher in watchers:
        watcher.start()
    try:
        for watcher in watchers:
            watcher.join(timeout=limit(240))
    finally:
        for rank in ranks:
            rank.process.kill()
    return ranks


@pytest.mark.timeout(300)
def test_a_rank_that_raises_ends_in_seconds_although_its_groups_cannot_be_ended(
    tmp_path: Path,
) -> None:
    """In an earlier version, it waited silently in destroy_process_group until NCCL's timeout."""
    peer, failing = run_two_stages(tmp_path)
    assert failing.process.returncode == 1, failing.text
    host = socket.gethostname()
    header = f"[{host}, rank 1 (pp 1, dp 0, tp 0), step 2, Backward(micro_batch=1)] "
    assert f"{header}RuntimeError: broken on purpose\nTraceback " in failing.text
    assert failing.text.count("Traceback") == 1
    assert failing.ended - failing.time_of(header) < SECONDS_TO_END
    # The other rank ends as fast. It leaves the console to the rank that knows the reason.
    assert peer.process.returncode == 1, peer.text
    assert peer.ended - failing.time_of(header) < SECONDS_TO_END
    assert "Traceback" not in peer.text


def test_a_report_has_the_phases_from_the_outermost() -> None:
    activity = Activity()
    with pytest.raises(ValueError, match="too long") as raised, activity.during("step 12"):
        try:
            activity.begin("Backward(3)")
            raise ValueError("too long\nby far")
        except ValueError as error:
            note_phase(error, "Backward(3)")
            raise
    report = describe_failure(raised.value, Grid(pp=2, dp=2, tp=2), 5)
    header, *rest = report.splitlines()
    where = f"[{socket.gethostname()}, rank 5 (pp 1, dp 0, tp 1), step 12, Backward(3)]"
    assert header == f"{where} ValueError: too long"
    assert rest[0].startswith("Traceback") and rest.count(rest[0]) == 1
    assert "by far" in rest

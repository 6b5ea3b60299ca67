"""A row that fails reports this, and the next one runs."""

import multiprocessing
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megaspeed.config.resolve import Run
from megaspeed.measurement.compare import rows as rows_module
from megaspeed.measurement.compare.result import Row
from megaspeed.measurement.compare.rows import train_rank, train_rows, zero_rows
from megaspeed.measurement.watched_step import RankMeasurement
from tests.support.rank_pool import RankPool
from tests.support.tiny import tiny_corpus, tiny_run

# The pool starts the process that all ranks are forked from.
pytestmark = pytest.mark.usefixtures("pool")

TEXT = Path(__file__).parents[3] / "LICENSE"
HUGE = {"vocab_size": 10**8, "hidden_size": 2**15}


def row_of(run: Run, folder: Path, timeout_seconds: float = 200.0) -> Row:
    """ZeRO-1 of ``run``."""
    (row,), stopped = train_rows(
        zero_rows(run, [1], "cpu"),
        tiny_corpus(tiny_run(TEXT), folder / "cache"),
        turns=1,
        steps=1,
        device_type="cpu",
        folder=folder,
        timeout_seconds=timeout_seconds,
    )
    assert not stopped
    return row


_SECONDS_TO_START = 60.0


@pytest.mark.timeout(300)
def test_too_little_memory_is_recognised(tmp_path: Path) -> None:
    """The token embedding alone has 10^9 x 2^15 elements: 119 TiB."""
    failed = row_of(tiny_run(TEXT, dp=2, model=HUGE), tmp_path)
    assert failed.status == "failed" and failed.reason is not None
    assert failed.reason.startswith("failed in turn 1: out of memory: RuntimeError: ")
    assert "DefaultCPUAllocator: can't allocate memory" in failed.reason
    log = tmp_path / "logs" / "zero-1-1.log"
    assert failed.reason.endswith(f"see {log}")
    assert "Traceback" in log.read_text(), "where it happened is in the log"


@pytest.mark.timeout(300)
def test_a_killed_rank_is_distinguished_from_one_that_fails(tmp_path: Path) -> None:
    killer = threading.Thread(target=kill_a_rank, daemon=True)
    killer.start()
    killed = row_of(tiny_run(TEXT, dp=2), tmp_path)
    killer.join()
    assert killed.status == "failed" and killed.reason is not None
    assert killed.reason.startswith(
        "failed in turn 1: a rank was killed by SIGKILL; the system does this if memory runs out; "
    )


def kill_a_rank() -> None:
    """As soon as this process has started one."""
    give_up = time.monotonic() + _SECONDS_TO_START
    while time.monotonic() < give_up:
        for process in multiprocessing.active_children():
            if process.daemon:  # and no rank of the pool
                process.kill()
                return
        time.sleep(0.01)


@pytest.mark.timeout(300)
def test_a_row_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    late = row_of(tiny_run(TEXT), tmp_path, timeout_seconds=0.001)
    assert late.status == "failed" and late.reason is not None
    assert late.reason.startswith("failed in turn 1: not finished after 0.001 s; raise --timeout")


def fail_to_watch(*_: object) -> None:
    """In place of ``measure``, on rank 1. The other rank waits for it in a collective."""
    if dist.get_rank() == 1:
        raise RuntimeError("an operator is not known")
    time.sleep(600)


def train_without_watching(*arguments: Any) -> Iterator[Any]:
    setattr(rows_module, "measure", fail_to_watch)  # noqa: B010, a rank has no monkeypatch
    yield from train_rank(*arguments)


@pytest.mark.timeout(300)
def test_a_step_that_cannot_be_watched_leaves_the_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "train_rank", train_without_watching)
    row = row_of(tiny_run(TEXT, dp=2), tmp_path)
    assert row.status == "done" and len(row.turn_seconds) == 1
    log = tmp_path / "logs" / "zero-1-1.log"
    assert row.unwatched == f"RuntimeError: an operator is not known (rank 1); see {log}"
    assert row.stages == []


def test_memory_and_traffic_of_compiled_blocks_are_those_without_compilation(
    pool: RankPool, tmp_path: Path
) -> None:
    """torch 2.13 refuses to compile while operations are watched."""
    measured = []
    for compiles in (True, False):
        run = tiny_run(TEXT, dp=2, training={"compile": compiles})
        corpus = tiny_corpus(run, tmp_path)
        ranks = pool.run(2, train_rank, "zero", run, corpus, 1, 60.0, True)
        measured.append([watched for _, watched in ranks])
    assert measured[0] == measured[1] and isinstance(measured[0][0], RankMeasurement)
    compiled, plain = (
        zero_rows(tiny_run(TEXT, dp=2, training={"compile": each}), [0], "cpu")[0].predicted
        for each in (True, False)
    )
    assert compiled == plain, "the prediction is that of the step that is measured"

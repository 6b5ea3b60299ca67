"""A row that fails reports this, and the next one runs."""

import multiprocessing
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megaspeed.config.resolve import Run
from megaspeed.measurement import timed_steps
from megaspeed.measurement.compare import rows as rows_module
from megaspeed.measurement.compare.rows import TRAINERS, ComparedRow, part_of_turn, zero_rows
from megaspeed.measurement.timed_steps import Steps, take_turn
from megaspeed.measurement.turns import take_turns
from megaspeed.measurement.watched_step import RankMeasurement
from tests.support.rank_pool import RankPool
from tests.support.tiny import tiny_corpus, tiny_run

# The pool starts the process that all ranks are forked from.
pytestmark = pytest.mark.usefixtures("pool")

TEXT = Path(__file__).parents[3] / "LICENSE"
HUGE = {"vocab_size": 10**8, "hidden_size": 2**15}


def row_of(run: Run, folder: Path, timeout_seconds: float = 200.0) -> ComparedRow:
    """ZeRO-1 of ``run``."""
    corpus = tiny_corpus(tiny_run(TEXT), folder / "cache")
    steps = Steps(warm_up=1, timed=1, timeout_seconds=timeout_seconds)
    (row,), stopped = take_turns(
        zero_rows(run, [1], "cpu"),
        1,
        partial(part_of_turn, corpus, steps),
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
    assert failed.failure is not None
    assert failed.failure.startswith("failed in turn 1: out of memory: RuntimeError: ")
    assert "DefaultCPUAllocator: can't allocate memory" in failed.failure
    log = tmp_path / "logs" / "zero-1-1.log"
    assert failed.failure.endswith(f"see {log}")
    assert "Traceback" in log.read_text(), "where it happened is in the log"


@pytest.mark.timeout(300)
def test_a_killed_rank_is_distinguished_from_one_that_fails(tmp_path: Path) -> None:
    killer = threading.Thread(target=kill_a_rank, daemon=True)
    killer.start()
    killed = row_of(tiny_run(TEXT, dp=2), tmp_path)
    killer.join()
    assert killed.failure is not None
    assert killed.failure.startswith(
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
    assert late.failure is not None
    assert late.failure.startswith("failed in turn 1: not finished after 0.001 s; raise --timeout")


def fail_to_watch(*_: object) -> None:
    """In place of ``measure``, on rank 1. The other rank waits for it in a collective."""
    if dist.get_rank() == 1:
        raise RuntimeError("an operator is not known")
    time.sleep(600)


def train_without_watching(*arguments: Any) -> Iterator[Any]:
    setattr(timed_steps, "measure", fail_to_watch)  # noqa: B010, a rank has no monkeypatch
    yield from take_turn(*arguments)


@pytest.mark.timeout(300)
def test_a_step_that_cannot_be_watched_leaves_the_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "take_turn", train_without_watching)
    row = row_of(tiny_run(TEXT, dp=2), tmp_path)
    assert row.done and len(row.turn_seconds) == 1
    log = tmp_path / "logs" / "zero-1-1.log"
    assert row.no_extras == f"RuntimeError: an operator is not known (rank 1); see {log}"
    assert row.measured == []


def test_memory_and_traffic_of_compiled_blocks_are_those_without_compilation(
    pool: RankPool, tmp_path: Path
) -> None:
    """torch 2.13 refuses to compile while operations are watched."""
    measured = []
    for compiles in (True, False):
        run = tiny_run(TEXT, dp=2, training={"compile": compiles})
        corpus = tiny_corpus(run, tmp_path)
        steps = Steps(warm_up=1, timed=1, timeout_seconds=60.0, extra="memory")
        ranks = pool.run(2, take_turn, TRAINERS["zero"], run, corpus, steps)
        measured.append([watched for _, watched in ranks])
    assert measured[0] == measured[1] and isinstance(measured[0][0], RankMeasurement)
    compiled, plain = (
        zero_rows(tiny_run(TEXT, dp=2, training={"compile": each}), [0], "cpu")[0].predicted
        for each in (True, False)
    )
    assert compiled == plain, "the prediction is that of the step that is measured"

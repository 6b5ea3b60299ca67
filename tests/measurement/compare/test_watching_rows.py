"""Measuring memory and traffic. If it fails, the times stay. Compiled blocks have
the same figures.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megaspeed.measurement import turns
from megaspeed.measurement.compare import zero_rows
from megaspeed.measurement.turns import Steps, take_turn, take_turns
from megaspeed.measurement.watched_step import RankMeasurement
from megaspeed.training.worker import Worker
from tests.support.machine import limit
from tests.support.rank_pool import RankPool
from tests.support.tiny import tiny_corpus, tiny_run

# The pool starts the process that all ranks are forked from.
pytestmark = pytest.mark.usefixtures("pool")

TEXT = Path(__file__).parents[3] / "LICENSE"


def fail_to_watch(*_: object) -> None:
    """Replace ``measure`` and fail on rank 1. The other rank waits for it in a collective."""
    if dist.get_rank() == 1:
        raise RuntimeError("an operator is not known")
    time.sleep(10**6)


def train_without_watching(*arguments: Any) -> Iterator[Any]:
    setattr(turns, "measure", fail_to_watch)  # noqa: B010, a rank has no monkeypatch
    yield from take_turn(*arguments)


@pytest.mark.timeout(300)
def test_a_step_that_cannot_be_watched_leaves_the_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "take_turn", train_without_watching)
    run = tiny_run(TEXT, dp=2)
    (row,), _ = take_turns(
        zero_rows(run, [1], "cpu"),
        1,
        tiny_corpus(run, tmp_path / "cache"),
        Steps(warm_up=1, timed=1, timeout_seconds=limit(200), extra="memory"),
        device_type="cpu",
        folder=tmp_path,
    )
    assert len(row.turn_seconds) == 1
    log = tmp_path / "logs" / "zero-1-1.log"
    reason = f"RuntimeError: an operator is not known (rank 1); see {log}"
    assert row.failure == f"failed in turn 1: {reason}" and row.measured == []


def test_memory_and_traffic_of_compiled_blocks_are_those_without_compilation(
    pool: RankPool, tmp_path: Path
) -> None:
    """torch 2.13 refuses to compile while operations are watched."""
    measured = []
    for compiles in (True, False):
        run = tiny_run(TEXT, dp=2, training={"compile": compiles})
        corpus = tiny_corpus(run, tmp_path)
        steps = Steps(warm_up=1, timed=1, timeout_seconds=limit(60), extra="memory")
        ranks = pool.run(2, take_turn, Worker, run, corpus, steps)
        measured.append([watched for _, watched in ranks])
    assert measured[0] == measured[1] and isinstance(measured[0][0], RankMeasurement)
    compiled, plain = (
        zero_rows(tiny_run(TEXT, dp=2, training={"compile": each}), [0], "cpu")[0].predicted
        for each in (True, False)
    )
    assert compiled == plain, "the prediction is for the measured step"

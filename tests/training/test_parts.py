"""Where the time of a step goes: every moment counts once, and a slow rank is named."""

import os
from pathlib import Path

import pytest
import torch

from megaspeed.job.console import SLOW, describe_slow_rank
from megaspeed.topology import activity
from megaspeed.topology.activity import PARTS, Timeline
from megaspeed.training import worker
from megaspeed.training.faults import inject_into_process
from megaspeed.training.trainer import Trainer
from tests.support.machine import limit
from tests.support.rank_pool import RankPool
from tests.support.tiny import tiny_corpus, tiny_run
from tests.training.recorded import Record, train

TEXT = Path(__file__).parents[2] / "LICENSE"
SLOW_STEP, SLEEP_SECONDS = 4, limit(0.4)


class Clock:
    """A clock that only a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_the_innermost_part_counts_and_no_moment_counts_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(activity, "time", clock)
    timeline = Timeline(torch.device("cpu"))
    with timeline.part("compute"):  # this step is not timed
        clock.sleep(1)
    assert not any(timeline.pop_seconds())
    timeline.begin(7)
    with timeline.part("compute"):
        clock.sleep(2)
        with timeline.part("tensor"):
            clock.sleep(8)
        clock.sleep(4)
    clock.sleep(16)
    timeline.end()
    step, *seconds = timeline.pop_seconds()
    by_part = {part: each for part, each in zip(PARTS, seconds, strict=True) if each}
    assert (step, by_part) == (7, {"compute": 6, "tensor": 8, "host": 16})
    assert not any(timeline.pop_seconds()), "each step is reported once"


def make_one_rank_slow(trainer: Trainer, record: Record) -> None:
    fault = f"slow rank=5 step={SLOW_STEP} work=Forward seconds={SLEEP_SECONDS}"
    os.environ["MEGASPEED_FAULT"] = fault
    context = trainer.worker.context
    inject_into_process(context.activity, context.rank)
    worker.peak_memory = lambda device: context.rank ^ 2  # 2, 3, 0 and 1, then 6, 7, 4 and 5


@pytest.mark.parametrize(("zero_stage", "reduction"), [(1, "per_step"), (3, "per_micro_batch")])
def test_every_axis_has_its_part_and_the_slow_rank_is_named_on_all(
    pool: RankPool, tmp_path: Path, zero_stage: int, reduction: str
) -> None:
    run = tiny_run(
        TEXT,
        pp=2,
        dp=2,
        tp=2,
        training={"steps": 6, "log_interval": 2, "run_dir": str(tmp_path / "run")},
        zero_optimization={"stage": zero_stage},
        parallel={"gradient_reduction": reduction},
    )
    corpus = tiny_corpus(run, tmp_path)
    records = pool.run(8, train, run, corpus, make_one_rank_slow)
    assert all(record.parts_of_steps == records[0].parts_of_steps for record in records)
    assert records[0].events == [
        *(("step", 1), ("step", 2), ("parts", 2), ("step", 3), ("step", 4), ("parts", 4)),
        *(("step", 5), ("step", 6), ("parts", 6), ("checkpoint", 6)),
    ], "in the order of time"
    assert all(step.peak_memory_bytes == [3, 7] for step in records[0].steps)
    first, slow, last = records[0].parts_of_steps
    assert (first.step, slow.step, last.step) == (2, SLOW_STEP, 6), "the last step of the run too"
    for name in ("data_loading", "compute", "tensor", "data", "pipeline", "world", "optimizer"):
        assert first.parts_seconds[name] > 0, name
    for parts in (first, slow, last):
        step = records[0].steps[parts.step - 1]
        total = sum(parts.parts_seconds.values())
        assert total == pytest.approx(step.step_time_seconds, rel=0.25)
    micro_batches = run.batch.gradient_accumulation_steps
    assert slow.slowest_rank == 5
    assert slow.slowest_rank_seconds >= micro_batches * SLEEP_SECONDS
    assert slow.slowest_rank_seconds > SLOW * slow.median_rank_seconds
    assert "slowest: rank 5 (pp 1, dp 0, tp 1) worked" in describe_slow_rank(slow, run.grid)

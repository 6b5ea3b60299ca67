"""ZeRO-1 and 2: updated parameters arrive beside the next forward, in the order of the layers."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data_axis.axis import data_axis_of
from megaspeed.tensor_parallel.collectives import all_gather_tensor
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.zero import step_gathers
from tests.support.rank_pool import RankPool
from tests.support.tiny import tiny_corpus
from tests.zero.one_rank import one_rank, put_an_infinity, small_run

SMALL_BUCKETS = {"stage": 1, "reduce_bucket_size": 3000}
"""Some parameters are larger than a bucket, others share one."""


class NotedWork:
    """The work of a gather. It notes when it is waited for."""

    def __init__(self, work: dist.Work, bucket: int, events: list[str]) -> None:
        self._work, self._bucket, self._events = work, bucket, events

    def wait(self) -> None:
        self._events.append(f"bucket {self._bucket}")
        self._work.wait()


def events_of_a_step(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, what: str
) -> list[str]:
    """Return the events between two steps and in the second one: when a gather starts, when it is
    waited for, and when a layer begins its forward.

    Args:
        what: "step", "evaluation" or "weights": what uses the parameters after the first step.
    """
    events: list[str] = []
    start = all_gather_tensor

    def noted(flat: Any, own: Any, **options: Any) -> NotedWork:
        number = sum(event == "start" for event in events)
        events.append("start")
        return NotedWork(start(flat, own, **options), number, events)

    with pytest.MonkeyPatch.context() as patch, one_rank(launch, run, corpus) as rank:
        patch.setattr(step_gathers, "all_gather_tensor", noted)
        model: Any = rank.engine.module
        for index, layer in enumerate(model.layer_modules()):
            layer.register_forward_pre_hook(lambda *_, n=index: events.append(f"layer {n}"))
        rank.train_step(0)
        del events[: events.index("start")]
        if what == "evaluation":
            rank.worker.evaluate(lambda m: rank.loader.micro_batch(0, m), 1, 64)
        elif what == "weights":
            rank.weights()
        else:
            rank.train_step(1)
        return events


@pytest.mark.parametrize("what", ["step", "evaluation"])
@pytest.mark.parametrize("recomputation", ["none", "full"])
def test_each_layer_waits_for_its_own_buckets_in_the_first_forward_after_a_step(
    pool: RankPool, text: Path, cache: Path, what: str, recomputation: str
) -> None:
    run = small_run(
        text,
        dp=2,
        zero_optimization=SMALL_BUCKETS,
        parallel={"activation_checkpointing": recomputation},
    )
    gathers = data_axis_of(run, 0, "cpu").gathers_after_step
    layers = ["embedding", *(f"blocks.{n}" for n in range(3)), "head"]
    needed = [
        [n for n, each in enumerate(gathers) if any(p.layer == name for p in each.parameters)]
        for name in layers
    ]
    expected, arrived = ["start"] * len(gathers), set[int]()
    for index, buckets in enumerate(needed):
        expected += [f"bucket {n}" for n in buckets if n not in arrived] + [f"layer {index}"]
        arrived |= {*buckets}
    assert len(gathers) > 5 and max(needed[0]) < max(needed[-1])
    for events in pool.run(2, events_of_a_step, run, tiny_corpus(run, cache), what):
        assert events[: len(expected)] == expected
        later = events[len(expected) :]
        if what == "step":
            later = later[: later.index("start")]  # of the step's own gathers
        assert not any(event.startswith("bucket") for event in later)


def test_all_gathers_end_before_weights_are_read(pool: RankPool, text: Path, cache: Path) -> None:
    run = small_run(text, dp=2, zero_optimization=SMALL_BUCKETS)
    count = len(data_axis_of(run, 0, "cpu").gathers_after_step)
    for events in pool.run(2, events_of_a_step, run, tiny_corpus(run, cache), "weights"):
        assert events == ["start"] * count + [f"bucket {n}" for n in range(count)]


def gathers_of_a_skipped_step(launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus) -> int:
    """Return how many gathers a skipped step starts."""
    started: list[Any] = []
    with pytest.MonkeyPatch.context() as patch, one_rank(launch, run, corpus) as rank:
        patch.setattr(step_gathers, "all_gather_tensor", lambda *each, **_: started.append(each))
        assert rank.train_step(0, look=lambda: put_an_infinity(rank)).skipped
        return len(started)


def test_a_skipped_step_gathers_nothing(pool: RankPool, text: Path, cache: Path) -> None:
    run = small_run(text, dp=2, zero_optimization={"stage": 2})
    assert pool.run(2, gathers_of_a_skipped_step, run, tiny_corpus(run, cache)) == [0, 0]

"""The plan of the data axis is made before DeepSpeed partitions anything, and compared with it."""

from pathlib import Path
from typing import Any

import pytest

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data_axis import axis as plan
from megaspeed.data_axis import buckets, gathers
from megaspeed.data_axis.axis import data_axis_of
from megaspeed.topology.launch import LaunchEnvironment
from tests.support.rank_pool import RankFailure, RankPool
from tests.support.tiny import tiny_corpus
from tests.zero.one_rank import one_rank, small_run


def built(launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, mistake: str) -> None:
    """Build a rank whose plan has another padding, or one persistent parameter fewer."""
    with pytest.MonkeyPatch.context() as patch:
        if mistake == "padding":
            patch.setattr(buckets, "_ELEMENTS_ALIGNED", 1)
        if mistake == "persistent":
            chosen = gathers.persistent_parameters
            patch.setattr(plan, "persistent_parameters", lambda *args: [*chosen(*args)][1:])
        plan._data_axis_of.cache_clear()
        try:
            with one_rank(launch, run, corpus):
                pass
        finally:
            plan._data_axis_of.cache_clear()


@pytest.mark.parametrize(
    ("dp", "how"), [(1, "none"), (2, {"type": "int8"}), (2, {"type": "powersgd"})]
)
def test_a_bucket_is_at_most_a_sub_group_of_deepspeed(
    pool: RankPool, text: Path, cache: Path, dp: int, how: Any
) -> None:
    """An earlier version of the plan put all matrices into one bucket, which DeepSpeed split."""
    zero = {"stage": 3, "sub_group_size": 9000}
    compression = {"gradient_compression": how}
    run = small_run(text, dp=dp, zero_optimization=zero, parallel=compression)
    pool.run(dp, built, run, tiny_corpus(run, cache), "none")
    several = [b.part for b in data_axis_of(run, 0, "cpu").buckets if len(b.parameters) > 1]
    assert len(several) > 1 and max(several) <= 9000


@pytest.mark.parametrize(
    ("mistake", "zero", "reason"),
    [
        ("padding", {"stage": 1}, "partitions parameters differently from the plan"),
        ("persistent", {"stage": 3, "stage3_param_persistence_threshold": 500}, "stays gathered"),
    ],
)
def test_a_plan_that_differs_from_deepspeed_is_refused(
    pool: RankPool, text: Path, cache: Path, mistake: str, zero: dict[str, Any], reason: str
) -> None:
    run = small_run(text, dp=3, zero_optimization={"reduce_bucket_size": 3000, **zero})
    corpus = tiny_corpus(run, cache)
    pool.run(3, built, run, corpus, "none")
    with pytest.raises(RankFailure, match=reason):
        pool.run(3, built, run, corpus, mistake)

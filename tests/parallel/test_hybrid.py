"""ZeRO with shards and replicas: trains as one process, and sends and holds what is predicted.

rank      0 1 2 3       pp 1, 2 replicas x 2 shards, tp 1
shard     0 1 0 1       neighbours hold one complete set of partitions
replica   0 0 1 1       they sum the same partition once a step
"""

from pathlib import Path
from typing import Any

import pytest

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data_axis.axis import data_axis_of
from megaspeed.measurement.watched_step import RankMeasurement
from megaspeed.planning.costs.stage_memory import StageMemory
from megaspeed.planning.costs.traffic import by_axis, predict_traffic
from megaspeed.topology.launch import LaunchEnvironment
from tests.parallel.covering import HYBRID, Row, pairs_of, possible_pairs, rows_of
from tests.parallel.references import FEW_STEPS, TEXT, References, train_and_compare
from tests.parallel.runs_of_rows import run_of
from tests.support.rank_pool import RankPool
from tests.support.tiny import merge, tiny_corpus, tiny_run
from tests.zero.one_rank import one_rank

ROWS = rows_of(HYBRID)
INT8 = {"parallel": {"gradient_compression": {"type": "int8"}}}
POWER_SGD = {
    "model": {"hidden_size": 64},
    "parallel": {"gradient_compression": {"type": "powersgd", "rank": 2, "start_step": 1}},
}


def name_of(row: Row) -> str:
    return "-".join(map(str, (*row["layout"], *list(row.values())[1:])))


def test_every_possible_pair_of_settings_is_covered() -> None:
    assert possible_pairs(HYBRID) == set().union(*map(pairs_of, ROWS))


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_shards_and_replicas_equal_one_process(
    row: Row, pool: RankPool, references: References
) -> None:
    comparison = train_and_compare(pool, references, run_of(row, TEXT), FEW_STEPS)
    assert comparison.weights_bitwise_equal
    assert comparison.equal, comparison.largest


# --- what a rank sends and holds ------------------------------------------------------------------


def measured_steps(launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus) -> RankMeasurement:
    with one_rank(launch, run, corpus) as rank:
        return rank.measured_steps()


@pytest.mark.parametrize(("zero_stage", "micro_batches"), [(1, 4), (2, 1), (3, 1), (3, 4)])
def test_replicas_send_their_partition_once_a_step(
    pool: RankPool, tmp_path: Path, zero_stage: int, micro_batches: int
) -> None:
    """Each rank sends 2 (R - 1) / R of its partition. Over the shards, it sends what it would send
    if they were the data axis.
    """
    shape: dict[str, Any] = {
        "zero_optimization": {"stage": zero_stage},
        "gradient_accumulation_steps": micro_batches,
    }
    hybrid = tiny_run(
        TEXT, dp=4, train_batch_size=16, **merge(shape, {"parallel": {"replicate": 2}})
    )
    alone = tiny_run(TEXT, dp=2, train_batch_size=8, **shape)
    assert hybrid.batch.micro_batch_size == alone.batch.micro_batch_size
    sent, of_shards = (
        [by_axis(rank.traffic) for rank in pool.run(run.grid.dp, measured_steps, run, corpus)]
        for run in (hybrid, alone)
        for corpus in [tiny_corpus(run, tmp_path)]
    )
    partition = sum(bucket.part for bucket in data_axis_of(hybrid, 0, "cpu").buckets) * 4
    for rank in sent:
        assert rank["replica"] == {"all_reduce": partition}  # 2 (R - 1) / R = 1
        assert rank["shard"] == of_shards[0]["dp"]


@pytest.mark.parametrize(
    ("zero_stage", "overlaps", "changes"),
    [
        (1, True, {}),
        (2, True, {}),
        (3, False, {}),
        (1, False, INT8),
        (3, True, INT8),
        (2, True, POWER_SGD),
        (3, False, POWER_SGD),
    ],
)
def test_traffic_and_memory_are_the_predicted_ones(
    pool: RankPool, tmp_path: Path, zero_stage: int, overlaps: bool, changes: dict[str, Any]
) -> None:
    run = tiny_run(
        TEXT,
        dp=4,
        **merge(
            {
                "train_batch_size": 16,
                "parallel": {"replicate": 2},
                "zero_optimization": {"stage": zero_stage, "overlap_comm": overlaps},
            },
            changes,
        ),
    )
    ranks = pool.run(4, measured_steps, run, tiny_corpus(run, tmp_path))
    predicted = StageMemory(run, 0, device_type="cpu")
    assert ranks[0].traffic == predict_traffic(run, 0, "cpu")
    for rank in ranks:
        assert rank.states.gradients == pytest.approx(predicted.states.gradients, rel=0.02)
        assert rank.states.parameters == pytest.approx(predicted.states.parameters, rel=0.02)
        assert rank.states.optimizer_states == pytest.approx(
            predicted.states.optimizer_states, rel=0.02
        )
        assert rank.peak.total == pytest.approx(predicted.peak.total, rel=0.1)


def losses_of(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, steps: int
) -> list[float]:
    with one_rank(launch, run, corpus) as rank:
        return [rank.train_step(step).loss for step in range(steps)]


@pytest.fixture(scope="module")
def exact(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Return the loss after 30 steps without replicas and compression."""
    return loss_after_30_steps(pool, tmp_path_factory.mktemp("exact"), {})


def loss_after_30_steps(pool: RankPool, folder: Path, changes: dict[str, Any]) -> float:
    values = {
        "model": {"hidden_size": 64},
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 3},
    }
    run = tiny_run(TEXT, dp=4, **merge(values, changes))
    return pool.run(4, losses_of, run, tiny_corpus(run, folder), 30)[0][-1]


@pytest.mark.parametrize("changes", [INT8, POWER_SGD], ids=["int8", "powersgd"])
def test_replicas_that_compress_learn_as_well(
    pool: RankPool, tmp_path: Path, exact: float, changes: dict[str, Any]
) -> None:
    """A shard holds parts of matrices, so PowerSGD's products have less to describe, and differ."""
    without, compressed = (
        loss_after_30_steps(pool, tmp_path, each)
        for each in (changes, merge(changes, {"parallel": {"replicate": 2}}))
    )
    assert len({exact, without, compressed}) == 3
    assert compressed == pytest.approx(exact, rel=0.04)
    assert compressed == pytest.approx(without, rel=0.01)


OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}


@pytest.mark.parametrize("start_step", [None, 1, 6])
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_offloaded_replicas_train_the_same(
    pool: RankPool, tmp_path: Path, zero_stage: int, start_step: int | None
) -> None:
    """DeepSpeed's gradient in host memory has no padding, and is divided on the device, once. Most
    parts of parameters do not divide by 3, so they are padded for the replicas.
    """
    how: dict[str, Any] = {"type": "int8", "block": 32}
    if start_step is not None:
        how = {"type": "powersgd", "rank": 2, "start_step": start_step}
    values: dict[str, Any] = {
        "model": {"hidden_size": 64},
        "parallel": {"replicate": 3, "gradient_compression": how},
        "gradient_accumulation_steps": 2,
        "train_batch_size": 12,
    }
    on_device, offloaded = (
        pool.run(6, losses_of, run, tiny_corpus(run, tmp_path), 10)[0]
        for run in (
            tiny_run(TEXT, dp=6, **values, zero_optimization={"stage": zero_stage, **more})
            for more in ({}, OFFLOAD)
        )
    )
    assert offloaded == pytest.approx(on_device, rel=1e-4)

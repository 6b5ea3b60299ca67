"""The fake world takes the branches of CUDA and computes finite numbers, on any device."""

from datetime import timedelta
from typing import Any

import pytest
import torch

from megaspeed.topology import context
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from tests.paper_gpu.fake_world import batches, fake_context, fake_rank, paper_run
from tests.support.rank_pool import RankPool


def ranks_of_a_split_group(launch: LaunchEnvironment) -> int:
    with fake_context(Grid(pp=1, dp=2, tp=2), rank=3) as made:
        groups, gpu = made.grid.groups_along("tp"), torch.device("cuda", 0)
        return context._own_group("tp", groups, 3, gpu, timedelta(seconds=60)).size()


def test_the_groups_of_a_gpu_are_fake_too(pool: RankPool) -> None:
    """On a GPU, groups are split from the world's communicator. A fake world has none."""
    assert pool.run(1, ranks_of_a_split_group) == [2]


def steps_of_a_last_stage(launch: LaunchEnvironment, changes: dict[str, Any]) -> list[bool]:
    """Return for two steps whether they are skipped. New memory is NaN."""
    torch.use_deterministic_algorithms(True)
    run = paper_run(**changes)
    with fake_rank(run, rank=2) as worker:
        return [worker.train_step(batches(run), 1e-3).skipped for _ in range(2)]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_message_from_another_stage_is_zeros(pool: RankPool, stage: int) -> None:
    """An earlier version left new memory. If it was NaN, each step was skipped, so that the
    optimizer never ran.
    """
    changes = {"pp": 2, "dp": 2, "zero_optimization": {"stage": stage}}
    assert pool.run(1, steps_of_a_last_stage, changes) == [[False, False]]


def test_micro_batches_are_on_the_device() -> None:
    run = paper_run(data={"reset_at_documents": True})
    batch = batches(run, torch.device("meta"))(0)
    assert batch.documents is not None
    tensors = (batch.tokens, batch.targets, batch.samples, batch.documents.segments.cu_seqlens)
    assert {tensor.device.type for tensor in tensors} == {"meta"}

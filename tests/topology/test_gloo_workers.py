"""Tests for the work-around for two worker threads of a gloo group."""

from typing import Any

import torch
import torch.distributed as dist

from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment
from tests.support.machine import limit
from tests.support.rank_pool import RankPool


def _workers(group: Any) -> int:
    workers: int = group._get_backend(torch.device("cpu")).options._threads
    return workers


def workers_of_groups(launch: LaunchEnvironment) -> tuple[int, set[int]]:
    """Return how many workers a group of torch has, and those of the context."""
    dist.init_process_group("gloo", init_method="env://")
    of_torch = _workers(dist.group.WORLD)
    dist.destroy_process_group()
    with ParallelContext.create(
        Grid(pp=2, dp=2, tp=1), launch, timeout_seconds=limit(30)
    ) as context:
        later = dist.new_group(backend="gloo")
        groups = (context.world_group, context.shard_group, context.pp_group)
        return of_torch, {_workers(group) for group in (*groups, context.checkpoint_group, later)}


def test_each_group_has_one_worker(pool: RankPool) -> None:
    assert pool.run(4, workers_of_groups) == [(2, {1})] * 4

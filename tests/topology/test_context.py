"""ParallelContext: the groups of each rank have the right members, and carry data."""

import os
import subprocess
import sys
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from megaspeed.topology.context import ParallelContext
from megaspeed.topology.grid import Axis, Coordinates, Grid, TopologyError
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.topology.store import GroupError
from tests.support.machine import limit
from tests.support.rank_pool import RankFailure, RankPool

GROUPS = ("world", "tp", "shard", "replica", "pp", "checkpoint")


def _groups(context: ParallelContext) -> dict[str, dist.ProcessGroup]:
    """Return the groups of the context, by name."""
    groups = {name: getattr(context, f"{name}_group") for name in GROUPS}
    return {name: group for name, group in groups.items() if group is not None}


def _members(launch: LaunchEnvironment, grid: Grid) -> dict[str, list[int]]:
    with ParallelContext.create(grid, launch, timeout_seconds=limit(30)) as context:
        groups = _groups(context)
        return {name: dist.get_process_group_ranks(group) for name, group in groups.items()}


def _sums(launch: LaunchEnvironment, grid: Grid) -> dict[str, int]:
    """Return the sum of 2 ** rank over each group. The sum shows exactly which ranks took part."""
    with ParallelContext.create(grid, launch, timeout_seconds=limit(30)) as context:
        sums = {}
        for name, group in _groups(context).items():
            mine = torch.tensor(2**context.rank)
            dist.all_reduce(mine, group=group)
            sums[name] = int(mine)
        return sums


def _place(launch: LaunchEnvironment, grid: Grid) -> dict[str, Any]:
    with ParallelContext.create(grid, launch, timeout_seconds=limit(30)) as context:
        return {
            "coordinates": context.coordinates,
            "ranks": (context.pp_rank, context.dp_rank, context.tp_rank),
            "sizes": (context.grid.pp, context.grid.dp, context.grid.tp),
            "ends": (context.is_first_pipeline_stage, context.is_last_pipeline_stage),
            "neighbours": (context.previous_rank, context.next_rank),
            "other end": context.other_end_rank,
            "device": str(context.device),
        }


def _cross_messages(launch: LaunchEnvironment) -> float:
    """Let both stages send and receive at the same time, in one batch."""
    with ParallelContext.create(
        Grid(pp=2, dp=1, tp=1), launch, timeout_seconds=limit(30)
    ) as context:
        peer, group = 1 - context.rank, context.pp_group
        assert group is not None
        received = torch.empty(())
        batch = [
            dist.P2POp(dist.isend, torch.tensor(float(context.rank)), peer, group),
            dist.P2POp(dist.irecv, received, peer, group),
        ]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        return received.item()


def _three_contexts_in_a_row(launch: LaunchEnvironment) -> list[float]:
    sums = []
    for grid in (Grid(pp=1, dp=4, tp=1), Grid(pp=2, dp=1, tp=2), Grid(pp=1, dp=4, tp=1)):
        with ParallelContext.create(grid, launch, timeout_seconds=limit(30)) as context:
            mine = torch.tensor(float(context.rank))
            dist.all_reduce(mine, group=context.data_group)
            sums.append(mine.item())
    return sums


def _a_world_after_a_single_process(launch: LaunchEnvironment) -> int:
    alone = LaunchEnvironment(
        rank=0, world_size=1, local_rank=0, local_world_size=1, source="single process"
    )
    with ParallelContext.create(
        Grid(pp=1, dp=1, tp=1), alone, timeout_seconds=limit(30)
    ) as context:
        assert context.world_group.size() == 1
    assert not dist.is_initialized()
    with ParallelContext.create(
        Grid(pp=1, dp=2, tp=1), launch, timeout_seconds=limit(30)
    ) as context:
        return context.world_group.size()


def _a_context_after_an_exception(launch: LaunchEnvironment) -> float:
    grid = Grid(pp=1, dp=2, tp=1)
    with (
        pytest.raises(ValueError, match="in a notebook"),
        ParallelContext.create(grid, launch, timeout_seconds=limit(30)),
    ):
        raise ValueError("in a notebook")
    assert not dist.is_initialized()
    with ParallelContext.create(grid, launch, timeout_seconds=limit(30)) as context:
        mine = torch.tensor(2.0**context.rank)
        dist.all_reduce(mine, group=context.data_group)
        return mine.item()


def _connections(launch: LaunchEnvironment) -> int:
    with ParallelContext.create(
        Grid(pp=1, dp=8, tp=1), launch, timeout_seconds=limit(60)
    ) as context:
        dist.barrier(context.world_group)
        return len(psutil.Process().net_connections(kind="tcp"))


def _come_without_rank_1(launch: LaunchEnvironment) -> str:
    if launch.rank == 1:
        return "did not come"
    with pytest.raises(GroupError) as refusal:
        ParallelContext.create(Grid(pp=1, dp=1, tp=2), launch, timeout_seconds=1)
    assert not dist.is_initialized()
    return str(refusal.value)


def _create_twice(launch: LaunchEnvironment) -> None:
    grid = Grid(pp=1, dp=1, tp=1)
    with ParallelContext.create(grid, launch, timeout_seconds=limit(30)):
        ParallelContext.create(grid, launch, timeout_seconds=limit(30))


def test_rank_5_of_eight_has_the_groups_of_the_docstring(pool: RankPool) -> None:
    assert pool.run(8, _members, Grid(pp=2, dp=2, tp=2))[5] == {
        "world": [0, 1, 2, 3, 4, 5, 6, 7],
        "tp": [4, 5],
        "shard": [5, 7],
        "pp": [1, 5],
        "checkpoint": [0, 1, 2, 3, 4, 5, 6, 7],
    }
    assert pool.run(8, _members, Grid(pp=1, dp=4, tp=2, replicate=2))[5] == {
        "world": [0, 1, 2, 3, 4, 5, 6, 7],
        "tp": [4, 5],
        "shard": [5, 7],
        "replica": [1, 5],
        "checkpoint": [0, 1, 2, 3, 4, 5, 6, 7],
    }
    assert pool.run(2, _members, Grid(pp=1, dp=2, tp=1, replicate=2))[1] == {
        "world": [0, 1],
        "shard": [1],
        "replica": [0, 1],
        "checkpoint": [0, 1],
    }


@pytest.mark.parametrize(
    "grid",
    [
        Grid(pp=2, dp=2, tp=2),
        Grid(pp=4, dp=1, tp=2),
        Grid(pp=1, dp=3, tp=2),
        Grid(pp=3, dp=1, tp=1),
        Grid(pp=1, dp=4, tp=2, replicate=2),
        Grid(pp=2, dp=3, tp=1, replicate=3),
    ],
    ids=str,
)
def test_a_sum_over_a_group_is_the_sum_over_its_ranks(pool: RankPool, grid: Grid) -> None:
    axes: tuple[Axis, ...] = ("tp", "shard", "replica", "pp")
    along = {axis: grid.groups_along(axis) for axis in axes}
    everyone = [list(range(grid.world_size))]
    lists: dict[str, list[list[int]]] = {"world": everyone, "checkpoint": everyone}
    # An axis of one rank has no group, except the shards.
    lists |= {axis: along[axis] for axis in axes if grid.size_along(axis) > 1 or axis == "shard"}
    for rank, sums in enumerate(pool.run(grid.world_size, _sums, grid)):
        mine = {name: next(g for g in groups if rank in g) for name, groups in lists.items()}
        assert sums == {name: sum(2**r for r in ranks) for name, ranks in mine.items()}


def test_the_middle_of_a_pipeline_knows_its_place_and_neighbours(pool: RankPool) -> None:
    places = pool.run(6, _place, Grid(pp=3, dp=1, tp=2))
    assert places[3] == {
        "coordinates": Coordinates(pp=1, dp=0, cp=0, tp=1),
        "ranks": (1, 0, 1),
        "sizes": (3, 1, 2),
        "ends": (False, False),
        "neighbours": (1, 5),
        "other end": None,
        "device": "cpu",
    }
    assert [place["neighbours"] for place in places] == [
        (None, 2), (None, 3), (0, 4), (1, 5), (2, None), (3, None),
    ]  # fmt: skip
    assert [place["other end"] for place in places] == [4, 5, None, None, 0, 1]
    assert [place["ends"] for place in places[::2]] == [
        (True, False),
        (False, False),
        (False, True),
    ]


def test_a_single_stage_is_first_and_last_and_has_no_neighbours(pool: RankPool) -> None:
    (place,) = pool.run(1, _place, Grid(pp=1, dp=1, tp=1))
    assert place["ends"] == (True, True)
    assert place["neighbours"] == (None, None)
    assert place["other end"] is None


def test_messages_of_both_directions_do_not_meet(pool: RankPool) -> None:
    assert pool.run(2, _cross_messages) == [1.0, 0.0]


def test_contexts_of_other_shapes_follow_each_other_in_one_process(pool: RankPool) -> None:
    # dp 4 sums all ranks; with dp 1 each keeps its own
    expected = [[6.0, float(rank), 6.0] for rank in range(4)]
    assert pool.run(4, _three_contexts_in_a_row) == expected


def test_a_world_of_two_follows_a_world_of_one_in_one_process(pool: RankPool) -> None:
    assert pool.run(2, _a_world_after_a_single_process) == [2, 2]


def test_after_an_exception_a_new_context_can_be_created(pool: RankPool) -> None:
    assert pool.run(2, _a_context_after_an_exception) == [3.0, 3.0]


def test_gloo_connects_only_ranks_that_talk(pool: RankPool) -> None:
    """In an earlier version, a rank of 4,096 had 4,095 connections for its checkpoint group."""
    groups, others = 2, 7
    connections = pool.run(8, _connections)
    # Rank 0 keeps the store where the ranks meet. Each rank has a connection to it.
    assert max(connections[1:]) < groups * others


def test_a_rank_that_does_not_come_is_reported_with_its_group(pool: RankPool) -> None:
    report, _ = pool.run(2, _come_without_rank_1)
    assert "rank 0 could not join the world group (ranks 0, 1)" in report


def test_a_grid_of_another_size_than_the_launch_is_refused_with_its_source() -> None:
    launch = LaunchEnvironment(
        rank=0, world_size=4, local_rank=0, local_world_size=4, source="RANK/WORLD_SIZE"
    )
    with pytest.raises(TopologyError, match=r"8 ranks, but 4 were launched \(from RANK/WORLD_SIZE"):
        ParallelContext.create(Grid(pp=2, dp=2, tp=2), launch, timeout_seconds=30)


def test_a_second_open_context_is_refused(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="close the earlier ParallelContext"):
        pool.run(1, _create_twice)


def test_plain_python_needs_no_variables_at_all() -> None:
    code = (
        "import os\n"
        "from megaspeed.topology.context import ParallelContext\n"
        "from megaspeed.topology.grid import Grid\n"
        "from megaspeed.topology.launch import read_launch_environment\n"
        "launch = read_launch_environment(os.environ)\n"
        "with ParallelContext.create(Grid(1, 1, 1), launch, timeout_seconds=30) as context:\n"
        "    assert context.world_group.size() == 1\n"
    )
    bare = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", code], env=bare, check=True)

"""Rank arithmetic: the order of the ranks. The groups of every axis partition the world."""

import doctest
import itertools
import math
import subprocess
import sys
import time

import pytest
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from hypothesis import given
from hypothesis import strategies as st

from megaspeed.topology import grid
from megaspeed.topology.grid import AXES, Axis, Coordinates, Grid, TopologyError
from tests.support.machine import limit

DEEPSPEED_NAMES: dict[Axis, str] = {"pp": "pipe", "dp": "data", "tp": "model"}
GRIDS = st.builds(Grid, *(st.integers(1, largest) for largest in (6, 6, 8)))


def all_groups(grid: Grid) -> list[list[list[int]]]:
    return [grid.groups_along(axis) for axis in AXES]


def test_the_worked_example_of_eight_ranks_holds() -> None:
    result = doctest.testmod(grid)
    assert result.attempted >= 6
    assert result.failed == 0


@given(ours=GRIDS)
def test_ranks_and_groups_are_those_of_deepspeed(ours: Grid) -> None:
    theirs = PipeModelDataParallelTopology(num_pp=ours.pp, num_mp=ours.tp, num_dp=ours.dp)
    assert ours.world_size == theirs.world_size()
    for rank in range(ours.world_size):
        place = ours.coordinates_of(rank)
        assert ours.rank_of(place) == rank
        assert rank == theirs.get_rank(pipe=place.pp, data=place.dp, model=place.tp)
    for axis, name in DEEPSPEED_NAMES.items():
        # DeepSpeed has no list for an axis of one rank
        if getattr(ours, axis) > 1:
            assert ours.groups_along(axis) == theirs.get_axis_comm_lists(name)


@given(grid=st.builds(Grid, *[st.integers(1, 4)] * 3, st.just(1), st.integers(1, 4)))
def test_the_groups_along_an_axis_hold_every_rank_once_in_ascending_order(grid: Grid) -> None:
    for groups in all_groups(grid):
        assert sorted(itertools.chain(*groups)) == list(range(grid.world_size))
        assert groups == sorted(sorted(group) for group in groups)


EXPERT_AXES: tuple[Axis, ...] = ("ep", "expert_shard", "expert_replica")


@given(sizes=st.tuples(*[st.integers(1, 4)] * 4), divided=st.tuples(st.integers(1), st.integers(1)))
def test_the_expert_axes_divide_each_stage(
    sizes: tuple[int, int, int, int], divided: tuple[int, int]
) -> None:
    pp, dp, tp, cp = sizes
    stage = dp * tp * cp
    ep = math.gcd(stage, divided[0])
    shard = math.gcd(stage // ep, divided[1])
    grid = Grid(pp, dp, tp, cp=cp, ep=ep, expert_shard=shard)
    assert math.prod(grid.size_along(axis) for axis in EXPERT_AXES) == stage
    assert grid.groups_along("ep") == [
        list(range(first, first + ep)) for first in range(0, grid.world_size, ep)
    ]
    for axis in EXPERT_AXES:
        groups = grid.groups_along(axis)
        assert sorted(itertools.chain(*groups)) == list(range(grid.world_size))
        assert groups == sorted(sorted(group) for group in groups)
        for group in groups:
            assert [grid.index_along(rank, axis) for rank in group] == list(range(len(group)))
            assert len({grid.coordinates_of(rank).pp for rank in group}) == 1
            # Along one expert axis, the place on the others is the same.
            others = [other for other in EXPERT_AXES if other != axis]
            assert len({tuple(grid.index_along(r, o) for o in others) for r in group}) == 1


@pytest.mark.parametrize(
    ("grid", "groups"),
    [
        # the tensor ranks share the experts, so the copies are those of other weights
        (Grid(1, 4, 2, ep=2, expert_shard=4), ([0, 1], [0, 2, 4, 6], [0])),
        # each rank has all experts, which ZeRO partitions over all ranks
        (Grid(1, 2, 2, ep=1, expert_shard=4), ([0], [0, 1, 2, 3], [0])),
        # on each of two pipeline stages, the two context ranks share the experts
        (Grid(2, 2, 1, cp=2, ep=2, expert_shard=2), ([0, 1], [0, 2], [0])),
        # two replicas: each holds the experts once, twice, or a half of them
        (Grid(1, 8, 1, 2, ep=4, expert_shard=1), ([0, 1, 2, 3], [0], [0, 4])),
        (Grid(1, 8, 1, 2, ep=2, expert_shard=2), ([0, 1], [0, 2], [0, 4])),
        (Grid(1, 8, 1, 2, ep=8, expert_shard=1), ([0, 1, 2, 3, 4, 5, 6, 7], [0], [0])),
    ],
)
def test_the_groups_of_experts_are_those_of_the_documentation(
    grid: Grid, groups: tuple[list[int], ...]
) -> None:
    assert tuple(grid.groups_along(axis)[0] for axis in EXPERT_AXES) == groups
    assert grid.has_expert_axes is (grid.ep != grid.tp)
    if not grid.has_expert_axes:
        assert grid.expert_copies == grid.copies


def test_a_model_without_experts_has_no_expert_axes() -> None:
    grid = Grid(2, 4, 2, 2)
    assert not grid.has_expert_axes and grid.expert_copies == grid.copies
    assert str(grid) == "pp 2 x dp 4 (2 replicas x 2) x tp 2"
    assert str(Grid(1, 4, 2, ep=4, expert_shard=2)) == "pp 1 x dp 4 x tp 2, ep 4"


@pytest.mark.parametrize(("ep", "shard"), [(3, 1), (2, 3), (8, 2)])
def test_expert_axes_that_do_not_divide_a_stage_are_refused(ep: int, shard: int) -> None:
    with pytest.raises(TopologyError, match=f"dp x cp x tp 8 .* ep {ep} x expert_shard {shard}"):
        Grid(2, 4, 2, ep=ep, expert_shard=shard)


@pytest.mark.parametrize(("pp", "dp", "tp", "ranks"), [(8, 64, 8, 4096), (35, 16, 8, 4480)])
def test_thousands_of_ranks_are_grouped_in_less_than_a_second(
    pp: int, dp: int, tp: int, ranks: int
) -> None:
    start = time.process_time()
    grid = Grid(pp=pp, dp=dp, tp=tp)
    groups = all_groups(grid)
    places = {grid.coordinates_of(rank) for rank in range(grid.world_size)}
    assert time.process_time() - start < limit(0.5)
    assert grid.world_size == len(places) == ranks
    assert [len(each) for each in groups] == [dp * tp, pp * tp, pp * dp * tp, pp * dp]


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_without_ranks_is_refused_by_name(axis: Axis) -> None:
    with pytest.raises(TopologyError, match=f"at least 1 rank, but {axis} is 0"):
        Grid(**{**dict.fromkeys(AXES, 2), axis: 0})


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_beyond_the_world_is_refused_with_the_range(rank: int) -> None:
    with pytest.raises(TopologyError, match=rf"rank {rank} does not exist: .* from 0 to 7"):
        Grid(pp=2, dp=2, tp=2).coordinates_of(rank)


@pytest.mark.parametrize(
    ("place", "axis"),
    [((2, 0, 0, 0), "pp"), ((0, -1, 0, 0), "dp"), ((0, 0, 1, 0), "cp"), ((0, 0, 0, 9), "tp")],
)
def test_coordinates_beyond_an_axis_are_refused_by_its_name(
    place: tuple[int, int, int, int], axis: str
) -> None:
    with pytest.raises(TopologyError, match=f"{axis} index"):
        Grid(pp=2, dp=2, tp=2).rank_of(Coordinates(*place))


def test_rank_arithmetic_does_not_load_torch() -> None:
    code = (
        "import sys, megaspeed.topology.grid, megaspeed.topology.launch; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

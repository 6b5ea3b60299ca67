"""Rank arithmetic: the order of the ranks. The groups of every axis partition the world."""

import doctest
import itertools
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

"""The placement of ranks on nodes, for small grids that are drawn by hand."""

from typing import get_args

from megaspeed.planning.costs.placement import AxisPlacement, Placement
from megaspeed.planning.costs.traffic import TrafficAxis
from megaspeed.topology.grid import AXES, Grid


def axis_of(pp: int, dp: int, tp: int, gpus_per_node: int, axis: TrafficAxis) -> AxisPlacement:
    return Placement(Grid(pp, dp, tp), gpus_per_node).along(axis)


def test_the_example_of_the_docstring() -> None:
    """pp 2 x dp 4 x tp 4 on nodes of 8: dp 0, 4 | 8, 12 and pp 0..7 | 16..23."""
    ranks = Placement(Grid(2, 4, 4), 8)
    assert ranks.nodes == 4
    tp, dp, pp = (axis_of(2, 4, 4, 8, axis) for axis in ("tp", "dp", "pp"))
    assert (tp.groups[0], tp.most_nodes) == ([0, 1, 2, 3], 1)
    assert (dp.groups[0], dp.most_nodes) == ([0, 4, 8, 12], 2)
    assert (pp.groups[0], pp.most_nodes) == ([0, 16], 2)
    # These are the hops of the rings 0 4 8 12, and of the world's 4 nodes. Each line 0 16 is one
    # hop.
    parts: dict[TrafficAxis, float] = {"tp": 0.0, "dp": 2 / 4, "pp": 1.0, "world": 4 / 32}
    assert {axis: ranks.along(axis).between_nodes for axis in parts} == parts


def test_everything_within_one_node() -> None:
    ranks = Placement(Grid(2, 2, 2), 8)
    assert ranks.nodes == 1
    assert {ranks.along(axis).between_nodes for axis in get_args(TrafficAxis)} == {0.0}
    assert {ranks.along(axis).most_nodes for axis in AXES} == {1}


def test_a_tensor_group_that_does_not_divide_the_node_crosses_in_part() -> None:
    """Groups of 3 on nodes of 4: 0 1 2 | 3 4 5 | 6 7 8 | 9 10 11. The second and the
    third cross.
    """
    tp = axis_of(1, 4, 3, 4, "tp")
    assert (len(tp.groups), tp.most_nodes) == (4, 2)
    assert tp.between_nodes == 4 / 12


def test_a_node_that_is_filled_in_part_counts() -> None:
    ranks = Placement(Grid(1, 5, 2), 4)
    assert ranks.nodes == 3
    dp = axis_of(1, 5, 2, 4, "dp")
    assert (dp.groups[0], dp.most_nodes) == ([0, 2, 4, 6, 8], 3)


def test_pipeline_stages_can_share_a_node() -> None:
    """pp 4 x dp 1 x tp 2 on nodes of 4: pipeline stages 0, 1 | 2, 3."""
    pp = axis_of(4, 1, 2, 4, "pp")
    assert pp.groups == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert pp.most_nodes == 2


def test_530b_keeps_tensor_groups_within_a_node_and_lists_no_more_than_first_groups() -> None:
    ranks = Placement(Grid(35, 16, 8), 8)
    assert ranks.nodes == 560
    assert ranks.along("tp").between_nodes == 0.0
    assert ranks.along("dp").between_nodes == ranks.along("pp").between_nodes == 1.0
    figures = ranks.as_json()["axes"]
    assert figures["tp"]["first_group"] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert figures["dp"]["first_group"] == list(range(0, 128, 8))
    assert figures["pp"]["first_group"] == list(range(0, 4480, 128))
    assert [figures[axis]["groups"] for axis in ("tp", "dp", "pp")] == [560, 280, 128]

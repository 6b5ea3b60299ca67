"""Which axis stays within a node and which crosses nodes.

Launchers count ranks node by node: with k GPUs a node, rank r stands on node r // k. With tp
innermost and pp outermost (``topology.grid``), pp 2 x dp 4 x tp 4 on nodes of 8 GPUs is

    node 0   ranks  0..7     tp [0 1 2 3]       within a node
    node 1   ranks  8..15    dp [0 4 8 12]      2 nodes
    node 2   ranks 16..23    pp [0 16]          2 nodes
    node 3   ranks 24..31

Between the GPUs of a node data moves several times as fast as between nodes, so the axis that sends
most should stay within one.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from megaspeed.topology.grid import AXES, Axis, Grid


@dataclass(frozen=True, kw_only=True)
class AxisMap:
    """Where the groups of one axis stand.

    Attributes:
        axis: pp, dp or tp.
        size: ranks of each group.
        stride: how far apart two neighbours of a group are, in ranks.
        first_group: the ranks of the group that rank 0 is in.
        groups: how many groups the axis has.
        groups_across_nodes: how many of them have ranks on more than one node.
        most_nodes: nodes that the widest of them touches.
    """

    axis: Axis
    size: int
    stride: int
    first_group: tuple[int, ...]
    groups: int
    groups_across_nodes: int
    most_nodes: int

    @property
    def crosses_nodes(self) -> bool:
        """Whether any group of the axis sends from one node to another."""
        return self.groups_across_nodes > 0


@dataclass(frozen=True, kw_only=True)
class RankMap:
    """All ranks of a grid on nodes of equal size; the last node may be filled in part."""

    grid: Grid
    gpus_per_node: int
    axes: tuple[AxisMap, ...]

    @property
    def nodes(self) -> int:
        """Nodes that have at least one rank."""
        return math.ceil(self.grid.world_size / self.gpus_per_node)

    @property
    def axes_across_nodes(self) -> frozenset[str]:
        """The axes whose traffic goes over the network, "world" among them."""
        crossing = {axis.axis for axis in self.axes if axis.crosses_nodes}
        return frozenset({*crossing, "world"} if self.nodes > 1 else ())

    def as_json(self) -> dict[str, Any]:
        """Numbers of the map, without listing every rank."""
        return {
            "nodes": self.nodes,
            "gpus_per_node": self.gpus_per_node,
            "axes": {
                axis.axis: {
                    "size": axis.size,
                    "stride": axis.stride,
                    "first_group": list(axis.first_group),
                    "groups": axis.groups,
                    "groups_across_nodes": axis.groups_across_nodes,
                    "most_nodes": axis.most_nodes,
                }
                for axis in self.axes
            },
        }


@cache
def map_ranks(grid: Grid, gpus_per_node: int) -> RankMap:
    """Where each axis of the grid stands on nodes of ``gpus_per_node`` GPUs."""
    assert gpus_per_node >= 1
    axes = tuple(_map_axis(grid, axis, gpus_per_node) for axis in AXES)
    return RankMap(grid=grid, gpus_per_node=gpus_per_node, axes=axes)


def _map_axis(grid: Grid, axis: Axis, gpus_per_node: int) -> AxisMap:
    groups = grid.groups_along(axis)
    nodes = [len({rank // gpus_per_node for rank in group}) for group in groups]
    first = groups[0]
    return AxisMap(
        axis=axis,
        size=len(first),
        stride=first[1] - first[0] if len(first) > 1 else 1,
        first_group=tuple(first),
        groups=len(groups),
        groups_across_nodes=sum(count > 1 for count in nodes),
        most_nodes=max(nodes),
    )

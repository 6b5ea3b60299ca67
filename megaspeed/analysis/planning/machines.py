"""The placement of ranks on nodes.

Launchers count ranks node by node, so with k GPUs a node, rank r is on node r // k.
tp is innermost and pp outermost (``topology.grid``). pp 2 x dp 4 x tp 4 on nodes of 8 GPUs is

    node 0   ranks  0..7     tp [0 1 2 3]       within a node
    node 1   ranks  8..15    dp [0 4 8 12]      2 nodes
    node 2   ranks 16..23    pp [0 16]          2 nodes
    node 3   ranks 24..31

GPUs of one node exchange data several times as fast as GPUs of different nodes, so the axis that
sends most should stay within a node.
"""

import math
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from megaspeed.topology.grid import AXES, Axis, Grid

GPUS_PER_NODE = 8
"""The default, which DGX and HGX machines have."""


@dataclass(frozen=True, kw_only=True)
class AxisMap:
    """How the groups of one axis are placed on the nodes."""

    axis: Axis  # pp, dp or tp
    size: int  # ranks of each group
    stride: int  # distance in ranks between two neighbours of a group
    first_group: tuple[int, ...]  # the ranks of the group that rank 0 is in
    groups: int  # number of groups
    groups_across_nodes: int  # number of groups with ranks on more than one node
    most_nodes: int  # the largest number of nodes on which one group has ranks

    @property
    def crosses_nodes(self) -> bool:
        """Whether any group of the axis sends from one node to another."""
        return self.groups_across_nodes > 0


@dataclass(frozen=True, kw_only=True)
class RankMap:
    """All ranks of a grid on nodes of equal size. The last node may have unused GPUs."""

    grid: Grid
    gpus_per_node: int
    axes: tuple[AxisMap, ...]

    @property
    def nodes(self) -> int:
        """Nodes that have at least one rank."""
        return math.ceil(self.grid.world_size / self.gpus_per_node)

    @property
    def axes_across_nodes(self) -> frozenset[str]:
        """The axes whose traffic goes over the network, and "world" if there are several nodes."""
        crossing = {axis.axis for axis in self.axes if axis.crosses_nodes}
        return frozenset({*crossing, "world"} if self.nodes > 1 else ())

    def as_json(self) -> dict[str, Any]:
        """The numbers of the map as JSON values, without a list of all ranks."""
        axes = {}
        for each in self.axes:
            figures = {**asdict(each), "first_group": list(each.first_group)}
            axes[figures.pop("axis")] = figures
        return {"nodes": self.nodes, "gpus_per_node": self.gpus_per_node, "axes": axes}


@cache
def map_ranks(grid: Grid, gpus_per_node: int) -> RankMap:
    """Places the ranks of a grid on nodes of ``gpus_per_node`` GPUs."""
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

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
from itertools import chain, pairwise
from typing import Any

from megaspeed.planning.costs.traffic import TrafficAxis
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
    # The part of its messages that go from one node to another, on average over its ranks. The
    # ranks of a group form a ring; pipeline stages form a line.
    between_nodes: float

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

    def between_nodes(self, axis: TrafficAxis) -> float:
        """The part of an axis's messages that go from one node to another."""
        if axis == "world":  # one ring over all nodes
            return self.nodes / self.grid.world_size if self.nodes > 1 else 0.0
        return next(each.between_nodes for each in self.axes if each.axis == axis)

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
    hops = [list(pairwise(group if axis == "pp" else [*group, group[0]])) for group in groups]
    crossing = sum(a // gpus_per_node != b // gpus_per_node for a, b in chain(*hops))
    return AxisMap(
        axis=axis,
        size=len(first),
        stride=first[1] - first[0] if len(first) > 1 else 1,
        first_group=tuple(first),
        groups=len(groups),
        groups_across_nodes=sum(count > 1 for count in nodes),
        most_nodes=max(nodes),
        between_nodes=crossing / max(1, sum(map(len, hops))),
    )

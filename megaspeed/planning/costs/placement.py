"""Where ranks sit: how the groups of each axis are placed on nodes.

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
from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, pairwise
from typing import Any

from megaspeed.files.json_values import picked
from megaspeed.planning.costs.traffic import TrafficAxis
from megaspeed.topology.grid import AXES, Axis, Grid

GPUS_PER_NODE = 8
"""The default, which DGX and HGX machines have."""


@dataclass(frozen=True)
class AxisPlacement:
    """The groups of one axis on the nodes. The axis "world" is one group of all ranks."""

    axis: TrafficAxis
    groups: list[list[int]]
    gpus_per_node: int

    @property
    def size(self) -> int:
        """Ranks of each group."""
        return len(self.groups[0])

    @cached_property
    def _ranks_of_nodes(self) -> list[list[int]]:
        """For each group, how many of its ranks each of its nodes has."""
        return [
            list(Counter(rank // self.gpus_per_node for rank in group).values())
            for group in self.groups
        ]

    @cached_property
    def most_nodes(self) -> int:
        """The largest number of nodes on which one group has ranks."""
        return max(map(len, self._ranks_of_nodes))

    @cached_property
    def most_together(self) -> int:
        """The most ranks that a group has on one node."""
        return max(map(max, self._ranks_of_nodes))

    @cached_property
    def fewest_together(self) -> int:
        """The fewest ranks that one of the groups on ``most_nodes`` has on one of its nodes."""
        return min(min(nodes) for nodes in self._ranks_of_nodes if len(nodes) == self.most_nodes)

    @cached_property
    def between_nodes(self) -> float:
        """The part of its messages that go from one node to another, on average over its ranks.

        The ranks of a group form a ring; pipeline stages form a line.
        """
        is_line = self.axis == "pp"
        rings = [group if is_line else [*group, group[0]] for group in self.groups]
        hops = list(chain.from_iterable(map(pairwise, rings)))
        crossing = sum(a // self.gpus_per_node != b // self.gpus_per_node for a, b in hops)
        return crossing / max(1, len(hops))

    def as_json(self) -> dict[str, Any]:
        """Return the numbers, without a list of all ranks."""
        figures = picked(self, "size", "most_nodes", "between_nodes")
        return {**figures, "first_group": self.groups[0], "groups": len(self.groups)}


@dataclass(frozen=True)
class Placement:
    """All ranks of a grid on nodes of equal size. The last node may have unused GPUs."""

    grid: Grid
    gpus_per_node: int

    @property
    def nodes(self) -> int:
        """Nodes that have at least one rank."""
        return math.ceil(self.grid.world_size / self.gpus_per_node)

    def along(self, axis: TrafficAxis) -> AxisPlacement:
        return _along(self.grid, axis, self.gpus_per_node)

    def as_json(self) -> dict[str, Any]:
        names: list[Axis] = [*AXES, *(("shard", "replica") if self.grid.is_hybrid else ())]
        names += ["ep"] if self.grid.ep is not None else []
        axes = {axis: self.along(axis).as_json() for axis in names}
        return {"nodes": self.nodes, "gpus_per_node": self.gpus_per_node, "axes": axes}


@cache
def _along(grid: Grid, axis: TrafficAxis, gpus_per_node: int) -> AxisPlacement:
    groups = [[*range(grid.world_size)]] if axis == "world" else grid.groups_along(axis)
    return AxisPlacement(axis, groups, gpus_per_node)

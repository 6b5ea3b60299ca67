"""The machines of a run: accelerators by name, and the placement of ranks on nodes.

    usable_bytes = USABLE_FRACTION x memory_bytes

The number in a name is the vendor's ("80 GB"). It is the size of the memory chips in GiB. Error
correction and firmware use a part of it. ``memory_bytes`` is the rest, which the driver reports
(``nvidia-smi`` in MiB, ``rocm-smi`` in bytes). An "80 GB" H100 has 81,559 MiB = 79.6 GiB =
85.5 GB. A "48 GB" L40S, whose error correction is in the memory itself, has 46,068 MiB. If driver
releases differ, the table has the smaller total.

Sources: the vendors' data sheets (NVIDIA H100, H200, GH200, DGX B200, A100, V100, L40S, A10, L4,
T4, GeForce RTX; AMD Instinct MI300X) for the names, and the driver's report for the totals.

The rank map: launchers count ranks node by node, so with k GPUs a node, rank r is on node r // k.
tp is innermost and pp outermost (``topology.grid``). pp 2 x dp 4 x tp 4 on nodes of 8 GPUs is

    node 0   ranks  0..7     tp [0 1 2 3]       within a node
    node 1   ranks  8..15    dp [0 4 8 12]      2 nodes
    node 2   ranks 16..23    pp [0 16]          2 nodes
    node 3   ranks 24..31

GPUs of one node exchange data several times as fast as GPUs of different nodes, so the axis that
sends most should stay within a node.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from megaspeed.topology.grid import AXES, Axis, Grid

USABLE_FRACTION = 0.92
"""The fraction of a device's memory that a plan may use.

The rest is for memory that is not predicted: the CUDA context and loaded kernels (about
0.5 GiB), workspaces of the matrix library, NCCL's buffers (some hundred MiB for each communicator:
pp, dp, tp and the world), and holes between blocks of torch's caching allocator (a few percent).
"""

GPUS_PER_NODE = 8
"""The default, which DGX and HGX machines have."""


class DeviceError(ValueError):
    """The table has no such accelerator."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of accelerator."""

    name: str  # as on the command line
    memory_bytes: int  # total of one device, as its driver reports it

    @property
    def usable_bytes(self) -> int:
        """Memory that the tensors of a run may use."""
        return int(USABLE_FRACTION * self.memory_bytes)


_MEMORY_MIB = {
    "b200-180gb": 183_359,
    "gh200-96gb": 97_871,
    "h200-141gb": 143_771,
    "h100-80gb": 81_559,
    "h100-94gb": 95_830,
    "a100-40gb": 40_536,
    "a100-80gb": 81_251,
    "v100-16gb": 16_160,
    "v100-32gb": 32_510,
    "l40s-48gb": 46_068,
    "a10-24gb": 23_028,
    "l4-24gb": 23_034,
    "t4-16gb": 15_360,
    "rtx-5090-32gb": 32_607,
    "rtx-4090-24gb": 24_564,
    "rtx-3090-24gb": 24_576,
    "mi300x-192gb": 196_592,
}

DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        name: Device(name=name, memory_bytes=mebibytes * 2**20)
        for name, mebibytes in _MEMORY_MIB.items()
    }
)


def device_named(name: str) -> Device:
    """The accelerator of that name. Case is ignored.

    Raises:
        DeviceError: with the nearest name and all names.
    """
    device = DEVICES.get(name.lower())
    if device is None:
        close = difflib.get_close_matches(name.lower(), DEVICES, n=1, cutoff=0.3)
        nearest = f"the nearest is {close[0]}; " if close else ""
        raise DeviceError(
            f"there is no device called {name!r}; {nearest}the names are {', '.join(DEVICES)}"
        )
    return device


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

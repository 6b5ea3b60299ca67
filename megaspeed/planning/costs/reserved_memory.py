"""Memory of a GPU besides the tensors of the run, and whether both together fit.

    nvidia-smi = predicted tensors + context + NCCL + workspace + fragmentation

    fits           the upper end of the interval is at most the memory that the driver reports
    tight          only the lower end is, which has no fragmentation
    does not fit   otherwise

NCCL's sizes are from its source code (release 2.30, src/init.cc, src/transport, src/graph). Only
the number of channels is measured, because NCCL finds it by a search of the machine's topology.

Not included are other processes on the GPU, profilers, NCCL's plug-ins, and memory of a second
library such as a fused optimizer. Frameworks that create more groups, or that do not use
expandable segments, reserve several GB more: each group within a node of A100 takes 0.5 to 0.8 GiB.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from megaspeed.config.resolve import Run
from megaspeed.planning.costs.placement import AxisPlacement, Placement
from megaspeed.planning.costs.traffic import TrafficAxis
from megaspeed.topology.devices import Device
from megaspeed.topology.grid import Axis, Grid

Verdict = Literal["fits", "tight", "does not fit"]

_MIB = 2**20

CONTEXT = (426 + 256) * _MIB
"""The driver's context, and the code of loaded kernels. An empty context of torch 2.10 with CUDA 13
takes 426 MiB (unsloth-zoo, pull request 1053: nvidia-smi on an RTX 6000 Ada), of torch 2.1 about
400 MB (pytorch, issue 109888). Kernels are loaded when they are first used; the 256 MiB for those
of a training are an assumption."""

FRAGMENTATION = 0.04
"""Holes in torch's caching allocator, as a fraction of the peak. An assumption for expandable
segments, which ``topology.process_settings`` turns on. Without them, up to 43 % of the memory was
lost (Huang et al. 2025, arXiv 2507.16274, abstract)."""

UNEXPECTED = 0.33
"""At the upper end of the interval, tensors and fragmentation need this fraction more than the
predicted tensors. Nine of ten published runs need at most this, if all sources have equal weight
(``scripts/benchmark_plan.py``). These are runs of other frameworks. On a CPU, megaspeed's own
tensors are within 0.04 MiB of the prediction."""

_WORKSPACES = 2
"""cuBLAS has one workspace for each thread and stream with products: the main thread's forward, and
autograd's thread for the backward. torch's allocator provides them, but they are in no tensor."""

_RING = (2 + 10) * _MIB
"""A connection of one channel with the ranks before and after it. The receiver has buffers of three
protocols: 4 MiB (Simple), 4.69 MiB (LL128) and 0.5 MiB (LL). The sender has flags. On A100, the
sender has the first of these buffers. Each allocation is rounded up to 2 MiB (computeBuffSizes in
src/init.cc, p2pSendSetup and p2pRecvSetup in src/transport/p2p.cc)."""

_RING_TO_A_NODE = 8 * _MIB
"""Additional bytes of a connection to another node: the sender also has a buffer of 8.7 MiB
(sendProxyConnect in src/transport/net.cc)."""

_TREE_TO_A_NODE = 3 * (10 + 10) * _MIB - _RING
"""Additional bytes of a tree, which has connections to a parent and two children on other nodes
instead of a connection to a neighbour."""

_SHARED_STEPS = 16
_CHUNK_WITHIN_NODE, _CHUNK_BETWEEN_NODES = 2**19, 2**17
"""All channels of a communicator share a buffer for sends and receives. It has 16 chunks for each
channel, of 512 KiB over NVLink and 128 KiB otherwise (sharedNetBuffersInit in
src/transport/net.cc). A communicator of one rank has it too (NVIDIA/nccl, issue 2363)."""

_NVLS_CHANNELS = {"h100": 16, "h200": 16, "h800": 16, "gh200": 16, "b200": 24, "gb200": 24}
_NVLS_BYTES = 2 * 8 * 128 * 1024
"""Reductions in the switch (NVLS): two buffers of 8 x 128 KiB for each channel and each rank of the
node (ncclNvlsBufferSetup in src/transport/nvls.cc)."""


@dataclass(frozen=True, kw_only=True)
class ReservedMemory:
    """Bytes of one GPU beyond the tensors of the run."""

    context: int  # of CUDA, with loaded kernels
    nccl: int  # buffers of all communicators
    workspace: int  # of the library for matrix products
    fragmentation: int  # an allowance
    unexpected: int = 0  # from the total to the upper end of the interval

    @property
    def certain(self) -> int:
        """What is allocated in any case: all but the allowance for fragmentation."""
        return self.context + self.nccl + self.workspace

    @property
    def total(self) -> int:
        """The predicted sum of all parts."""
        return self.certain + self.fragmentation

    @property
    def most(self) -> int:
        """The upper end of the interval. The lower end is ``certain``."""
        return self.total + self.unexpected


def reserved_memory(
    run: Run, device: Device, gpus_per_node: int, peak_bytes: int
) -> ReservedMemory:
    """Return what a rank reserves beside tensors of ``peak_bytes``. On a CPU, nothing."""
    if device.name == "cpu":
        return ReservedMemory(context=0, nccl=0, workspace=0, fragmentation=0)
    return ReservedMemory(
        context=CONTEXT,
        nccl=nccl_bytes(run.grid, device, gpus_per_node),
        workspace=_WORKSPACES * _workspace_bytes(device),
        fragmentation=int(FRAGMENTATION * peak_bytes),
        unexpected=int(UNEXPECTED * peak_bytes) - int(FRAGMENTATION * peak_bytes),
    )


def verdict(peak_bytes: int, reserved: ReservedMemory, device: Device) -> Verdict:
    """Return whether tensors of ``peak_bytes`` and the reserved memory fit the device."""
    if peak_bytes + reserved.most <= device.memory_bytes:
        return "fits"
    return "tight" if peak_bytes + reserved.certain <= device.memory_bytes else "does not fit"


@lru_cache(maxsize=1024)
def nccl_bytes(grid: Grid, device: Device, gpus_per_node: int) -> int:
    """Return the bytes of all NCCL communicators of a rank (``topology.context`` lists them).

    The shards have a communicator even if there is one. An axis of all ranks uses the world's
    communicator, except those of the pipeline and of the expert axis. If the copies of experts are
    on other ranks than those of other parameters, both kinds of copies have communicators.
    """
    placement = Placement(grid, gpus_per_node)
    axes: list[TrafficAxis] = ["world"]
    axes += ["tp"] if 1 < grid.tp < grid.world_size else []
    axes += ["shard"] if grid.shard < grid.world_size else []
    axes += ["replica"] if 1 < grid.replicate < grid.world_size else []
    axes += ["pp"] if grid.pp > 1 else []
    axes += ["ep"] if (grid.ep or 1) > 1 else []
    if grid.has_expert_axes:
        others: tuple[Axis, ...] = ("expert_shard", "expert_replica")
        is_shared = grid.tp < grid.world_size  # otherwise, tensor ranks have the world's
        sizes = {axis: grid.size_along(axis) for axis in others}
        axes += [a for a, n in sizes.items() if n > 1 and (n < grid.world_size or not is_shared)]
        axes += ["expert_shard"] if sizes["expert_shard"] == 1 < grid.shard else []
    placed = [placement.along(axis) for axis in axes]
    total = sum(communicator_bytes(each.size, each.most_together, device) for each in placed)
    return total + _sends_of_pipeline(placement.along("pp"), device)


def communicator_bytes(ranks: int, ranks_of_node: int, device: Device) -> int:
    """Return the buffers of one communicator that has used its rings, its trees and NVLS.

    Args:
        ranks: number of ranks of the group.
        ranks_of_node: number of them on one node.

    On each channel, a rank of a ring has one connection to the next rank and one to the one before.
    A tree within a node is a chain, and adds the opposite direction if there are more than two
    ranks. A ring or a tree leaves a node at one of its ranks.

    Measured on 4 A100 with NVLink: 544 MiB for 2 ranks, 688 MiB for 4 (NVIDIA/nccl, issue 964).
    For 2 ranks, this function returns 256 + 24 x 12 = 544 MiB. For 4 ranks, it returns the 832 MiB
    of a rank within the chain. The measured rank is at the end of the chain, and has half of the
    tree: 688 MiB.
    """
    channels = _channels(ranks, ranks_of_node, device)
    shared = _shared_bytes(channels, ranks == ranks_of_node, device)
    if ranks == 1:
        return shared
    each = _RING * (2 if ranks > 2 else 1)
    if ranks > ranks_of_node:
        each += (_RING_TO_A_NODE + _TREE_TO_A_NODE * (ranks > 2)) // ranks_of_node
    nvls = 0
    if ranks_of_node > 1 and device.link_bandwidth >= 200:
        nvls = _NVLS_CHANNELS.get(_generation(device), 0) * _NVLS_BYTES * ranks_of_node
    return shared + channels * each + nvls


def _sends_of_pipeline(pp: AxisPlacement, device: Device) -> int:
    """Return the bytes of the connections for sends.

    Within a node, all channels are used, each with a connection to each of at most two neighbours.
    Between nodes, the channels share a second buffer of the communicator.
    """
    if pp.size == 1:
        return 0
    together = pp.most_together
    channels = _channels(pp.size, together, device)
    within = min(2, together - 1) * _power_of_two(channels) * _RING
    return within + _shared_bytes(channels, pp.size == together, device) * (pp.size > together)


def _channels(ranks: int, ranks_of_node: int, device: Device) -> int:
    """Return the channels of collectives, as NCCL prints them with NCCL_DEBUG=INFO.

    24 on A100 and H100 within a node, 16 on several nodes with 8 GPUs each, 8 on several nodes with
    2 GPUs each (NVIDIA/nccl, issues 1189 and 1538). The others are assumptions: 24 on MI300X, 12 on
    V100, and 4 without NVLink or with one GPU a node.
    """
    if ranks > ranks_of_node:
        return min(16, 4 * ranks_of_node)
    return 24 if device.link_bandwidth >= 200 else 12 if device.link_bandwidth >= 100 else 4


def _shared_bytes(channels: int, within_node: bool, device: Device) -> int:
    over_links = within_node and device.link_bandwidth >= 100
    chunk = _CHUNK_WITHIN_NODE if over_links else _CHUNK_BETWEEN_NODES
    return _power_of_two(channels) * _SHARED_STEPS * chunk


def _power_of_two(channels: int) -> int:
    """Return the channels of sends (ncclTopoComputeP2pChannels in src/graph/paths.cc)."""
    return 1 << (channels - 1).bit_length()


def _generation(device: Device) -> str:
    return device.name.split("-")[0]


def _workspace_bytes(device: Device) -> int:
    """Return the bytes of a workspace of cuBLAS, or of hipBLAS on MI300X.

    (pytorch, aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize.)
    """
    generation = _generation(device)
    if generation == "mi300x":
        return 128 * _MIB
    is_hopper = generation in ("h100", "h200", "h800", "gh200")
    return 32 * _MIB if is_hopper else 8 * _MIB + 128 * 1024

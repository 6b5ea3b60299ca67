"""Creating the process groups of a grid, and naming the group that cannot be created.

    world        all ranks                       init_process_group
    tp, dp, pp   all groups along that axis      one call for each axis
    checkpoint   all ranks, over gloo            one call

Every rank makes these calls, in this order. On NCCL the groups along an axis are one
``split_group`` of the world's communicator. (``new_group`` would be a world-wide call for each
group: thousands of them at 4,096 ranks.) gloo cannot split, but there only the members of a group
need to call ``new_group``, so it is one call for each axis too.

An axis of one rank sends nothing and has no group, except the data axis, because DeepSpeed
partitions over it. An axis that spans all ranks uses the world's group, because a communicator
costs GPU memory, and one thread issues all its collectives in order. A pipeline axis that
spans all ranks still has its own group, so that point-to-point messages share it with no other
traffic.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from megaspeed.topology.grid import Axis, Grid
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.topology.meeting import GroupError

_DISKS_ARE_SLOWER = 4  # how many times longer a rank may wait for another rank's disk
_SECONDS_TO_ABORT = 5.0
_ORDER: tuple[Axis, ...] = ("tp", "dp", "pp")


def start_default_group(
    store: dist.Store, launch: LaunchEnvironment, device: torch.device, timeout: timedelta
) -> dist.ProcessGroup:
    """Start torch.distributed (NCCL on a GPU, gloo on a CPU); return the group of all ranks."""
    on_gpu = device.type == "cuda"
    with _naming_the_group("world", range(launch.world_size), launch.rank):
        dist.init_process_group(
            backend="nccl" if on_gpu else "gloo",
            store=_unused_names(store, launch.rank),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
            # A bound device makes NCCL connect now, which splitting needs.
            device_id=device if on_gpu else None,
        )
    group = dist.group.WORLD
    assert group is not None, "init_process_group has succeeded"
    return group


def create_groups(
    grid: Grid,
    rank: int,
    world_group: dist.ProcessGroup,
    device: torch.device,
    timeout: timedelta,
) -> dict[str, dist.ProcessGroup]:
    """Create the groups of `rank`; return them by name, in the order of creation.

    See the module's docstring for the axes without a group. All ranks call this together.
    """
    mine = {"world": world_group}
    for axis in _ORDER:
        size = grid.size_along(axis)
        if size == 1 and axis != "dp":
            continue
        if size == grid.world_size and axis != "pp":
            mine[axis] = world_group
        else:
            mine[axis] = own_group(axis, grid.groups_along(axis), rank, device, timeout)
    # Checkpoints are written from host memory by a separate thread, so they do not use NCCL, and
    # their collectives do not mix with those of training. Ranks mostly wait here for a disk.
    patience = timeout * _DISKS_ARE_SLOWER
    with _naming_the_group("checkpoint", range(grid.world_size), rank):
        checkpoint: dist.ProcessGroup = dist.new_group(
            backend="gloo", timeout=patience, group_desc="checkpoint"
        )
    return {**mine, "checkpoint": checkpoint}


def own_group(
    name: str, groups: list[list[int]], rank: int, device: torch.device, timeout: timedelta
) -> dist.ProcessGroup:
    """Create `groups`, which hold every rank once; return the one of `rank`.

    All ranks call this together.
    """
    own = next(ranks for ranks in groups if rank in ranks)
    with _naming_the_group(name, own, rank):
        if device.type == "cuda":
            group = dist.split_group(split_ranks=groups, timeout=timeout, group_desc=name)
        else:
            group = dist.new_group(
                own, timeout=timeout, group_desc=name, use_local_synchronization=True
            )
    assert group is not None, "every rank is in one of the groups"
    return group


def shake_hands(name: str, group: dist.ProcessGroup, rank: int, device: torch.device) -> None:
    """Sum a 1 over the group, so an unreachable rank is named now and not during training."""
    if group.size() == 1:
        return
    ranks = dist.get_process_group_ranks(group)
    with _naming_the_group(name, ranks, rank):
        answers = torch.ones(1, device=device)
        dist.all_reduce(answers, group=group)
        if answers.item() != len(ranks):
            raise RuntimeError(f"{answers.item():.0f} ranks answered instead of {len(ranks)}")


def stop() -> None:
    """Destroy every group, if there are any. Waits for pending messages."""
    if dist.is_initialized():
        dist.destroy_process_group()


def abandon() -> None:
    """Abort every group, if there are any, after an exception. Waits for no other rank.

    ``destroy_process_group`` waits for NCCL's kernels, and they wait for ranks that this rank will
    never answer. Aborting ends the kernels, and should take milliseconds. This function waits for
    ``_SECONDS_TO_ABORT`` at most; after that, aborting continues in the background.
    """
    if dist.is_initialized():
        aborting = Thread(target=_abort_process_group, name="abort", daemon=True)
        aborting.start()
        aborting.join(_SECONDS_TO_ABORT)


def _unused_names(store: dist.Store, rank: int) -> dist.Store:
    """The store under a new prefix. The store may outlive a context, and a later context must not
    find the addresses of an earlier one.
    """
    generation = store.add(f"contexts of rank {rank}", 1)
    return dist.PrefixStore(f"context {generation}", store)


@contextmanager
def _naming_the_group(name: str, ranks: Sequence[int], rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's own DistError is one
        members = ", ".join(map(str, ranks)) if len(ranks) <= 16 else f"{ranks[0]} to {ranks[-1]}"
        raise GroupError(
            f"rank {rank} could not join the {name} group (ranks {members}). Every one of these "
            "ranks must be running and reach the others: look for the first error in their logs, "
            "then at MASTER_ADDR, MASTER_PORT and the firewall between their machines. "
            f"torch says: {error}"
        ) from error

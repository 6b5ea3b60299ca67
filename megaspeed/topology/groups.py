"""Creating the process groups of a grid, and naming the group that cannot be created.

torch's rule is that all ranks create all groups, also those they are no member of, in the same
order. Here that order is fixed: tp, dp, model, tied, self, pp, checkpoint, and within each
the order in which `Grid` lists the groups.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from megaspeed.topology.grid import Grid
from megaspeed.topology.launch import LaunchEnvironment

_DISKS_ARE_SLOWER = 4  # than networks: how much longer a rank may wait for another's


class GroupError(RuntimeError):
    """A process group could not be set up: some rank of it did not come."""


def start_default_group(
    launch: LaunchEnvironment, device: torch.device, timeout: timedelta
) -> dist.ProcessGroup:
    """Start torch.distributed, NCCL on a GPU and gloo without; return the group of all ranks."""
    on_gpu = device.type == "cuda"
    with _naming_the_group("world", range(launch.world_size), launch.rank):
        dist.init_process_group(
            backend="nccl" if on_gpu else "gloo",
            store=_meeting_point(launch, timeout),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
            device_id=device if on_gpu else None,
        )
    group = dist.group.WORLD
    assert group is not None, "init_process_group has succeeded"
    return group


def create_groups(
    grid: Grid, rank: int, world_group: dist.ProcessGroup, timeout: timedelta
) -> dict[str, dist.ProcessGroup]:
    """Create every group of every rank; return those of `rank` by name, in the order of creation.

    Equal sets of ranks share one communicator, of which each costs a GPU memory: the collectives of
    one thread cannot overtake each other. Point-to-point traffic shares with nobody.
    """
    collective = {
        "tp": grid.groups_along("tp"),
        "dp": grid.groups_along("dp"),
        "model": grid.model_groups(),
        "tied": _tied_or_alone(grid),
        "self": [[one] for one in range(grid.world_size)],
    }
    known = {tuple(range(grid.world_size)): world_group}
    mine = {"world": world_group}
    for name, groups in collective.items():
        for ranks in groups:
            key = tuple(ranks)
            if key not in known:
                known[key] = _new_group(name, ranks, rank, timeout)
            if rank in ranks:
                mine[name] = known[key]
    for ranks in grid.groups_along("pp"):
        alone = len(ranks) == 1  # and then nothing is ever sent
        group = known[tuple(ranks)] if alone else _new_group("pp", ranks, rank, timeout)
        if rank in ranks:
            mine["pp"] = group
    # Checkpoints are written from host memory, by a thread of their own: never over NCCL, and never
    # between the collectives of the training. A rank that waits there mostly waits for a disk.
    everyone = list(range(grid.world_size))
    patience = timeout * _DISKS_ARE_SLOWER
    mine["checkpoint"] = _new_group("checkpoint", everyone, rank, patience, backend="gloo")
    return mine


def shake_hands(name: str, group: dist.ProcessGroup, rank: int, device: torch.device) -> None:
    """Sum a 1 over the group, so that a rank out of reach is named now and not in mid-training."""
    if group.size() == 1:
        return
    ranks = dist.get_process_group_ranks(group)
    with _naming_the_group(name, ranks, rank):
        answers = torch.ones(1, device=device)
        dist.all_reduce(answers, group=group)
        if answers.item() != len(ranks):
            raise RuntimeError(f"{answers.item():.0f} ranks answered instead of {len(ranks)}")


def stop() -> None:
    """Destroy every group, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _meeting_point(launch: LaunchEnvironment, timeout: timedelta) -> dist.Store:
    """Where the ranks find each other's addresses."""
    if launch.world_size == 1:
        return dist.HashStore()  # no port is needed to meet nobody
    # env:// reads MASTER_ADDR and MASTER_PORT, and joins the store that torchrun keeps there.
    store, _, _ = next(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))
    # Such a store outlives a context. A later one must not find the addresses of the earlier.
    generation = store.add(f"contexts of rank {launch.rank}", 1)
    return dist.PrefixStore(f"context {generation}", store)


def _tied_or_alone(grid: Grid) -> list[list[int]]:
    """The tied groups, and each rank of the pipeline stages between on its own."""
    tied = grid.tied_groups()
    in_a_group = {rank for group in tied for rank in group}
    return tied + [[rank] for rank in range(grid.world_size) if rank not in in_a_group]


def _new_group(
    name: str, ranks: list[int], rank: int, timeout: timedelta, *, backend: str | None = None
) -> dist.ProcessGroup:
    with _naming_the_group(name, ranks, rank):
        group: dist.ProcessGroup = dist.new_group(
            ranks, timeout=timeout, backend=backend, group_desc=name
        )
    return group


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

"""ParallelContext: the coordinates of this rank, and its process groups.

Rank 5 of pp 2 x dp 2 x tp 2 (drawn in ``grid.py``) belongs to

    world_group       0 .. 7     all ranks
    tp_group          4 5        shares every matrix of pipeline stage 1
    shard_group       5 7        holds the other partitions of ZeRO, sees other samples
    replica_group     -          holds the same partition (``Grid.replicate``), sees other samples
    cp_group          -          holds the other parts of the same sequences (``Grid.cp``)
    pp_group          1 5        activations forward, gradients back, gradients of tied weights
    checkpoint_group  0 .. 7     all ranks, over gloo, for saves beside the training
    stage_group       4 5 6 7    holds parts of the same matrices (only with Muon)

With experts (``Grid.ep``), it also belongs to

    ep_group              holds all experts of its blocks together
    expert_shard_group    holds the other partitions of the same experts
    expert_replica_group  holds the same partition of the same experts

Code that communicates takes the context as an argument. No other module creates a process group or
keeps one in a global. Every rank creates its groups in this order:

    world        all ranks                       init_process_group
    tp, cp,      all groups along that axis      one call for each axis
    shard,
    replica, pp,
    ep, ...
    checkpoint   all ranks, over gloo            one call

On NCCL the groups along an axis are one ``split_group`` of the world's communicator. (``new_group``
would be a world-wide call for each group: thousands of them at 4,096 ranks.) gloo cannot split, but
there only the members of a group call ``new_group``, so it is one call for each axis too.

An axis of one rank sends nothing and has no group, except the shards, because DeepSpeed partitions
over them. An axis that spans all ranks uses the world's group, because a communicator
costs GPU memory, and one thread issues all its collectives in order. A pipeline axis that spans
all ranks still has its own group, which carries only point-to-point messages. So do a context
and an expert axis, because ZeRO gathers over the same ranks at the same time.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from megaspeed.topology.activity import Activity, Timeline
from megaspeed.topology.gloo_workers import use_one_worker
from megaspeed.topology.grid import Axis, Coordinates, Grid, TopologyError
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.topology.process_settings import (
    allow_open_files,
    compiler_threads,
    gloo_interface,
    ranks_of_a_gpu,
    set_defaults,
)
from megaspeed.topology.store import GroupError, open_store

_DISK_TIMEOUTS = 4  # how many times longer a rank may wait for another rank's disk
_SECONDS_TO_ABORT = 5.0
_ORDER: tuple[Axis, ...] = ("tp", "cp", "shard", "replica", "pp", "ep")
_EXPERT_AXES: tuple[Axis, ...] = ("expert_shard", "expert_replica")
# A group of one rank does not wait for other ranks. But NCCL's timeout starts at the call, and
# kernels that were launched before it may wait for other ranks.
_ONE_RANK_NEVER_WAITS = timedelta(days=1)


def start_default_group(
    store: dist.Store, launch: LaunchEnvironment, device: torch.device, timeout: timedelta
) -> dist.ProcessGroup:
    """Start torch.distributed (NCCL on a GPU, gloo on a CPU); return the group of all ranks."""
    on_gpu = device.type == "cuda"
    with _errors_name_the_group("world", range(launch.world_size), launch.rank):
        # The store may outlive a context. Under a new prefix, a later context does not find the
        # addresses of an earlier one.
        generation = store.add(f"contexts of rank {launch.rank}", 1)
        dist.init_process_group(
            backend="nccl" if on_gpu else "gloo",
            store=dist.PrefixStore(f"context {generation}", store),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
            # With a device, NCCL connects at once. Groups can only be split from a connected one.
            device_id=device if on_gpu else None,
            pg_options=_high_priority(timeout) if on_gpu else None,
        )
    group = dist.group.WORLD
    assert group is not None, "init_process_group has succeeded"
    return group


def _high_priority(timeout: timedelta) -> Any:
    """Options with which NCCL's kernels start before matrix products that have not started yet.

    Otherwise a product that is launched first takes all multiprocessors, and a collective that
    should run beside it waits for its end. Groups that are split from this one have a copy of its
    options (torch 2.13, distributed_c10d.py:5660).
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # torch warns if it differs from that of the group
    return options


def create_groups(
    grid: Grid, rank: int, world_group: dist.ProcessGroup, device: torch.device, timeout: timedelta
) -> dict[str, dist.ProcessGroup]:
    """Create the groups of ``rank``, together with all ranks; return them by name, in order."""
    mine = {"world": world_group}
    shards = ("shard", "expert_shard")
    for axis in (*_ORDER, *(_EXPERT_AXES if grid.has_expert_axes else ())):
        size = grid.size_along(axis)
        if size == 1 and axis not in shards:
            continue
        # ZeRO must not wait for tensor ranks that send over the world's group.
        is_shared = axis in _EXPERT_AXES and mine.get("tp") is world_group
        if size == grid.world_size and axis not in ("pp", "cp", "ep") and not is_shared:
            mine[axis] = world_group
        elif axis == "expert_shard" and size == 1 == grid.shard:
            mine[axis] = mine["shard"]
        else:
            waits = timeout if size > 1 else _ONE_RANK_NEVER_WAITS
            mine[axis] = _own_group(axis, grid.groups_along(axis), rank, device, waits)
    # A separate thread writes checkpoints from host memory, so they do not use NCCL, and their
    # collectives do not mix with those of training. Ranks mostly wait for a disk in them.
    with _errors_name_the_group("checkpoint", range(grid.world_size), rank):
        checkpoint: dist.ProcessGroup = dist.new_group(
            backend="gloo", timeout=timeout * _DISK_TIMEOUTS, group_desc="checkpoint"
        )
    return {**mine, "checkpoint": checkpoint}


def _own_group(
    name: str, groups: list[list[int]], rank: int, device: torch.device, timeout: timedelta
) -> dist.ProcessGroup:
    """Create ``groups``, which hold every rank once, with all ranks; return the one of ``rank``."""
    own = next(ranks for ranks in groups if rank in ranks)
    with _errors_name_the_group(name, own, rank):
        if device.type == "cuda":
            group = dist.split_group(split_ranks=groups, timeout=timeout, group_desc=name)
        else:
            group = dist.new_group(
                own, timeout=timeout, group_desc=name, use_local_synchronization=True
            )
    assert group is not None, "every rank is in one of the groups"
    return group


def check_group(name: str, group: dist.ProcessGroup, rank: int, device: torch.device) -> None:
    """All-reduce a 1 over the group, so an unreachable rank is named now, not during training."""
    if group.size() == 1:
        return
    ranks = dist.get_process_group_ranks(group)
    with _errors_name_the_group(name, ranks, rank):
        answers = torch.ones(1, device=device)
        dist.all_reduce(answers, group=group)
        if answers.item() != len(ranks):
            raise RuntimeError(
                f"an all-reduce of ones returned {answers.item():.0f} instead of {len(ranks)}, the "
                "number of ranks in the group"
            )


def _abort_groups() -> None:
    """Abort all groups after an exception, without waiting for other ranks.

    ``destroy_process_group`` would wait for NCCL's kernels, which wait for other ranks. Aborting
    ends the kernels. It should take milliseconds; after ``_SECONDS_TO_ABORT`` it continues in the
    background.
    """
    if dist.is_initialized():
        aborting = Thread(target=_abort_process_group, name="abort", daemon=True)
        aborting.start()
        aborting.join(_SECONDS_TO_ABORT)


@contextmanager
def _errors_name_the_group(name: str, ranks: Sequence[int], rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's own DistError is one
        members = ", ".join(map(str, ranks)) if len(ranks) <= 16 else f"{ranks[0]} to {ranks[-1]}"
        group = f"{name.replace('_', ' ')} group (ranks {members})"
        raise GroupError(
            f"rank {rank} could not join the {group}. Every one of these "
            "ranks must be running and reach the others: look for the first error in their logs, "
            "then at MASTER_ADDR, MASTER_PORT and the firewall between their machines. "
            f"torch reports: {error}"
        ) from error


@dataclass(frozen=True, kw_only=True)
class ParallelContext:
    """This rank's coordinates, device and process groups; made by ``create``.

    At most one is open in a process at a time, because torch has one default group. A ``with``
    block closes it at its end. After an exception it aborts the groups without waiting.
    """

    grid: Grid
    rank: int
    local_rank: int
    coordinates: Coordinates
    device: torch.device
    world_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup | None  # None if the axis has one rank
    cp_group: dist.ProcessGroup | None  # None if the axis has one rank
    shard_group: dist.ProcessGroup  # exists even with one rank: DeepSpeed partitions over it
    replica_group: dist.ProcessGroup | None  # None if there is one replica
    pp_group: dist.ProcessGroup | None  # point-to-point messages; None if the axis has one rank
    checkpoint_group: dist.ProcessGroup  # used by one thread at a time, not always the main one
    activity: Activity  # what this rank is doing
    timeline: Timeline  # times the parts of a step
    timeout: timedelta  # how long a collective may wait for other ranks
    stage_group: dist.ProcessGroup | None = None  # shard x tp ranks; see ``create_stage_group``
    ep_group: dist.ProcessGroup | None = None  # None if each rank has all experts of its blocks
    # None if the copies of experts are on the same ranks as those of other weights
    expert_shard_group: dist.ProcessGroup | None = None
    expert_replica_group: dist.ProcessGroup | None = None

    @classmethod
    def create(
        cls,
        grid: Grid,
        launch: LaunchEnvironment,
        *,
        timeout_seconds: float,
        store: dist.Store | None = None,
        activity: Activity | None = None,
    ) -> Self:
        """Start torch.distributed (NCCL on a GPU, gloo on a CPU) and create every group.

        All ranks call this together. It sets the environment variables of ``process_settings.py``
        that are not set yet, and raises the limit on open files.

        Args:
            grid: the sizes of the axes.
            launch: this process's rank.
            timeout_seconds: how long a call may wait for other ranks, now or in a later collective.
            store: in which the ranks exchange their addresses; if omitted, one that is opened at
                MASTER_ADDR and MASTER_PORT.
            activity: what this rank is doing.

        Raises:
            TopologyError: ``grid`` and the launcher differ in the number of ranks, a rank finds no
                GPU of its own, or its limit on open files is too low.
            GroupError: a rank does not join; names the group and its ranks.
        """
        device = _prepare_process(grid, launch)
        timeout = timedelta(seconds=timeout_seconds)
        try:
            store = store or open_store(launch, timeout_seconds)
            world_group = start_default_group(store, launch, device, timeout)
            groups = create_groups(grid, launch.rank, world_group, device, timeout)
            for name, group in groups.items():
                on_host = name == "checkpoint"
                check_group(name, group, launch.rank, torch.device("cpu") if on_host else device)
        except BaseException:  # also Ctrl-C: no ``with`` block has the groups yet
            _abort_groups()
            raise
        return cls(
            grid=grid,
            rank=launch.rank,
            local_rank=launch.local_rank,
            coordinates=grid.coordinates_of(launch.rank),
            device=device,
            world_group=world_group,
            tp_group=groups.get("tp"),
            cp_group=groups.get("cp"),
            shard_group=groups["shard"],
            replica_group=groups.get("replica"),
            pp_group=groups.get("pp"),
            checkpoint_group=groups["checkpoint"],
            activity=activity or Activity(),
            timeline=Timeline(device),
            timeout=timeout,
            ep_group=groups.get("ep"),
            expert_shard_group=groups.get("expert_shard"),
            expert_replica_group=groups.get("expert_replica"),
        )

    def close(self) -> None:
        """Wait for pending messages and destroy every group. Then a new context can be created."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            _abort_groups()

    @property
    def pp_rank(self) -> int:
        return self.coordinates.pp

    @property
    def dp_rank(self) -> int:
        return self.coordinates.dp

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Ranks with the same parameters (dp and cp); with replicas and shards, only shards."""
        return self.group_along(self.grid.copies.axis) or self.shard_group

    def create_stage_group(self) -> None:
        """Create ``stage_group``, together with all ranks, if no other group has these ranks.

        Only Muon needs it, and a communicator costs GPU memory.
        """
        if self.grid.tp == 1 or self.grid.shard == 1:
            group = self.shard_group if self.grid.tp == 1 else self.tp_group
        elif self.grid.size_along("stage") == self.grid.world_size:
            group = self.world_group
        else:
            groups = self.grid.groups_along("stage")
            group = _own_group("stage", groups, self.rank, self.device, self.timeout)
            check_group("stage", group, self.rank, self.device)
        object.__setattr__(self, "stage_group", group)

    @property
    def groups_by_axis(self) -> dict[Axis | Literal["world"], dist.ProcessGroup]:
        """The groups of several ranks. Those with the same parameters (dp and cp) are dp, or shard
        and replica if there are both.
        """
        groups: dict[Axis | Literal["world"], dist.ProcessGroup | None] = {
            "tp": self.tp_group,
            "cp": self.cp_group,
            "shard" if self.grid.is_hybrid else "dp": self.data_group,
            "replica": self.replica_group if self.grid.is_hybrid else None,
            "pp": self.pp_group,
            "stage": self.stage_group if self.grid.tp > 1 < self.grid.shard else None,
            "ep": self.ep_group,
            "expert_shard": self.expert_shard_group,
            "expert_replica": self.expert_replica_group,
            "world": self.world_group,
        }
        return {axis: group for axis, group in groups.items() if group and group.size() > 1}

    def group_along(self, axis: Axis) -> dist.ProcessGroup | None:
        """The ranks that differ from this one in ``axis`` alone; None if there is no group."""
        assert axis != "dp", "replica and shard divide this axis"
        group: dist.ProcessGroup | None = getattr(self, f"{axis}_group")
        return group

    def rank_along(self, axis: Axis) -> int:
        return self.grid.index_along(self.rank, axis)

    @property
    def shard_rank(self) -> int:
        """Which partition of ZeRO this rank holds. Neighbours among ``Grid.dp_cp`` differ in it."""
        return self.rank_along("shard")

    @property
    def replica_rank(self) -> int:
        """Which of the ranks with this partition it is."""
        return self.rank_along("replica")

    @property
    def sender_rank(self) -> int:
        """The index among the ranks that send compressed gradients to each other."""
        return self.replica_rank if self.grid.replicate > 1 else self.shard_rank

    @property
    def cp_rank(self) -> int:
        return self.coordinates.cp

    @property
    def tp_rank(self) -> int:
        return self.coordinates.tp

    @property
    def is_first_pipeline_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_pipeline_stage(self) -> bool:
        return self.pp_rank == self.grid.pp - 1

    @property
    def previous_rank(self) -> int | None:
        """The global rank of the previous pipeline stage; None on the first."""
        return None if self.is_first_pipeline_stage else self._rank_at_stage(self.pp_rank - 1)

    @property
    def next_rank(self) -> int | None:
        """The global rank of the next pipeline stage; None on the last."""
        return None if self.is_last_pipeline_stage else self._rank_at_stage(self.pp_rank + 1)

    @property
    def other_end_rank(self) -> int | None:
        """The rank at the other end of the pipeline; None on the stages between its ends."""
        if self.grid.pp == 1 or not (self.is_first_pipeline_stage or self.is_last_pipeline_stage):
            return None
        return self._rank_at_stage(self.grid.pp - 1 - self.pp_rank)

    def _rank_at_stage(self, pipeline_stage: int) -> int:
        return self.grid.rank_of(self.coordinates._replace(pp=pipeline_stage))


def _prepare_process(grid: Grid, launch: LaunchEnvironment) -> torch.device:
    """Check the grid, set environment variables and limits, and return the device of this rank,
    which becomes the current device.
    """
    if grid.world_size != launch.world_size:
        raise TopologyError(
            f"{grid} makes {grid.world_size} ranks, but {launch.world_size} were launched "
            f"(from {launch.source}): change the degrees or the number of processes"
        )
    if dist.is_initialized():
        raise TopologyError(
            "torch.distributed is in use in this process: close the earlier ParallelContext"
        )
    on_gpu = torch.cuda.is_available()
    set_defaults()
    os.environ.update(compiler_threads(launch, os.environ))
    os.environ.update(gloo_interface(launch, os.environ))
    allow_open_files(launch.rank, launch.world_size)
    use_one_worker()  # before the first gloo group
    if not on_gpu:
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    # If one GPU is visible, the launcher gave each process its own, or all ranks share it.
    index = 0 if visible == 1 else launch.local_rank
    if index >= visible and ranks_of_a_gpu(os.environ) > 1:
        index %= visible
    if index >= visible:
        raise TopologyError(
            f"each rank needs its own GPU, but local rank {launch.local_rank} finds only "
            f"{visible} on this machine: start at most {visible} ranks here, set "
            'CUDA_VISIBLE_DEVICES="" to run on the CPU, or let ranks share a GPU (slow): NCCL 2.30 '
            "or newer allows it with NCCL_MULTI_RANK_GPU_ENABLE=1"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device

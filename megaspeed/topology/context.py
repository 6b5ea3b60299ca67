"""ParallelContext: the coordinates of this rank, and its process groups.

Rank 5 of pp 2 x dp 2 x tp 2 (drawn in `grid.py`) belongs to

    world_group       0 .. 7     all ranks
    tp_group          4 5        shares every matrix of pipeline stage 1
    dp_group          5 7        holds the same weights, sees other samples
    pp_group          1 5        activations forward, gradients back, gradients of tied weights
    checkpoint_group  0 .. 7     all ranks, over gloo, for saves beside the training

There is no tp_group or pp_group if that axis has one rank. How they are created: `groups.py`.

Code that communicates takes the context as an argument. Nothing outside this folder creates a
process group, and no module keeps one in a global.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from megaspeed.topology.activity import Activity
from megaspeed.topology.gloo_interface import gloo_interface
from megaspeed.topology.grid import Coordinates, Grid, TopologyError
from megaspeed.topology.groups import (
    abandon,
    create_groups,
    own_group,
    shake_hands,
    start_default_group,
    stop,
)
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.topology.meeting import open_store
from megaspeed.topology.process_settings import allow_open_files, default_settings
from megaspeed.topology.timeline import Timeline

# A group of one rank waits for no other rank. But NCCL's timeout starts at the call, and kernels
# that were launched before it may wait for other ranks.
_ONE_RANK_NEVER_WAITS = timedelta(days=1)


@dataclass(frozen=True, kw_only=True)
class ParallelContext:
    """This rank's coordinates, device and process groups. Created by `create`, closed by `close`.

    At most one is open in a process at a time, because torch has one default group. At the end of
    a ``with`` block it is closed. After an exception it aborts its groups without waiting.
    """

    grid: Grid
    rank: int
    local_rank: int
    coordinates: Coordinates
    device: torch.device
    world_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup | None  # None if the axis has one rank, because nothing is sent
    dp_group: dist.ProcessGroup  # exists even with one rank, because DeepSpeed partitions over it
    # After start-up it carries no collectives, only point-to-point messages. None if the axis has
    # one rank.
    pp_group: dist.ProcessGroup | None
    checkpoint_group: dist.ProcessGroup  # used by one thread at a time, not always the main one
    activity: Activity  # what this rank is doing
    timeline: Timeline  # times the parts of a step

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
        """Start torch.distributed and make every group; all ranks call this together.

        Uses NCCL on a GPU and gloo on a CPU. Several ranks find each other's addresses in `store`,
        which is opened at MASTER_ADDR and MASTER_PORT if it is omitted. Runs one all-reduce in
        each group before it returns. A call that waits longer than `timeout_seconds` for other
        ranks fails, now or in a later collective.

        Sets the environment variables of `process_settings.py` and `gloo_interface.py`, unless they
        are set, and raises the limit on open files.

        Raises TopologyError if `grid` and the launcher differ in the number of ranks, if a rank
        finds no GPU of its own, or if its limit on open files is too low. Raises GroupError, which
        names the group and its ranks, if a rank does not join.
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
        os.environ.update(default_settings(os.environ, "cuda" if on_gpu else "cpu"))
        os.environ.update(gloo_interface(launch, os.environ))
        allow_open_files(launch.rank, launch.world_size)
        device = _take_device(launch) if on_gpu else torch.device("cpu")
        timeout = timedelta(seconds=timeout_seconds)
        try:
            store = store or open_store(launch, timeout_seconds)
            world_group = start_default_group(store, launch, device, timeout)
            groups = create_groups(grid, launch.rank, world_group, device, timeout)
            for name, group in groups.items():
                on_host = name == "checkpoint"
                shake_hands(name, group, launch.rank, torch.device("cpu") if on_host else device)
        except BaseException:
            abandon()
            raise
        return cls(
            grid=grid,
            rank=launch.rank,
            local_rank=launch.local_rank,
            coordinates=grid.coordinates_of(launch.rank),
            device=device,
            world_group=world_group,
            tp_group=groups.get("tp"),
            dp_group=groups["dp"],
            pp_group=groups.get("pp"),
            checkpoint_group=groups["checkpoint"],
            activity=activity or Activity(),
            timeline=Timeline(device),
        )

    def close(self) -> None:
        """Destroy every group. Afterwards a new context, of any size, can be created."""
        stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            abandon()

    def group_of_this_rank(self) -> dist.ProcessGroup:
        """A group of this rank alone. All ranks call this together: it may create groups."""
        if self.dp_size == 1:
            return self.dp_group
        alone = [[rank] for rank in range(self.grid.world_size)]
        return own_group("self", alone, self.rank, self.device, _ONE_RANK_NEVER_WAITS)

    @property
    def pp_rank(self) -> int:
        return self.coordinates.pp

    @property
    def dp_rank(self) -> int:
        return self.coordinates.dp

    @property
    def tp_rank(self) -> int:
        return self.coordinates.tp

    @property
    def pp_size(self) -> int:
        return self.grid.pp

    @property
    def dp_size(self) -> int:
        return self.grid.dp

    @property
    def tp_size(self) -> int:
        return self.grid.tp

    @property
    def is_first_pipeline_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_pipeline_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def previous_rank(self) -> int | None:
        """The global rank of the pipeline stage before; None on the first."""
        return None if self.is_first_pipeline_stage else self._rank_at_stage(self.pp_rank - 1)

    @property
    def next_rank(self) -> int | None:
        """The global rank of the pipeline stage after; None on the last."""
        return None if self.is_last_pipeline_stage else self._rank_at_stage(self.pp_rank + 1)

    @property
    def other_end_rank(self) -> int | None:
        """On the first stage the rank of the last one, and the reverse; None on other stages."""
        if self.pp_size == 1 or not (self.is_first_pipeline_stage or self.is_last_pipeline_stage):
            return None
        return self._rank_at_stage(self.pp_size - 1 - self.pp_rank)

    def _rank_at_stage(self, pipeline_stage: int) -> int:
        return self.grid.rank_of(self.coordinates._replace(pp=pipeline_stage))


def _take_device(launch: LaunchEnvironment) -> torch.device:
    """Return the GPU of this rank, after making it the current device."""
    visible = torch.cuda.device_count()
    # If one GPU is visible, the launcher gave each process its own. (NCCL refuses to share one.)
    index = 0 if visible == 1 else launch.local_rank
    if index >= visible:
        raise TopologyError(
            f"each rank needs its own GPU, but local rank {launch.local_rank} finds only "
            f"{visible} on this machine: start at most {visible} ranks here, or set "
            'CUDA_VISIBLE_DEVICES="" to run on the CPU'
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device

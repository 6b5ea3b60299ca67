"""Where each rank stands: rank arithmetic, the launcher's variables, and the process groups.

grid.py     rank <-> (pp, dp, tp) and the groups along the axes: plain integers
launch.py   rank and world size from torchrun, deepspeed, srun, mpirun or plain python
groups.py   creating the process groups, and naming the one that fails
context.py  ParallelContext: this rank's coordinates, device and groups
failure.py  what a rank reports when it fails: host, rank, coordinates, step and phase
process_settings.py  environment variables and limits that a rank sets for its own process
"""

from typing import TYPE_CHECKING, Any

from megaspeed.topology.grid import AXES, Axis, Coordinates, Grid, TopologyError
from megaspeed.topology.launch import LaunchEnvironment, LaunchError, read_launch_environment

if TYPE_CHECKING:
    from megaspeed.topology.context import ParallelContext
    from megaspeed.topology.groups import GroupError

__all__ = [
    "AXES",
    "Axis",
    "Coordinates",
    "Grid",
    "GroupError",
    "LaunchEnvironment",
    "LaunchError",
    "ParallelContext",
    "TopologyError",
    "read_launch_environment",
]


def __getattr__(name: str) -> Any:
    # Counting ranks must not wait for torch to load, so what needs torch is loaded on first use.
    if name == "ParallelContext":
        from megaspeed.topology.context import ParallelContext

        return ParallelContext
    if name == "GroupError":
        from megaspeed.topology.groups import GroupError

        return GroupError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

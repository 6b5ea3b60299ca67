"""What a rank sets for its own process before CUDA, NCCL and gloo start.

A variable that the user has set, under any of its names, keeps the user's value. torch reads these
variables when it first needs them, so it is early enough to set them after torch is imported.

NCCL's flight recorder writes after a timeout to the file ``comm_lib_trace_rank_<rank>`` in
``~/.cache/torch`` (or ``$XDG_CACHE_HOME/torch``); TORCH_FR_DUMP_TEMP_FILE changes the path up to
the rank. ``torchfrtrace`` reads the files of all ranks and names the collective that did not match.
"""

import resource
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from megaspeed.topology.grid import TopologyError

DeviceType = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class _Setting:
    """One environment variable."""

    name: str
    value: str
    why: str
    other_names: tuple[str, ...] = ()
    devices: tuple[DeviceType, ...] = ("cuda",)


_SETTINGS = (
    _Setting(
        "PYTORCH_ALLOC_CONF",
        "expandable_segments:True",
        "segments that grow leave no holes when sizes change, so less memory is lost",
        other_names=("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    ),
    _Setting(
        "TORCH_FR_BUFFER_SIZE",
        "2000",
        "the flight recorder: the last 2,000 collectives of this rank, for a report of a hang",
        other_names=("TORCH_NCCL_TRACE_BUFFER_SIZE",),
        devices=("cpu", "cuda"),
    ),
    _Setting(
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "1",
        "the flight recorder is written to a file if a collective takes longer than the timeout",
    ),
    _Setting(
        "TORCH_GLOO_LAZY_INIT",
        "1",
        "gloo connects two ranks when they first communicate, instead of all ranks at start-up",
        devices=("cpu", "cuda"),
    ),
)

_COMFORTABLE_FILES = 65_536
_FILES_OF_A_RANK = 512
"""An allowance for data, checkpoints, libraries and connections to neighbours."""

_CONNECTIONS_OF_RANK_0 = 5
"""With each rank: up to four for the store (check-in, process groups, heartbeats, claims), and one
of the checkpoint group or, if a supervisor keeps the store, of its supervisor.
"""


def default_settings(environ: Mapping[str, str], device_type: DeviceType) -> dict[str, str]:
    """The variables to set, by name: the table without the variables that `environ` has."""
    return {
        setting.name: setting.value
        for setting in _SETTINGS
        if device_type in setting.devices
        and not any(name in environ for name in (setting.name, *setting.other_names))
    }


def work_for(device: torch.device) -> None:
    """Make `device` the current GPU of this thread. Every new thread that uses it calls this first.

    Otherwise the thread uses GPU 0, which may be another rank's: pinning memory opens a context
    there.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def allow_open_files(rank: int, world_size: int) -> None:
    """Raise this process's limit of open files to 65,536 or to what the system allows.

    Raises TopologyError if that is too few for the connections of `rank` among `world_size` ranks.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = open_files_of(rank, world_size)
    unlimited = hard == resource.RLIM_INFINITY
    wanted = max(needed, _COMFORTABLE_FILES)
    limit = wanted if unlimited else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < needed:
        raise TopologyError(
            f"rank {rank} of {world_size} ranks needs up to {needed:,} open files and connections, "
            f"but this system allows {hard:,}: raise the hard limit (ulimit -Hn, or nofile in "
            "/etc/security/limits.conf or in the service that starts the job)"
        )


def open_files_of(rank: int, world_size: int) -> int:
    """How many files and connections a rank may have open at once, at most."""
    return _FILES_OF_A_RANK + (_CONNECTIONS_OF_RANK_0 * world_size if rank == 0 else 0)

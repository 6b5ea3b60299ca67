"""Environment variables and limits that a rank sets before CUDA, NCCL and gloo start.

A variable that the user has set, under any of its names, keeps the user's value. torch reads these
variables when it first needs them, so they may be set after torch is imported. The allocator's
variable must be set before CUDA is initialised.

NCCL's flight recorder writes after a timeout to the file ``comm_lib_trace_rank_<rank>`` in
``~/.cache/torch`` (or ``$XDG_CACHE_HOME/torch``); TORCH_FR_DUMP_TEMP_FILE changes the path up to
the rank. ``torchfrtrace`` reads the files of all ranks and names the collective that did not match.
"""

import ctypes
import ipaddress
import os
import resource
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Literal

import psutil
import torch

from megaspeed.topology.grid import TopologyError
from megaspeed.topology.launch import LaunchEnvironment, usable_processors

DeviceType = Literal["cpu", "cuda"]


# (name, value, whether only GPUs need it, other names of the same setting)
_SETTINGS = (
    # Segments that grow leave no holes when sizes change, so less memory is lost.
    (
        "PYTORCH_ALLOC_CONF",
        "expandable_segments:True",
        True,
        ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    ),
    # The flight recorder: the last 2,000 collectives of this rank, for a report of a hang.
    ("TORCH_FR_BUFFER_SIZE", "2000", False, ("TORCH_NCCL_TRACE_BUFFER_SIZE",)),
    # The flight recorder is written to a file if a collective takes longer than the timeout.
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", True, ()),
    # gloo connects two ranks when they first communicate, instead of all ranks at start-up.
    ("TORCH_GLOO_LAZY_INIT", "1", False, ()),
)

_NCCL_THAT_SHARES = (2, 30)
_RANKS_OF_A_GPU = 16  # each has a CUDA context of half a gigabyte

_WANTED_FILES = 65_536
_FILES_OF_A_RANK = 512
"""An allowance for data, checkpoints, libraries and connections to neighbours."""

_CONNECTIONS_OF_RANK_0 = 5
"""Connections of rank 0 to each rank: up to four of the store (check-in, process groups,
heartbeats, claims), and one of the checkpoint group. If a supervisor keeps the store, the last one
is a connection to the supervisor of the rank.
"""


def set_defaults() -> None:
    """Set the default variables of this process. Call it before anything uses a GPU: torch reads
    the allocator's variable once, when it initialises CUDA.
    """
    device_type: DeviceType = "cuda" if torch.cuda.is_available() else "cpu"
    os.environ.update(default_settings(os.environ, device_type))


def default_settings(environ: Mapping[str, str], device_type: DeviceType) -> dict[str, str]:
    """Name -> value of the variables to set: those that ``environ`` does not have already."""
    return {
        name: value
        for name, value, gpu_only, other_names in _SETTINGS
        if (device_type == "cuda" or not gpu_only) and not {name, *other_names} & environ.keys()
    }


def compiler_threads(launch: LaunchEnvironment, environ: Mapping[str, str]) -> dict[str, str]:
    """TORCHINDUCTOR_COMPILE_THREADS for this process: its share of the machine's processors.

    Without this limit, each rank would start up to 32 compiler processes. If the variable is
    already set, the result is empty.
    """
    if "TORCHINDUCTOR_COMPILE_THREADS" in environ:
        return {}
    share = max(1, (os.cpu_count() or 1) // launch.local_world_size)
    return {"TORCHINDUCTOR_COMPILE_THREADS": str(min(32, usable_processors(), share))}


def use_device(device: torch.device) -> None:
    """Make ``device`` the current GPU of this thread.

    Every new thread that uses a GPU calls this first. Otherwise it uses GPU 0, which may be another
    rank's: pinning memory opens a context there.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def ranks_of_a_gpu(environ: Mapping[str, str]) -> int:
    """The number of ranks that may use one GPU, usually 1.

    By default, NCCL refuses more. From 2.30 on it allows them if NCCL_MULTI_RANK_GPU_ENABLE is 1.
    The ranks take turns on the GPU, so this is slow. It is meant for trying a layout.
    """
    allows = environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return _RANKS_OF_A_GPU if allows and nccl_version() >= _NCCL_THAT_SHARES else 1


def nccl_version() -> tuple[int, ...]:
    """The version of the NCCL that is loaded, such as (2, 30, 3).

    ``torch.cuda.nccl.version`` is the one that torch was built with. It is returned if NCCL is not
    a library of its own.
    """
    number = ctypes.c_int()
    with suppress(OSError):
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    major, rest = divmod(number.value, 10_000)
    return (major, *divmod(rest, 100)) if major else tuple(torch.cuda.nccl.version())


def allow_open_files(rank: int, world_size: int) -> None:
    """Raise this process's limit of open files to 65,536 or to what the system allows.

    Raises TopologyError if that is too few for the connections of ``rank`` in a world of
    ``world_size`` ranks.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = open_files_of(rank, world_size)
    wanted = max(needed, _WANTED_FILES)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
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


_DOCUMENTATION_ADDRESSES = ("192.0.2.1", "2001:db8::1")
"""No machine has these addresses, which are for documentation. Only the default route matches."""


def gloo_interface(launch: LaunchEnvironment, environ: Mapping[str, str]) -> dict[str, str]:
    """GLOO_SOCKET_IFNAME for this process, if the ranks of the run are on several nodes.

    Empty if the variable is set, if all ranks are on this node, or if there is no such interface.

    By default gloo listens at the address of this machine's own host name. This may be a loopback
    address (often 127.0.1.1 in /etc/hosts), or the name may not resolve. Then ranks on other nodes
    connect to themselves, and no group can be created. The interface that reaches MASTER_ADDR
    connects the nodes. On rank 0's own node, MASTER_ADDR may itself resolve to a loopback address;
    then the interface of the default route is used. Set GLOO_SOCKET_IFNAME to use another one, such
    as that of a faster network.
    """
    if "GLOO_SOCKET_IFNAME" in environ or launch.world_size == launch.local_world_size:
        return {}
    own = _address_towards(environ.get("MASTER_ADDR", "localhost"))
    if own is not None and ipaddress.ip_address(own).is_loopback:
        own = next(filter(None, map(_address_towards, _DOCUMENTATION_ADDRESSES)), None)
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == own for entry in addresses):
            return {"GLOO_SOCKET_IFNAME": name}
    return {}


def _address_towards(host: str) -> str | None:
    """The address of this machine from which it reaches ``host``. Sends no packet (UDP)."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return None

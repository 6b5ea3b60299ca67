"""The rank of this process and the number of ranks, read from the launcher's variables.

    launcher                  rank                      world size
    torchrun, deepspeed       RANK                      WORLD_SIZE
    mpirun (Open MPI)         OMPI_COMM_WORLD_RANK      OMPI_COMM_WORLD_SIZE
    mpirun (MPICH, Intel)     PMI_RANK                  PMI_SIZE
    srun                      SLURM_PROCID              SLURM_NTASKS
    plain python              0                         1

If several are set, the first in the table is used. This is correct if one launcher starts another
(srun starts one torchrun on every node, torchrun starts the ranks). Then the world size is a
multiple of the outer launcher's number of tasks. Anything else is a mistake and is refused.
Otherwise, sixteen processes that each assume world size 1 would train sixteen separate models.
"""

import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

_RESOLVE_SECONDS = 5.0
"""How long to retry an unknown MASTER_ADDR: a name may be registered after the job starts."""
_MOST_DIGITS = 9


class LaunchError(ValueError):
    """The launcher's variables are incomplete, contradict each other, or are not valid."""


@dataclass(frozen=True)
class LaunchEnvironment:
    """The rank of this process, and the number of ranks."""

    rank: int  # 0 .. world_size - 1
    world_size: int  # processes of the run, on all machines
    local_rank: int  # index among the processes of this machine, also the index of its GPU
    local_world_size: int  # processes of this machine
    source: str  # the variables that gave the world size, for messages

    def __post_init__(self) -> None:
        for name, index, size in (
            ("rank", self.rank, self.world_size),
            ("local rank", self.local_rank, self.local_world_size),
        ):
            if not 0 <= index < size:
                raise LaunchError(
                    f"{name} {index} does not exist among {size} processes (from {self.source})"
                )


class _Launcher(NamedTuple):
    """The names of one launcher's variables."""

    source: str
    rank: str
    world_size: str
    local_rank: str
    local_world_sizes: tuple[str, ...] = ()  # the first one that is set is used


_SLURM = _Launcher("SLURM_*", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
_LAUNCHERS = (  # in order of precedence: the innermost launcher first
    _Launcher(
        "RANK/WORLD_SIZE",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),  # torchrun's name, DeepSpeed's name
    ),
    _Launcher(
        "OMPI_*",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher("PMI_*", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",)),
    _SLURM,
)
_SINGLE_PROCESS = LaunchEnvironment(
    rank=0, world_size=1, local_rank=0, local_world_size=1, source="single process"
)


def read_launch_environment(environ: Mapping[str, str]) -> LaunchEnvironment:
    """This process's place in the run, from ``environ`` (usually ``os.environ``).

    Raises LaunchError if a variable is missing or not an integer, if two launchers contradict each
    other, or if there are several ranks and MASTER_ADDR or MASTER_PORT is not set, is not a port
    number, or cannot be resolved.
    """
    launcher = next((one for one in _LAUNCHERS if _started_by(one, environ)), None)
    launch = _SINGLE_PROCESS if launcher is None else _read(launcher, environ)
    _check_agreement(launch, launcher, environ)
    if launch.world_size > 1:
        _check_address_of_rank_0(launch, environ)
    return launch


def _started_by(launcher: _Launcher, environ: Mapping[str, str]) -> bool:
    if launcher is _SLURM:
        # In an allocation of one task, a shell or a batch script has SLURM_NTASKS too, but is an
        # ordinary single process. With more tasks, python should run once in each.
        return _integer(environ, launcher.world_size, default=1) > 1 or "SLURM_STEP_ID" in environ
    if launcher.source == "PMI_*" and launcher.local_rank not in environ:
        return False  # srun sets the other two as well
    return launcher.rank in environ or launcher.world_size in environ


def _read(launcher: _Launcher, environ: Mapping[str, str]) -> LaunchEnvironment:
    # Only srun sets SLURM_STEP_ID. A batch script has SLURM_PROCID=0 too, but is one process.
    if launcher is _SLURM and "SLURM_STEP_ID" not in environ:
        raise LaunchError(
            f"SLURM_NTASKS={environ['SLURM_NTASKS']}, but this process was not started by srun "
            "(SLURM_STEP_ID is not set), so its world size would be 1: "
            "start it with srun or torchrun, or unset SLURM_NTASKS to run a single process"
        )
    world_size = _integer(environ, launcher.world_size)
    alone = 0 if world_size == 1 else None  # a single process needs no local rank
    return LaunchEnvironment(
        rank=_integer(environ, launcher.rank),
        world_size=world_size,
        local_rank=_integer(environ, launcher.local_rank, default=alone),
        local_world_size=_local_world_size(launcher, environ, world_size),
        source=launcher.source,
    )


def _local_world_size(launcher: _Launcher, environ: Mapping[str, str], world_size: int) -> int:
    for name in launcher.local_world_sizes:
        if name in environ:
            return _integer(environ, name)
    if launcher is _SLURM:
        # One number for each machine: "4(x2),3" is 4, 4 and 3. The largest is used on all machines.
        tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
        counts = [int(count) for count in re.findall(r"(?<![x\d])\d{1,9}(?!\d)", tasks)]
        return min(world_size, max(counts, default=0) or world_size)
    return world_size  # no variable states that there are several machines


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is not None:
            return default
        known = [n for one in _LAUNCHERS for n in (one.rank, one.world_size, one.local_rank)]
        present = [other for other in known if other in environ]
        raise LaunchError(
            f"{name} is not set, but {', '.join(present)} state that a launcher started this "
            f"process: set {name} too, or unset the others to run a single process"
        )
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        raise LaunchError(
            f"{name} must be an integer of at most {_MOST_DIGITS} digits, but is {text[:80]!r}"
        )
    return int(text)


def _check_agreement(
    launch: LaunchEnvironment, launcher: _Launcher | None, environ: Mapping[str, str]
) -> None:
    """Raise LaunchError if the variables of another launcher contradict the world size."""
    what = f"the world size is {launch.world_size} from {launch.source}, but"
    # srun or mpirun may start several torchrun agents, one a task. After a node is lost, an elastic
    # run has fewer agents than tasks, and any number of ranks.
    agents = _integer(environ, "GROUP_WORLD_SIZE", default=1)
    agents_are_tasks = "TORCHELASTIC_RUN_ID" in environ and agents > 1
    for outer in _LAUNCHERS:
        tasks = _integer(environ, outer.world_size, default=1)
        if outer is launcher or (tasks > 1 and agents_are_tasks):
            continue
        if tasks < 1 or launch.world_size % tasks != 0:
            raise LaunchError(
                f"two launchers disagree: {what} {outer.world_size}={tasks}; the numbers must "
                "be equal, or the first a multiple of the second if each task starts several "
                "ranks: correct or unset one of them"
            )
    rank = _integer(environ, "PMIX_RANK", default=0)
    if rank >= launch.world_size and not agents_are_tasks:
        raise LaunchError(
            f"two launchers disagree: {what} PMIX_RANK={rank}, so there are at least {rank + 1} "
            "processes: start python with srun, mpirun or torchrun, or unset PMIX_RANK"
        )


def _check_address_of_rank_0(launch: LaunchEnvironment, environ: Mapping[str, str]) -> None:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise LaunchError(
            f"{launch.world_size} ranks (from {launch.source}) need an address to connect to, but "
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set. "
            "torchrun and deepspeed set both; elsewhere export, the same for all ranks, "
            "MASTER_ADDR=<host of rank 0> (under SLURM: "
            '"$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)") '
            "and MASTER_PORT=<a free port of that host, such as 29500>"
        )
    port = environ["MASTER_PORT"]
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and 1 <= int(port) <= 65535):
        raise LaunchError(
            f"MASTER_PORT must be a port, a number from 1 to 65535, but is {port[:80]!r}; "
            "export a free port of the host of rank 0, such as 29500, the same for all ranks"
        )
    _check_address(environ["MASTER_ADDR"])


def _check_address(address: str) -> None:
    """Raise LaunchError if the name cannot be resolved. Otherwise ranks would wait silently."""
    give_up = time.monotonic() + _RESOLVE_SECONDS
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > give_up:
                raise LaunchError(
                    f"MASTER_ADDR is {address[:80]!r}, which cannot be resolved on this machine "
                    f"({error}); export the name or the address of the host of rank 0"
                ) from None
        time.sleep(0.5)


def free_port() -> int:
    """A port of this machine that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def usable_processors() -> int:
    """How many processors this process may use. A launcher may have divided them."""
    if hasattr(os, "sched_getaffinity"):  # on Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

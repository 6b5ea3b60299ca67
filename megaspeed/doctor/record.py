"""What a rank reports about itself and its machine."""

import os
import platform
import resource
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import torch

from megaspeed.checked_run import load_checked_run
from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import World
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus, prepare_corpus
from megaspeed.data.errors import DataError
from megaspeed.doctor.messages import Result, call_with_timeout
from megaspeed.files.json_values import leaves
from megaspeed.supervision.software import software
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.topology.process_settings import open_files_of

_LIBRARIES = ("transformers", "tokenizers", "safetensors", "numpy")
_SHARED_MEMORY = Path("/dev/shm")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FIRST_GPU = Path("/dev/nvidia0")
_UNKNOWN = "unknown"


@dataclass(frozen=True)
class Link:
    """One process group, as measured by one of its ranks."""

    axis: str  # pp, dp, tp or world
    ranks: Sequence[int]  # of the group
    latency_seconds: float  # median time for a message of 8 bytes
    bytes_per_second: float  # bytes that a rank sends for a large message / the median time


@dataclass(kw_only=True)
class Record:
    """What one rank reports, as JSON: first what it knows alone, then what the ranks find together.

    The second part is None or empty in the first report.
    """

    rank: int
    world_size: int
    host: str
    process: int
    first_of_node: bool  # whether it is the lowest rank of its machine
    launcher: str  # the environment variables from which rank and world size were read
    versions: dict[str, str]  # versions that must be the same on all ranks, by name
    # The boot id, which differs between machines with the same host name; "" if unknown.
    boot: str = ""
    # The resolved configuration, by dotted key; empty if it is wrong.
    settings: dict[str, str] = field(default_factory=dict)
    # Fingerprints of texts and tokenizer; empty if they were not prepared.
    data: dict[str, str] = field(default_factory=dict)
    degrees: Sequence[int] = ()  # ranks along pp, dp and tp; empty if the configuration is wrong
    device: str = "cpu"  # "cpu", or the GPU's name; "?" if naming it took too long
    # Why torch finds no GPU although the machine has one; None otherwise.
    unusable_gpu: str | None = None
    # How many open files the rank needs, and how many the system allows (-1: no limit).
    open_files: Sequence[int] = (0, -1)
    shared_memory_bytes: int | None = None  # free bytes in /dev/shm; None if it does not exist
    gpu_links: str | None = None  # `nvidia-smi topo -m`, of the first rank of a node with GPUs
    # The errors of the configuration or of the corpus; None if there are none.
    wrong_input: str | None = None
    too_slow: Sequence[str] = ()  # steps that did not end within their limit
    address: Sequence[Any] = ()  # host and port at which it accepts connections

    clock_seconds: float | None = None  # how far its clock is ahead of rank 0's
    folder_problem: str | None = None  # what is wrong with training.run_dir here
    # Why the first rank of a node cannot connect to the next node: the rank at fault, and the text.
    port_problem: Sequence[Any] | None = None
    links: Sequence[Link] = ()
    group_problem: str | None = None  # what ended the measurement of the links

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the record from ``dataclasses.asdict`` of it."""
        return cls(**{**values, "links": [Link(**link) for link in values["links"]]})


def take_record(
    config: Path, overrides: Sequence[str], launch: LaunchEnvironment, seconds: float
) -> tuple[Record, Run | None]:
    """Return this rank's record, and its run if the configuration is valid.

    Each step may take up to ``seconds``.
    """
    too_slow: list[str] = []

    def limited(step: str, function: Callable[[], Result]) -> Result | None:
        try:
            return call_with_timeout(seconds, function)
        except TimeoutError:
            too_slow.append(step)
            return None

    on_gpu = torch.cuda.is_available()
    is_first = launch.local_rank == 0
    run, corpus, wrong = None, None, None
    try:
        world = World(launch.world_size, launch.source, "cuda" if on_gpu else "cpu")
        run = limited(
            "reading the configuration", lambda: load_checked_run(config, overrides, world)
        )
        if run is not None:
            data, vocabulary = run.config.data, run.config.model.vocab_size
            corpus = limited(
                "preparing the corpus",
                lambda: prepare_corpus(data, vocabulary, reports_waits=is_first),
            )
    except (ConfigError, DataError, OSError) as error:
        wrong = str(error)
    record = Record(
        rank=launch.rank,
        world_size=launch.world_size,
        host=socket.gethostname(),
        boot=_BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "",
        process=os.getpid(),
        first_of_node=is_first,
        launcher=launch.source,
        versions=limited("reading the versions", _versions) or {},
        settings={} if run is None else {k: str(v) for k, v in leaves(run.common_json())},
        data={} if corpus is None else _fingerprints(corpus),
        degrees=() if run is None else (run.grid.pp, run.grid.dp, run.grid.tp),
        open_files=(
            open_files_of(launch.rank, launch.world_size),
            resource.getrlimit(resource.RLIMIT_NOFILE)[1],  # the hard limit
        ),
        shared_memory_bytes=limited("looking at /dev/shm", _shared_memory),
        wrong_input=wrong,
        too_slow=too_slow,
    )
    if on_gpu:
        record.device = limited("naming the GPU", torch.cuda.get_device_name) or "a GPU"
    else:
        record.unusable_gpu = limited("looking for a GPU", _unusable_gpu)
    if on_gpu and is_first:
        record.gpu_links = limited("nvidia-smi", lambda: _nvidia_smi("topo", "-m"))
    return record, run


def _versions() -> dict[str, str]:
    found = {
        "python": platform.python_version(),
        **software(),
        **{name: version(name) for name in _LIBRARIES},
    }
    if torch.cuda.is_available():
        found["CUDA"] = str(torch.version.cuda)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = _driver_version()
    return found


def _fingerprints(corpus: PreparedCorpus) -> dict[str, str]:
    return {
        "training text": corpus.fingerprint,
        "validation text": "none" if corpus.validation is None else corpus.validation.fingerprint,
        "tokenizer": corpus.tokenizer_fingerprint or "not stated",
    }


def _unusable_gpu() -> str | None:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # a run on the CPU is intended
        return None
    driver = _driver_version()
    if driver == _UNKNOWN and not _FIRST_GPU.exists():
        return None
    build = "the CPU only" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
    return (
        f"torch finds no GPU, but the machine has one: torch {torch.__version__} is built for "
        f"{build}, and the driver's version is {driver}. Install a torch that fits the driver, and "
        'let the launcher give this process a GPU, or export CUDA_VISIBLE_DEVICES="" to use the CPU'
    )


def _shared_memory() -> int | None:
    return shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None


def _driver_version() -> str:
    return _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]


def _nvidia_smi(*arguments: str) -> str:
    """Return the output of nvidia-smi; ``_UNKNOWN`` if it fails: a container may lack it."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return _UNKNOWN
    return done.stdout.strip() or _UNKNOWN

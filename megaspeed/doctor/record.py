"""What a rank reports about itself and its machine."""

import os
import platform
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from typing import Any, Self, TypeVar

import torch

from megaspeed.checked_run import load_checked_run
from megaspeed.checkpoint.run_state import NOT_STATED
from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import World
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus, prepare_corpus
from megaspeed.data.errors import DataError
from megaspeed.files.json_values import leaves
from megaspeed.supervision.meeting import software
from megaspeed.topology.grid import AXES
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.topology.process_settings import nccl_version
from megaspeed.units import GIB

Finding = TypeVar("Finding")

_LIBRARIES = ("transformers", "tokenizers", "safetensors", "numpy")
_SHARED_MEMORY = Path("/dev/shm")
_SHARED_MEMORY_BYTES = 2**30
_FIRST_GPU = Path("/dev/nvidia0")


@dataclass(frozen=True)
class Link:
    """One process group, as measured by one of its ranks."""

    axis: str  # such as tp, expert_shard or world
    ranks: Sequence[int]  # of the group
    latency_seconds: float  # median time for a message of 8 bytes
    bytes_per_second: float  # bytes that a rank sends for a large message / the median time


@dataclass(kw_only=True)
class Record:
    """What one rank reports, as JSON: first what it knows alone, then what the ranks find together.

    The ranks find together whether they share the run folder, and how fast their groups are.
    """

    rank: int
    world_size: int
    host: str
    device: str  # "cpu", or the GPU's name
    # What must be equal on all ranks; empty if the configuration or the data is wrong.
    versions: dict[str, str]
    configuration: dict[str, str] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    degrees: Sequence[int] = ()  # ranks along each axis; empty if the configuration is wrong
    wrong_input: str | None = None  # the errors of the configuration or of the corpus
    problems: dict[str, str] = field(default_factory=dict)  # check -> what is wrong on this rank
    links: Sequence[Link] = ()

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
    on_gpu = torch.cuda.is_available()
    record = Record(
        rank=launch.rank,
        world_size=launch.world_size,
        host=socket.gethostname(),
        device=torch.cuda.get_device_name() if on_gpu else "cpu",
        versions=versions(),
    )
    if (problem := _device_problem()) is not None:
        record.problems["device"] = problem
    if on_gpu and launch.local_world_size > 1 and _SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(_SHARED_MEMORY).free
        if free < _SHARED_MEMORY_BYTES:
            record.problems["shared memory"] = (
                f"has {GIB.named(free)} free in /dev/shm, but NCCL needs up to 1 GiB: "
                "docker run --shm-size=8g, or in Kubernetes a volume with medium: Memory"
            )
    run, step = None, "reading the configuration"
    try:
        world = World(launch.world_size, launch.source, "cuda" if on_gpu else "cpu")
        run = call_with_timeout(seconds, lambda: load_checked_run(config, overrides, world))
        record.configuration = {key: str(value) for key, value in leaves(run.common_json())}
        record.degrees = [run.grid.size_along(axis) for axis in AXES]
        data, vocabulary = run.config.data, run.config.model.vocab_size
        step, reports = "preparing the corpus", launch.local_rank == 0
        record.data = _fingerprints(
            call_with_timeout(
                seconds, lambda: prepare_corpus(data, vocabulary, reports_waits=reports)
            )
        )
    except TimeoutError:
        record.problems["time limit"] = f"{step} took too long; --timeout SECONDS allows more"
    except (ConfigError, DataError, OSError) as error:
        record.wrong_input = record.problems["configuration"] = str(error)
    return record, run


def call_with_timeout(seconds: float, function: Callable[[], Finding]) -> Finding:
    """Call ``function`` in another thread, because a disk or a driver may hang.

    Raises TimeoutError after ``seconds``. Its thread then continues in the background.
    """
    future: Future[Finding] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    # A daemon, so that a thread that hangs does not keep the process alive.
    Thread(target=work, daemon=True).start()
    return future.result(timeout=seconds)


def versions() -> dict[str, str]:
    """Return the version of each library that can change a result or a time."""
    found = {
        "python": platform.python_version(),
        **software(),
        **{name: version(name) for name in _LIBRARIES},
    }
    if torch.cuda.is_available():
        found["CUDA"] = str(torch.version.cuda)
        found["NCCL"] = ".".join(map(str, nccl_version()))
    return found


def _fingerprints(corpus: PreparedCorpus) -> dict[str, str]:
    return {
        "training text": corpus.fingerprint,
        "validation text": "none" if corpus.validation is None else corpus.validation.fingerprint,
        "tokenizer": corpus.tokenizer_fingerprint or NOT_STATED,
    }


def _device_problem() -> str | None:
    """Why torch finds no GPU although the machine has one; None if it has none or a run may use
    the CPU.
    """
    means_the_cpu = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if torch.cuda.is_available() or means_the_cpu or not _FIRST_GPU.exists():
        return None
    build = "the CPU only" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
    return (
        f"torch finds no GPU, but the machine has one: torch {torch.__version__} is built for "
        f"{build}. Install a torch that fits the driver (nvidia-smi), and let the launcher give "
        'this process a GPU, or export CUDA_VISIBLE_DEVICES="" to use the CPU'
    )

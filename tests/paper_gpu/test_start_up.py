"""Start-up at thousands of ranks: the calls that all ranks make together are few and fast."""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megaspeed.job import pretrain
from megaspeed.measurement.local_ranks import too_many_ranks
from megaspeed.topology import context, process_settings
from megaspeed.topology.grid import Grid, TopologyError
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.topology.process_settings import (
    allow_open_files,
    compiler_threads,
    default_settings,
    open_files_of,
)
from tests.support.machine import limit
from tests.support.tiny import GPT2

GPU = torch.device("cuda", 0)
TIMEOUT = timedelta(seconds=1800)
MOST_WORLD_WIDE_CALLS = 8
MOST_SECONDS = limit(2)


class Recorder:
    """Replaces torch's functions that all ranks call together, and keeps their arguments."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def init_process_group(self, **options: Any) -> None:
        self.calls.append(("init", options))

    def split_group(self, split_ranks: list[list[int]], **options: Any) -> Any:
        assert sorted(chain(*split_ranks)) == list(range(self.world_size)), "every rank once"
        self.calls.append(("split", options))
        (own,) = (ranks for ranks in split_ranks if self.rank in ranks)
        return SimpleNamespace(ranks=own)

    def new_group(self, ranks: list[int] | None = None, **options: Any) -> Any:
        self.calls.append(("new", options))
        return SimpleNamespace(ranks=ranks or list(range(self.world_size)))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recording = Recorder(rank=2049, world_size=4096)
    for name in ("init_process_group", "split_group", "new_group"):
        monkeypatch.setattr(dist, name, getattr(recording, name))
    monkeypatch.setattr(
        dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False
    )
    everyone = SimpleNamespace(ranks=list(range(recording.world_size)))
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=everyone))
    yield recording


def start_up(recorder: Recorder, grid: Grid) -> dict[str, Any]:
    launch = LaunchEnvironment(
        rank=recorder.rank,
        world_size=recorder.world_size,
        local_rank=1,
        local_world_size=8,
        source="a test",
    )
    world = context.start_default_group(dist.HashStore(), launch, GPU, TIMEOUT)
    return context.create_groups(grid, recorder.rank, world, GPU, TIMEOUT)


@pytest.mark.parametrize(
    ("grid", "split"),
    [
        (Grid(pp=8, dp=64, tp=8), ["tp", "shard", "pp"]),
        (Grid(pp=8, dp=64, tp=8, replicate=8), ["tp", "shard", "replica", "pp"]),
        (Grid(pp=8, dp=64, tp=8, replicate=64), ["tp", "shard", "replica", "pp"]),
        (Grid(pp=1, dp=512, tp=8), ["tp", "shard"]),
        (Grid(pp=64, dp=64, tp=1), ["shard", "pp"]),
        (Grid(pp=512, dp=1, tp=8), ["tp", "shard", "pp"]),  # DeepSpeed needs a group of one rank
        (Grid(pp=1, dp=4096, tp=1), []),  # the default group
        (Grid(pp=4096, dp=1, tp=1), ["shard", "pp"]),
    ],
    ids=str,
)
def test_4096_ranks_start_with_one_call_for_each_axis(
    recorder: Recorder, grid: Grid, split: list[str]
) -> None:
    """An earlier version called new_group for every group: 5,762 calls at pp 8 x dp 64 x tp 8."""
    start = time.process_time()
    mine = start_up(recorder, grid)
    assert time.process_time() - start < MOST_SECONDS
    made = [(call, options.get("group_desc")) for call, options in recorder.calls]
    assert made == [("init", None), *(("split", axis) for axis in split), ("new", "checkpoint")]
    assert len(made) <= MOST_WORLD_WIDE_CALLS
    for axis in ("pp", "shard", "replica", "tp"):
        own = next(ranks for ranks in grid.groups_along(axis) if recorder.rank in ranks)
        if axis in mine:
            assert mine[axis].ranks == own
        else:
            assert axis != "shard" and own == [recorder.rank]


def test_only_the_checkpoint_group_is_not_split_from_the_worlds_communicator(
    recorder: Recorder,
) -> None:
    start_up(recorder, Grid(pp=8, dp=64, tp=8))
    (init,) = (options for call, options in recorder.calls if call == "init")
    assert init["backend"] == "nccl" and init["device_id"] == GPU, "splitting needs a bound device"
    assert init["pg_options"].is_high_priority_stream and init["pg_options"]._timeout == TIMEOUT
    for call, options in recorder.calls:
        assert call != "split" or "pg_options" not in options, "torch copies those of the world"
    (made,) = (options for call, options in recorder.calls if call == "new")
    assert made["backend"] == "gloo"


# --- what a rank sets for its own process --------------------------------------------------------


def test_what_is_set_on_a_gpu_unless_the_user_has_set_it() -> None:
    assert default_settings({}, "cuda") == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_GLOO_LAZY_INIT": "1",
    }
    on_a_cpu = {"TORCH_GLOO_LAZY_INIT": "1", "TORCH_FR_BUFFER_SIZE": "2000"}
    assert default_settings({}, "cpu") == on_a_cpu


@pytest.mark.parametrize(
    ("set_by_user", "left_alone"),
    [
        ("PYTORCH_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"),
        ("TORCH_GLOO_LAZY_INIT", "TORCH_GLOO_LAZY_INIT"),
    ],
)
def test_a_variable_that_the_user_has_set_stays(set_by_user: str, left_alone: str) -> None:
    assert left_alone not in default_settings({set_by_user: ""}, "cuda")
    assert len(default_settings({set_by_user: ""}, "cuda")) == 3


def test_the_ranks_of_a_machine_share_its_processors_to_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    for ranks, own, threads in ((1, 128, 32), (8, 128, 16), (8, 12, 12), (500, 128, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, own=own: set(range(own)))
        launch = LaunchEnvironment(
            rank=0, world_size=ranks, local_rank=0, local_world_size=ranks, source="test"
        )
        expected = {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
        assert compiler_threads(launch, {}) == expected
        assert compiler_threads(launch, {"TORCHINDUCTOR_COMPILE_THREADS": "4"}) == {}


@pytest.mark.parametrize(
    ("variable", "nccl", "shares"),
    [("1", (2, 30, 3), True), ("1", (2, 28, 9), False), ("0", (2, 32, 3), False)],
)
def test_ranks_share_gpus_if_nccl_lets_them(
    variable: str, nccl: tuple[int, int, int], shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus: list[torch.device] = []
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", variable)
    monkeypatch.setattr(process_settings, "nccl_version", lambda: nccl)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", gpus.append)
    monkeypatch.setattr(context, "set_defaults", lambda: None)
    monkeypatch.setattr(context, "compiler_threads", lambda *_: {})
    grid = Grid(pp=1, dp=4, tp=1)
    launch = LaunchEnvironment(
        rank=3, world_size=4, local_rank=3, local_world_size=4, source="test"
    )
    if shares:
        assert too_many_ranks(4, "cuda") == []
        assert context._prepare_process(grid, launch) == torch.device("cuda", 1)
    else:
        (problem,) = too_many_ranks(4, "cuda")
        assert "--world-size 4 is more than the 2 ranks that this machine with 2 GPUs" in problem
        with pytest.raises(TopologyError, match="local rank 3 finds only 2 on this machine"):
            context._prepare_process(grid, launch)
    assert gpus == [torch.device("cuda", 1)] * shares


def test_the_version_of_nccl_is_that_of_the_library_that_is_loaded(
    tmp_path: Path,
) -> None:
    """torch's own function returns the version that torch was built with. Another library may have
    been loaded before.
    """
    source, library = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
    source.write_text("int ncclGetVersion(int *version) { *version = 23003; return 0; }\n")
    options = ["-shared", "-fPIC", "-Wl,-soname,libnccl.so.2"]
    subprocess.run(["cc", *options, source, "-o", library], check=True)
    code = (
        "import torch\n"
        "from megaspeed.topology.process_settings import nccl_version, ranks_of_a_gpu\n"
        "print(nccl_version(), ranks_of_a_gpu({'NCCL_MULTI_RANK_GPU_ENABLE': '1'}))\n"
    )
    variables = {**os.environ, "LD_PRELOAD": str(library)}
    read = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=variables
    )
    assert read.stdout.strip() == "(2, 30, 3) 16"


def test_torch_reads_the_allocators_variable_after_it_is_imported() -> None:
    """So it is early enough to set the variable when the process groups are created."""
    code = (
        "import os, torch\n"
        "os.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:True'\n"
        "print(torch._C._accelerator_getAllocatorSettings())\n"
    )
    read = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert read.stdout.strip() == "expandable_segments:True"


def test_the_variables_are_set_before_cuda_is_initialised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning about bf16 needs a check that initialises CUDA. It runs before the ranks meet."""
    for name in default_settings({}, "cuda"):
        monkeypatch.setenv(name, "")  # restored at the end, even if it is not set now
        monkeypatch.delenv(name)
    seen: list[str | None] = []

    def initialise() -> None:
        seen.append(os.environ.get("PYTORCH_ALLOC_CONF"))
        raise InterruptedError("CUDA is initialised here")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_lazy_init", initialise)
    monkeypatch.setenv("MEGASPEED_CACHE", str(tmp_path / "cache"))
    config = tmp_path / "tiny.json"
    values = {
        "model": GPT2,
        "data": {"train": [str(Path(__file__).parents[2] / "LICENSE")], "sequence_length": 16},
        "training": {"steps": 1, "run_dir": str(tmp_path / "run")},
        "train_batch_size": 2,
    }
    config.write_text(json.dumps(values))
    with pytest.raises(InterruptedError):
        pretrain.main(["--config", str(config)])
    assert seen == ["expandable_segments:True"]


def test_too_few_open_files_for_rank_0_are_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limit: limits.append(limit))
    assert open_files_of(0, 4096) == 5 * 4096 + 512
    with pytest.raises(TopologyError, match=r"up to 20,992 open files .* allows 4,096: raise"):
        allow_open_files(0, 4096)
    allow_open_files(1, 4096)
    assert limits == [(4096, 4096)] * 2


def test_the_limit_of_open_files_is_never_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1_000_000, 1_000_000))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limit: pytest.fail("lowered"))
    allow_open_files(0, 4096)

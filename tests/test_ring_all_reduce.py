"""examples/ring_all_reduce.py sums as the library does, and sends the bytes of its formula."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from megaspeed.topology.launch import LaunchEnvironment
from tests.support.machine import limit
from tests.support.rank_pool import RankPool

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "ring_all_reduce.py"
# Fewer elements than ranks, divisible by the ranks, and not divisible.
COUNTS = (0, 1, 3, 7, 8, 60, 1001)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
BIG = 100_003
MOST_HEADER_BYTES = 200  # of one message with its announcements; gloo sends about 144


def example() -> Any:
    spec = importlib.util.spec_from_file_location("ring_all_reduce", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(launch: LaunchEnvironment) -> Any:
    dist.init_process_group("gloo", rank=launch.rank, world_size=launch.world_size)
    return example()


def sums_are_the_librarys(launch: LaunchEnvironment) -> torch.Tensor:
    """Return this rank's sum of random numbers. Its bits depend on the order of the sum."""
    ring = start(launch)
    torch.manual_seed(launch.rank)
    for count in COUNTS:
        for dtype in DTYPES:
            own = torch.randint(-8, 9, (count,)).to(dtype)  # sums are exact in any order
            library = own.clone()
            dist.all_reduce(library)

            scattered = own.clone()
            chunks = scattered.tensor_split(launch.world_size)
            ring.reduce_scatter(chunks)
            complete = library.tensor_split(launch.world_size)[launch.rank]
            assert torch.equal(chunks[launch.rank], complete), (count, dtype)

            ring.ring_all_reduce(own)
            assert torch.equal(own, library), (count, dtype)

    matrix = torch.randn(7, 11)
    library = matrix.clone()
    dist.all_reduce(library)
    ring.ring_all_reduce(matrix)
    torch.testing.assert_close(matrix, library)
    return matrix


def bytes_that_are_sent(launch: LaunchEnvironment, dtype: torch.dtype) -> int:
    """Return the bytes that this process writes to sockets, as the operating system counts them."""
    ring = start(launch)
    vector = torch.zeros(BIG, dtype=dtype)
    ring.ring_all_reduce(vector)
    dist.barrier()
    process = psutil.Process()
    before = process.io_counters().write_chars
    ring.ring_all_reduce(vector)
    return int(process.io_counters().write_chars - before)


def sum_of_one_rank(launch: LaunchEnvironment) -> None:
    ring = start(launch)
    for dtype in DTYPES:
        own = torch.randn(9).to(dtype)
        before = own.clone()
        ring.ring_all_reduce(own)
        assert torch.equal(own, before)


@pytest.mark.parametrize("ranks", range(2, 9))
def test_every_rank_has_the_librarys_sum_and_the_same_bits(pool: RankPool, ranks: int) -> None:
    sums = pool.run(ranks, sums_are_the_librarys)
    assert all(torch.equal(one, sums[0]) for one in sums)


@pytest.mark.parametrize(
    ("ranks", "dtype"), [(2, torch.float32), (5, torch.bfloat16), (8, torch.float32)]
)
def test_the_bytes_sent_are_those_of_the_formula(
    pool: RankPool, ranks: int, dtype: torch.dtype
) -> None:
    payload = 2 * (ranks - 1) / ranks * BIG * dtype.itemsize
    headers = 2 * (ranks - 1) * MOST_HEADER_BYTES
    # A rank does not send two of its chunks; chunks differ by at most 1 element.
    uneven = 2 * dtype.itemsize
    for sent in pool.run(ranks, bytes_that_are_sent, dtype):
        assert payload - uneven <= sent <= payload + uneven + headers


def error_of_a_ring_that_sends_nothing(launch: LaunchEnvironment) -> str:
    ring = example()
    ring.ring_all_reduce = lambda tensor: tensor.mul_(launch.world_size)
    try:
        ring.measure(launch, [1000])
    except ArithmeticError as error:
        dist.destroy_process_group()
        return str(error)
    return ""


def test_the_check_finds_a_ring_that_sends_nothing(pool: RankPool) -> None:
    """If all ranks have the same numbers, the sum needs no messages."""
    errors = pool.run(2, error_of_a_ring_that_sends_nothing)
    assert errors == 2 * ["the ring's sum of 1000 elements is not the library's"]


def test_one_rank_keeps_its_vector(pool: RankPool) -> None:
    pool.run(1, sum_of_one_rank)


def test_the_table_of_the_docstring_is_the_schedule() -> None:
    ring = example()
    rows = re.findall(r"^ +rank (\d) ([ \d]+)$", ring.__doc__, re.MULTILINE)
    assert len(rows) == 4
    for rank, chunks in rows:
        sent = [ring.chunk_sent(int(rank), step, ranks=4) for step in range(6)]
        assert [int(chunk) for chunk in chunks.split()] == sent


def started(*command: str | Path) -> list[list[str]]:
    """Run a command, and return the rows of the table that it prints, as words."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=limit(120)
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [line.split() for line in ended.stdout.splitlines()[1:]]


@pytest.mark.ranks
def test_the_program_starts_ranks_prints_times_and_draws(tmp_path: Path) -> None:
    options = ("--ranks", "1", "3", "--elements", "1", "5000", "--pictures", tmp_path / "new")
    rows = started(sys.executable, EXAMPLE, *options)
    assert [row[:2] for row in rows] == [
        [ranks, size] for ranks in ("1", "3") for size in ("4", "20,000")
    ]
    assert [float(row[4]) > 0 for row in rows] == [False, False, True, True]
    drawn = {file.name: file.read_bytes()[:4] for file in (tmp_path / "new").iterdir()}
    assert drawn == dict.fromkeys(("ring_times.png", "ring_steps_3.png"), b"\x89PNG")


@pytest.mark.ranks
def test_torchrun_starts_it() -> None:
    torchrun = Path(sys.executable).with_name("torchrun")
    rows = started(torchrun, "--standalone", "--nproc-per-node=2", EXAMPLE, "--elements", "9")
    assert [row[:2] for row in rows] == [["2", "36"]]

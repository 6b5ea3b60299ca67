"""Rules for the number and kind of processes. Messages state where the number came from."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import StatedBatch, World, find_grid
from megaspeed.config.rules import divisors
from megaspeed.config.run import ParallelConfig
from megaspeed.topology.grid import Grid
from tests.config.small import load, only_problem, problems, small, write


def test_pipeline_and_tensor_divide_the_world() -> None:
    assert only_problem("parallel.pipeline=2", "parallel.tensor=4", world_size=12) == (
        "world size 12 (from WORLD_SIZE) is not divisible by parallel.pipeline 2 x parallel.tensor "
        "4 = 8; start 8 or 16 processes, or choose parallel.pipeline x parallel.tensor = 3, 6, 12"
    )


def test_a_small_world_gets_no_advice_to_start_0_processes() -> None:
    assert "; start 8 processes, or" in only_problem(
        "parallel.pipeline=2", "parallel.tensor=4", world_size=2
    )


def test_stated_degrees_multiply_to_the_world() -> None:
    overrides = ("parallel.data=4", "parallel.pipeline=2", "parallel.tensor=2")
    assert only_problem(*overrides, world_size=8) == (
        "parallel.data 4 x parallel.pipeline 2 x parallel.tensor 2 must be world size 8 "
        '(from WORLD_SIZE), but it is 16; set parallel.data to 2 or "auto", or start 16 processes, '
        "or choose parallel.pipeline x parallel.tensor = 2"
    )
    assert problems(*overrides, world_size=16, train_micro_batch_size_per_gpu=1) == []


def mended(message: str, overrides: tuple[str, ...], world: int) -> Iterator[list[str]]:
    """The problems that are left after each change that a message proposes."""
    mends = message.partition("; ")[2]
    for start in re.findall(r"start (?:at least )?([\d or]+) processes", mends):
        for number in start.split(" or "):
            yield problems(*overrides, world_size=int(number))
    if data := re.search(r'set parallel.data to (\d+) or "auto"', mends):
        for value in (data[1], "auto"):
            yield problems(*overrides, f"parallel.data={value}", world_size=world)
    if products := re.search(r"parallel.pipeline x parallel.tensor = ([\d, ]+)", mends):
        for product in map(int, products[1].split(", ")):
            degrees = [
                (f"parallel.pipeline={product // tp}", f"parallel.tensor={tp}")
                for tp in divisors(product)
            ]
            left = [problems(*overrides, *each, world_size=world) for each in degrees]
            yield min(left, key=len)


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("data", ["auto", 1, 2, 3, 4])
@pytest.mark.parametrize("micro", [2, 3])
def test_every_change_that_a_message_proposes_is_valid(
    data: str | int, spare: bool, micro: int
) -> None:
    """48 samples in micro-batches of 2 or 3; 4 accumulation steps, or as many as it takes."""
    batch = (f"train_micro_batch_size_per_gpu={micro}", "train_batch_size=48")
    for world, (pp, tp), accumulation in itertools.product(
        (1, 2, 3, 5, 6, 7, 8, 12), ((1, 2), (2, 2), (3, 4)), (None, 4)
    ):
        degrees = (f"parallel.pipeline={pp}", f"parallel.tensor={tp}", f"parallel.data={data}")
        stated = (f"gradient_accumulation_steps={accumulation}",) * bool(accumulation)
        run = (*batch, *stated, *degrees, f"parallel.spare_ranks={str(spare).lower()}")
        for message in problems(*run, world_size=world):
            if "x parallel.tensor" in message:
                left = list(mended(message, run, world))
                assert left or "Nearest: " in message
                assert not any(left), (message, left)


def test_auto_data_degree_is_what_remains() -> None:
    parallel, stated = ParallelConfig(pipeline=2, tensor=4), StatedBatch(16, 2, None)
    assert find_grid(parallel, stated, World(24, "x")) == Grid(pp=2, dp=3, tp=4)
    assert find_grid(parallel, stated, World(20, "x")) is None


def test_a_world_has_at_least_one_process() -> None:
    with pytest.raises(ConfigError, match=r"world size 0 \(from --world-size\)"):
        World(0, "--world-size")


def test_fp16_needs_a_gpu() -> None:
    assert "set bf16.enabled instead" in only_problem("fp16.enabled=true", world_size=1)
    assert problems("fp16.enabled=true", world_size=1, device_type="cuda") == []
    assert problems("fp16.enabled=true") == [], "without a world the device is not known"


def test_the_batch_is_not_checked_with_wrong_degrees() -> None:
    assert "is not divisible by" in only_problem("parallel.pipeline=3", world_size=8)


def test_divisors_are_all_and_ascending() -> None:
    for number in range(1, 200):
        assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


@pytest.mark.parametrize(
    ("world", "overrides", "grid", "spare"),
    [
        (7, (), Grid(1, 4, 1), 3),  # 16 samples in micro-batches of 2: dp 5, 6 and 7 do not divide
        (8, (), Grid(1, 8, 1), 0),
        (7, ("parallel.tensor=2",), Grid(1, 2, 2), 3),
        (7, ("parallel.tensor=2", "parallel.pipeline=2"), Grid(2, 1, 2), 3),
        (7, ("parallel.data=2",), Grid(1, 2, 1), 5),
    ],
)
def test_spare_ranks_are_those_beyond_the_largest_layout_that_keeps_the_batch(
    tmp_path: Path, world: int, overrides: tuple[str, ...], grid: Grid, spare: int
) -> None:
    file = write(tmp_path / "run.json", small())
    run = load(file, "parallel.spare_ranks=true", *overrides, world_size=world)
    assert (run.grid, run.spare_ranks) == (grid, spare)
    assert (run.batch.train_batch_size, run.batch.micro_batch_size) == (16, 2)
    written = write(tmp_path / "resolved.json", run.as_json())
    again = load(written, world_size=world)
    assert (again.grid, again.spare_ranks) == (grid, spare)


def test_without_spare_ranks_a_number_that_does_not_fit_is_refused() -> None:
    assert "is not a multiple of" in only_problem(world_size=7)


def test_even_with_spare_ranks_one_group_of_pipeline_and_tensor_is_needed() -> None:
    assert only_problem("parallel.spare_ranks=true", "parallel.tensor=4", world_size=3) == (
        "world size 3 (from WORLD_SIZE) is less than parallel.pipeline 1 x data 1 x "
        "parallel.tensor 4 = 4; start at least 4 processes"
    )
    message = only_problem("parallel.spare_ranks=true", world_size=3, train_batch_size=None)
    assert "state train_batch_size" in message

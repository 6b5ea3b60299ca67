"""``train_micro_batch_size_per_gpu`` "auto" is the largest size that the prediction fits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from megaspeed.cli import main
from megaspeed.config.layout import World
from megaspeed.config.loading import parse_config
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.job.job import choose_together
from megaspeed.planning.costs.reserved_memory import reserved_memory
from megaspeed.planning.micro_batch import Choice, choose_micro_batch
from megaspeed.planning.plan import plan
from megaspeed.planning.prediction import predict
from megaspeed.planning.variants import Training
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.devices import DEVICES, Device, device_by_name
from megaspeed.topology.launch import LaunchEnvironment
from tests.config.small import small
from tests.planning.tiny_runs import a100s
from tests.support.machine import limit
from tests.support.rank_pool import RankPool

A100 = DEVICES["a100-80gb"]
KEY = "train_micro_batch_size_per_gpu"


def run_of_size(size: int | str, *, ranks: int = 2, device_type: str = "cuda", **keys: Any) -> Run:
    """Return the small run (16 samples a step) with this size."""
    config = parse_config(small(**{"train_batch_size": 32, KEY: size, **keys}))
    return resolve_run(config, World(ranks, "the test", device_type), name="run")


def needed(run: Run) -> int:
    """Return the upper end of the predicted memory."""
    peak = predict(run).fullest.peak_bytes
    return peak + reserved_memory(run, A100, 8, peak).most


def chosen(memory_bytes: int, at_most: int | None = None, **keys: Any) -> Choice:
    device = replace(A100, memory_bytes=memory_bytes)
    return choose_micro_batch(run_of_size("auto", **keys), "cuda", device, 8, at_most)


def test_the_size_is_the_largest_that_fits_to_the_byte() -> None:
    """A data rank has 16 samples a step."""
    sizes = (1, 2, 4, 8, 16)
    memory = {size: needed(run_of_size(size)) for size in sizes}
    assert sorted(memory.values()) == list(memory.values())
    for smaller, size in zip((None, *sizes), sizes, strict=False):
        choice = chosen(memory[size])
        assert (choice.run.batch.micro_batch_size, choice.smaller) == (size, smaller)
        assert f"micro-batch auto: {size}, the largest size that fits; at most " in choice.sentence
        if smaller is not None:
            assert chosen(memory[size] - 1).run.batch.micro_batch_size == smaller
    none = chosen(memory[1] - 1)
    assert none.run.batch.micro_batch_size == 1 and "although no size fits" in none.sentence
    assert chosen(memory[16], at_most=4).run.batch.micro_batch_size == 4


def test_the_chosen_run_is_that_of_a_file_that_states_the_size() -> None:
    choice = chosen(needed(run_of_size(4)))
    assert choice.run == run_of_size(4) != run_of_size(8)
    again = parse_config(choice.run.as_json())
    assert resolve_run(again, World(2, "the test", "cuda"), name="run") == choice.run


@pytest.mark.parametrize("chunks", [1, 2])
def test_each_pipeline_stage_has_a_micro_batch(chunks: int) -> None:
    """With two chunks on each stage, the run would be refused otherwise."""
    choice = chosen(10**12, parallel={"pipeline": 2, "virtual_stages": chunks}, train_batch_size=6)
    assert choice.run.batch.micro_batch_size == 3
    groups = {"micro_batch_groups": 2} if chunks == 2 else {}
    choice = chosen(
        10**12,
        parallel={"pipeline": 2, "virtual_stages": chunks, **groups},
        train_batch_size=16,
    )
    assert choice.run.batch.gradient_accumulation_steps == 2 * chunks
    odd = chosen(10**12, parallel={"pipeline": 2}, train_batch_size=1)
    assert odd.run.batch.micro_batch_size == 1, "there is only one sample"


def test_a_plan_has_the_size_for_its_device_and_other_changes_state_theirs() -> None:
    memory = needed(run_of_size(4))
    stated = parse_config(small(**{"train_batch_size": 32, KEY: "auto"}))
    training = Training(run=run_of_size("auto"), stated=stated)
    planned = plan(training, a100s(memory_bytes=memory))
    assert planned.run == run_of_size(4) and planned.verdict == "fits"
    settings = replace(training, run=planned.run).settings
    assert training.set_text(replace(settings, zero_stage=1)) == (
        "zero_optimization.stage=1",
        f"{KEY}=4",
    )


def test_the_command_plans_the_size_for_its_device(tmp_path: Path) -> None:
    file, figures = tmp_path / "auto.json", tmp_path / "plan.json"
    file.write_text(json.dumps(small(**{"train_batch_size": 32, KEY: "auto"})))
    for device, size in ((["--device", "t4-16gb"], 16), ([], 16)):
        options = ["--config", str(file), "--world-size", "2", *device, "--json", str(figures)]
        assert main(["plan", *options]) == 0
        assert json.loads(figures.read_text())["batch"]["micro_batch_size"] == size


def test_a_known_gpu_has_its_figures() -> None:
    known = device_by_name("NVIDIA H100 80GB HBM3")
    assert known is not None and known.name == "h100-80gb"
    assert device_by_name("cpu") is None


def choose_on_rank(launch: LaunchEnvironment, run: Run, memory_bytes: list[int]) -> Choice:
    """Choose on one rank. The host of each rank has another memory."""
    with (
        pytest.MonkeyPatch.context() as patch,
        ParallelContext.create(run.grid, launch, timeout_seconds=limit(60)) as context,
    ):
        host = Device(name="host", memory_bytes=memory_bytes[launch.rank])
        patch.setattr(psutil, "virtual_memory", lambda: _Memory(host.memory_bytes))
        return choose_together(run, context, 1, None)


class _Memory:
    def __init__(self, total: int) -> None:
        self.total = total


def test_all_ranks_choose_the_size_for_the_smallest_of_them(pool: RankPool) -> None:
    run = run_of_size("auto", device_type="cpu")
    memory = predict(run_of_size(2, device_type="cpu"), "cpu").fullest.peak_bytes
    for memories in ([memory, 10**15], [10**15, memory]):
        for choice in pool.run(2, choose_on_rank, run, memories):
            assert choice.run == run_of_size(2, device_type="cpu")

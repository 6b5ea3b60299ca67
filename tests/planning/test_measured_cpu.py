"""The device ``cpu``: the values computed from measured figures, and the measurement itself."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import Tensor

from megaspeed.config.layout import World
from megaspeed.config.loading import load_run
from megaspeed.config.resolve import Run
from megaspeed.measurement.cpu_speed import _block, _products, _shapes
from megaspeed.model.attention import Inputs
from megaspeed.model.gpt import Block
from megaspeed.planning.costs.step_time import Rates, predict_step_time
from megaspeed.planning.costs.workload import Cluster, workload_of
from megaspeed.planning.measured_cpu import (
    CpuSpeedError,
    block_run,
    cluster_of,
    measure_cpu,
    small_run,
)
from tests.planning.tiny_runs import FOLDER, tiny
from tests.support.machine import limit
from tests.support.tiny import MOE

FIGURES = {
    "memory_bytes": 1 << 34,
    "products": 1e11,
    "bandwidth": 1e10,
    "optimizer": 5e-9,
    "latency": 1e-4,
    "message_bandwidth": 1e9,
    "block": 0.0,
    "small_step": 0.0,
}


def zero3_run(*overrides: str) -> Run:
    return load_run(FOLDER / "zero3.json", overrides, World(2, "the test"))


def machine(run: Run, pointwise: float, host: float) -> Cluster:
    cluster = cluster_of(run, FIGURES)
    assert cluster.measured is not None
    measured = dataclasses.replace(cluster.measured, pointwise=pointwise, host=host)
    return dataclasses.replace(cluster, measured=measured)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("zero_optimization.stage=1", "parallel.tensor=2"),
        ("model.preset=llama-tiny", "bf16.enabled=true", "parallel.pipeline=2"),
    ],
)
def test_a_machine_is_recovered_from_the_times_that_it_takes(overrides: tuple[str, ...]) -> None:
    run = zero3_run(*overrides)
    made = machine(run, pointwise=2.5, host=2e-3)
    block = Rates(workload_of(block_run(run), "cpu"), made).block().both
    step = predict_step_time(workload_of(small_run(run), "cpu"), made).total
    found = cluster_of(run, {**FIGURES, "block": block, "small_step": step}).measured
    assert found is not None
    assert (found.pointwise, found.host) == pytest.approx((2.5, 2e-3), rel=1e-2)


def test_a_host_that_takes_no_time_is_not_negative() -> None:
    measured = cluster_of(zero3_run(), FIGURES).measured
    assert measured is not None and (measured.pointwise, measured.host) == (0.0, 0.0)


def test_what_is_measured_is_not_the_run() -> None:
    """It measures one block of at most 768 x 1,024 tokens, and runs of another width."""
    wide = zero3_run("model.preset=llama-3-8b", "data.sequence_length=8192")
    for run in (zero3_run(), wide):
        block = block_run(run)
        one, model = block.config.model, run.config.model
        assert one.num_hidden_layers == 1 and one.head_dim == model.head_dim
        assert one.hidden_size == min(768, model.hidden_size)
        tokens = block.batch.micro_batch_size * block.config.data.sequence_length
        assert tokens == min(1024, run.batch.micro_batch_size * run.config.data.sequence_length)
        small = small_run(run)
        assert (small.grid.dp, small.zero_stage) == (2, 3)
        assert small.config.model.hidden_size < model.hidden_size
    assert (one.num_attention_heads, one.num_key_value_heads) == (6, 6)


def test_a_block_of_experts_is_measured_with_all_of_them() -> None:
    """The width of the experts is a multiple of 8 also in the smaller model."""
    changes = {"model": MOE, "bf16": {"enabled": True}, "data": {"sequence_length": 16}}
    run = tiny(world_size=2, **changes).run
    tokens = run.batch.micro_batch_size * run.config.data.sequence_length
    shapes = _shapes(block_run(run), tokens)
    assert shapes.count((tokens * 2 // 8, 48, 32)) == shapes.count((tokens * 2 // 8, 32, 24)) == 8
    assert small_run(run).config.model.expert_width == 48
    _products(block_run(run))()
    _block(block_run(run))()


def test_widths_of_measured_experts_are_multiples_although_the_heads_are_not() -> None:
    """In an earlier version, 5 heads of 12 were a hidden size of 60, which a rule refuses."""
    model = {**MOE, "hidden_size": 96, "head_dim": 12}
    run = tiny(world_size=2, model=model, bf16={"enabled": True}, data={"sequence_length": 16}).run
    small = small_run(run).config.model
    assert (small.num_attention_heads, small.head_dim, small.hidden_size) == (5, 12, 64)
    assert small.expert_width == 16


def test_a_block_with_a_window_is_measured_with_its_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an earlier version, such a block attended to all earlier tokens."""
    masks, forward = [], Block.forward

    def noted(block: Block, x: Tensor, inputs: Inputs) -> Tensor:
        masks.append(inputs.mask)
        return forward(block, x, inputs)

    monkeypatch.setattr(Block, "forward", noted)
    for window in ("null", "16", "64"):
        run = zero3_run("data.sequence_length=64", f"model.sliding_window={window}")
        _block(block_run(run))()
    assert [mask is None for mask in masks] == [True, False, True]
    assert masks[1] is not None
    assert masks[1][0, 0].isfinite().sum(dim=-1).tolist() == [
        min(16, 1 + query) for query in range(64)
    ]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(200)
def test_ranks_that_share_processors_are_measured_together(tmp_path: Path) -> None:
    """There is one processor for two ranks, so each has half of it."""
    processor = str(min(os.sched_getaffinity(0)))
    command = ["taskset", "-c", processor, sys.executable, "-m", "megaspeed.measurement.cpu_speed"]
    command += ["--config", str(FOLDER / "zero1.json"), "--ranks"]
    for _ in range(3):  # other programs may start or end between the two measurements
        alone, shared = (
            json.loads(subprocess.check_output([*command, ranks])) for ranks in ("1", "2")
        )
        share = shared["products"] / alone["products"]
        if 0.3 < share < 0.7:
            break
    assert 0.3 < share < 0.7
    run = zero3_run("parallel.tensor=2", "zero_optimization.stage=1")
    cluster = cluster_of(run, shared)
    step = predict_step_time(workload_of(run, "cpu"), cluster)
    # The bounds are wide, because other programs may run beside the test.
    assert 1e-3 < cluster.device.peak_fp32 < 10
    assert 1 < cluster.device.memory_bandwidth < 1000
    assert min(step.products, step.attention, step.pointwise, step.tp, step.host) > 0
    assert 0.005 < step.total < limit(60)


def test_a_failed_measurement_is_one_line(tmp_path: Path) -> None:
    def failed(program: str) -> str:
        with pytest.raises(CpuSpeedError) as caught:
            measure_cpu(zero3_run(), [program])
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "No such file" in failed(str(tmp_path / "python"))
    assert "exit code 1" in failed("/bin/false")
    assert "could not be measured" in failed("/bin/echo")

"""The device ``cpu``: the values computed from measured figures, and the measurement itself."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megaspeed.config.layout import World
from megaspeed.config.loading import load_run
from megaspeed.config.resolve import Run
from megaspeed.planning.costs.step_time import Rates, predict_step_time
from megaspeed.planning.costs.workload import Cluster, HostTime, workload_of
from megaspeed.planning.measured_cpu import (
    CpuSpeedError,
    block_run,
    cluster_of,
    measure_cpu,
    small_runs,
)
from tests.planning.tiny_runs import FOLDER

FIGURES: dict[str, Any] = {
    "processors": 2,
    "memory_bytes": 1 << 34,
    "products": 1e11,
    "bandwidth": 1e10,
    "attention": [5e10, 4e10],
    "optimizer": 5e-9,
    "messages": {
        kind: [1e-4, 1e9] for kind in ("all_reduce", "all_gather", "reduce_scatter", "send")
    },
    "block": 0.0,
    "small_steps": [0.0, 0.0, 0.0],
}


def run_of(*overrides: str, ranks: int = 2, config: str = "zero3") -> Run:
    return load_run(FOLDER / f"{config}.json", overrides, World(ranks, "the test"))


def machine(run: Run, pointwise: float, host: HostTime) -> Cluster:
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
    run = run_of(*overrides)
    host = HostTime(block=2e-3, micro_batch=3e-3, step=7e-3)
    true = machine(run, 2.5, host)
    steps = [predict_step_time(workload_of(each, "cpu"), true).total for each in small_runs(run)]
    block = Rates(workload_of(block_run(run), "cpu"), true).block().both
    found = cluster_of(run, {**FIGURES, "block": block, "small_steps": steps})
    assert found.measured is not None
    assert found.measured.pointwise == pytest.approx(2.5, rel=1e-3)
    assert dataclasses.astuple(found.measured.host) == pytest.approx(
        dataclasses.astuple(host), rel=1e-2
    )


def test_a_host_that_takes_no_time_is_not_negative() -> None:
    cluster = cluster_of(run_of(), FIGURES)
    assert cluster.measured is not None
    assert dataclasses.astuple(cluster.measured.host) == (0.0, 0.0, 0.0)


def test_what_is_measured_is_not_the_run() -> None:
    """It measures one block of at most 768 x 1,024 tokens, and runs of another width."""
    wide = run_of("model.preset=llama-3-8b", "data.sequence_length=8192")
    for run in (run_of(), wide):
        block = block_run(run)
        one, model = block.config.model, run.config.model
        assert one.num_hidden_layers == 1 and one.head_dim == model.head_dim
        assert one.hidden_size == min(768, model.hidden_size)
        tokens = block.batch.micro_batch_size * block.config.data.sequence_length
        assert tokens == min(1024, run.batch.micro_batch_size * run.config.data.sequence_length)
        assert {(r.grid.dp, r.zero_stage) for r in small_runs(run)} == {(2, 3)}
        assert all(r.config.model.hidden_size != model.hidden_size for r in small_runs(run))
    assert (one.num_attention_heads, one.num_key_value_heads) == (6, 6)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(200)
def test_ranks_that_share_processors_are_measured_together(tmp_path: Path) -> None:
    """There is one processor for two ranks, so each has half of it."""
    processor = str(min(os.sched_getaffinity(0)))
    figures = []
    for ranks in (1, 2):
        module = "megaspeed.measurement.cpu_speed"
        command = ["taskset", "-c", processor, sys.executable, "-m", module]
        command += ["--config", str(FOLDER / "zero1.json"), "--ranks", str(ranks)]
        figures.append(json.loads(subprocess.check_output(command)))
    alone, shared = figures
    assert (alone["processors"], shared["processors"]) == (1, 1)
    assert 0.3 < shared["products"] / alone["products"] < 0.7
    run = run_of("parallel.tensor=2", "zero_optimization.stage=1")
    cluster = cluster_of(run, shared)
    step = predict_step_time(workload_of(run, "cpu"), cluster)
    # The bounds are wide, because other programs may run beside the test.
    assert 1e-3 < cluster.device.peak_fp32 < 10
    assert 1 < cluster.device.memory_bandwidth < 1000
    assert min(step.products, step.attention, step.pointwise, step.tp, step.host) > 0
    assert 0.005 < step.total < 60


def test_a_failed_measurement_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def failed(program: str) -> str:
        monkeypatch.setattr(sys, "executable", program)
        with pytest.raises(CpuSpeedError) as caught:
            measure_cpu(run_of())
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "No such file" in failed(str(tmp_path / "python"))
    assert "it ended with exit code 1" in failed("/bin/false")
    assert "printed no JSON" in failed("/bin/echo")

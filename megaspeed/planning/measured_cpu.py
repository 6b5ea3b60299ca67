"""The device ``cpu``: this machine, measured by a program of about 15 seconds.

    products, attention      operations a second in the shapes of a block
    a block                  the rest of its time is pointwise: norms, activations, sums
    the optimizer's update   seconds for each parameter
    messages                 latency and bandwidth of each collective of gloo
    three small runs         the rest of their steps is time of the host

``megaspeed.measurement.cpu_speed`` is that program. It runs as many processes at the same time as
the run has ranks, because they share cores and memory. It needs torch, so it is another process.
This module states what is measured (``block_run``, ``small_runs``), and computes the arguments of
``predict_step_time`` from the figures. Only parts of the run are measured, never the run itself.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaspeed.config.layout import World
from megaspeed.config.loading import parse_config
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.planning.costs.step_time import Rates, predict_step_time
from megaspeed.planning.costs.workload import Cluster, HostTime, Measured, Wire, workload_of
from megaspeed.topology.devices import Device

_LARGEST_WIDTH, _MOST_TOKENS = 768, 1024
_SMALL_WIDTH, _SMALL_LENGTH, _SMALL_HEADS = 64, 16, 4
SMALL_SIZES = ((1, 2), (5, 2), (5, 6))
"""Blocks and micro-batches of the three small runs."""

_IDLE = HostTime(block=0.0, micro_batch=0.0, step=0.0)
_TURNS = 8  # after them, the figures of the test change by less than 0.1 %
_TIMEOUT_SECONDS = 180.0


class CpuSpeedError(RuntimeError):
    """This machine could not be measured. The text is one line and states why."""


def block_run(run: Run) -> Run:
    """Return the measured run of one block, with the shapes of a micro-batch of the run.

    Rates depend on the shapes, because of caches. So the block has the run's width, but at most
    768, and the tokens of its micro-batch, but at most 1,024.
    """
    model, shape = run.config.model, {"num_hidden_layers": 1}
    length = min(run.config.data.sequence_length, _MOST_TOKENS)
    if model.hidden_size > _LARGEST_WIDTH:
        heads = max(1, _LARGEST_WIDTH // model.head_dim)
        shared = max(1, model.num_attention_heads // model.num_key_value_heads)
        width = heads * model.head_dim
        shape |= {
            "hidden_size": width,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // shared if heads % shared == 0 else heads,
            "intermediate_size": round(model.intermediate_size / model.hidden_size * width),
            "head_dim": model.head_dim,
        }
    rows = min(run.batch.micro_batch_size, max(1, _MOST_TOKENS // length))
    return _changed(run, shape, length, World(1, "the measurement"), rows, 1, zero_stage=1)


def small_runs(run: Run) -> list[Run]:
    """Return the measured small runs: data parallel over all ranks, at the run's ZeRO stage."""
    heads = _SMALL_HEADS
    shared = run.config.model.num_key_value_heads < run.config.model.num_attention_heads
    shape = {
        "vocab_size": 256,
        "hidden_size": _SMALL_WIDTH,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2 if shared else heads,
        "intermediate_size": 4 * _SMALL_WIDTH,
        "head_dim": _SMALL_WIDTH // heads,
    }
    world, zero = World(run.grid.world_size, "the measurement"), run.zero_stage
    return [
        _changed(run, {**shape, "num_hidden_layers": blocks}, _SMALL_LENGTH, world, 1, count, zero)
        for blocks, count in SMALL_SIZES
    ]


def _changed(
    run: Run,
    shape: Mapping[str, int],
    length: int,
    world: World,
    rows: int,
    micro_batches: int,
    zero_stage: int,
) -> Run:
    """Return the run with another model and batch, and a layout with only a data axis."""
    values = run.as_json()
    model = {**values["model"], **shape}
    model.pop("preset", None)
    model["max_position_embeddings"] = max(length, model["max_position_embeddings"])
    if model.get("sliding_window") is not None:
        part = model["sliding_window"] / run.config.data.sequence_length
        model["sliding_window"] = max(1, round(part * length))
    kept = ("bf16", "data_types", "optimizer", "communication_data_type")
    config = parse_config(
        {
            **{key: values[key] for key in kept if key in values},
            "model": model,
            "data": {**values["data"], "sequence_length": length},
            "training": {"steps": 1},
            "zero_optimization": {"stage": zero_stage},
            "parallel": {"gradient_reduction": run.gradient_reduction},
            "train_micro_batch_size_per_gpu": rows,
            "gradient_accumulation_steps": micro_batches,
        }
    )
    return resolve_run(config, world, name=run.name)


def measure_cpu(run: Run) -> tuple[Cluster, tuple[str, ...]]:
    """Measure this machine with as many processes as the run has ranks; takes about 15 seconds.

    Returns:
        The machine, and notes for the user.

    Raises:
        CpuSpeedError: the measurement failed.
    """
    with tempfile.TemporaryDirectory(prefix="megaspeed-cpu-") as folder:
        file = Path(folder) / "run.json"
        file.write_text(json.dumps(run.as_json()), encoding="utf-8")
        ranks = run.grid.world_size
        command = [sys.executable, "-m", "megaspeed.measurement.cpu_speed"]
        command += ["--config", str(file), "--ranks", str(ranks)]
        try:
            program = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            try:
                output, errors = program.communicate(timeout=_TIMEOUT_SECONDS)
            finally:  # not killed, as ``subprocess.run`` does: it ends its ranks
                program.terminate()
                program.wait()
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CpuSpeedError(f"this machine's speed could not be measured: {error}") from error
    code, lines = program.returncode, errors.strip().splitlines()
    reason = lines[-1] if lines else f"it ended with exit code {code}"
    if code:
        raise CpuSpeedError(f"this machine's speed could not be measured: {reason}")
    try:
        figures = json.loads(output)
    except ValueError as error:
        raise CpuSpeedError(f"the measurement printed no JSON: {reason}") from error
    notes = []
    if figures["processors"] < ranks:
        notes.append(
            f"{ranks} ranks share {figures['processors']} processors; the measurement did the same"
        )
    return cluster_of(run, figures), tuple(notes)


def cluster_of(run: Run, figures: Mapping[str, Any]) -> Cluster:
    """Return the machine, from what ``cpu_speed`` measured.

    The time of a block that is neither products nor attention is pointwise, and gives the multiple
    ``Measured.pointwise``. The time of the small runs that the prediction does not explain is the
    host's. With b blocks and m micro-batches, it is step + m (micro_batch + b block). The measured
    block contains time of the host, and the small runs contain pointwise operations. So both are
    computed in turns.

    Args:
        run: the run to be predicted.
        figures: rates in operations or bytes a second, times in seconds.
    """
    rate = figures["products"] / 1e12
    device = Device(
        name="cpu",
        memory_bytes=figures["memory_bytes"],
        peak_fp32=rate,
        peak_16=rate,
        sustained_16=rate,
        memory_bandwidth=figures["bandwidth"] / 1e9,
        processors=1,
    )
    measured = Measured(
        pointwise=0.0,
        attention=tuple(figures["attention"]),
        optimizer=figures["optimizer"],
        messages={kind: Wire(*wire) for kind, wire in figures["messages"].items()},
        host=_IDLE,
    )
    ranks = run.grid.world_size
    cluster = Cluster(device=device, gpus_per_node=ranks, network_bandwidth=0.0, measured=measured)

    def with_(**changes: Any) -> Cluster:
        return replace(cluster, measured=replace(measured, **changes))

    block = workload_of(block_run(run), "cpu")
    small = [workload_of(each, "cpu") for each in small_runs(run)]
    for _ in range(_TURNS):
        without, once = (
            Rates(block, with_(pointwise=pointwise)).block().both for pointwise in (0.0, 1.0)
        )
        pointwise = max(0.0, (figures["block"] - without) / (once - without))
        idle = with_(pointwise=pointwise, host=_IDLE)
        left = [
            max(0.0, seconds - predict_step_time(work, idle).total)
            for seconds, work in zip(figures["small_steps"], small, strict=True)
        ]
        measured = replace(measured, pointwise=pointwise, host=_host(*left))
    return with_()


def _host(one: float, two: float, three: float) -> HostTime:
    """Return the time of the host in the steps of the three small runs."""
    (few, count), (many, _), (_, larger) = SMALL_SIZES
    block = max(0.0, (two - one) / ((many - few) * count))
    micro_batch = max(0.0, (three - two) / (larger - count) - many * block)
    step = max(0.0, one - count * (micro_batch + few * block))
    return HostTime(block=block, micro_batch=micro_batch, step=step)

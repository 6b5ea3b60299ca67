"""The device ``cpu``: this machine, measured by a program of a few seconds.

    products        operations a second, in the shapes of a block
    bandwidth       bytes a second of memory
    a block         the rest of its time is pointwise: norms, activations, sums
    optimizer       seconds for each parameter
    messages        latency and bandwidth of gloo
    a small run     the rest of its steps is time of the host: Python and torch's dispatcher

``megaspeed.measurement.cpu_speed`` is that program. It runs as many processes at the same time as
the run has ranks, because they share cores and memory. It needs torch, so it is another process.
This module states what is measured, and computes the arguments of ``predict_step_time`` from it.
Only parts of the run are measured, never the run itself.
"""

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megaspeed.config.layout import World
from megaspeed.config.loading import parse_config
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.config.rules import EXPERT_MULTIPLE
from megaspeed.planning.costs.step_time import Rates, predict_step_time
from megaspeed.planning.costs.workload import Cluster, Measured, workload_of
from megaspeed.topology.devices import Device

_LARGEST_WIDTH, _MOST_TOKENS = 768, 1024
_TURNS = 8  # after them, the figures of the test change by less than 0.1 %
_TIMEOUT_SECONDS = 180.0


class CpuSpeedError(RuntimeError):
    """This machine could not be measured. The text is one line and states why."""


def block_run(run: Run) -> Run:
    """Return the measured run of one block, with the shapes of a micro-batch of the run.

    Rates depend on the shapes, because of caches. So the block has the run's width, but at most
    768, and the tokens of its micro-batch, but at most 1,024.
    """
    length = min(run.config.data.sequence_length, _MOST_TOKENS)
    rows = min(run.batch.micro_batch_size, max(1, _MOST_TOKENS // length))
    width = min(run.config.model.hidden_size, _LARGEST_WIDTH)
    return _changed(run, width, {"num_hidden_layers": 1}, length, rows, ranks=1)


def small_run(run: Run) -> Run:
    """Return the measured small run: data parallel over all ranks, at the run's ZeRO stage."""
    shape = {"vocab_size": 256, "num_hidden_layers": 4}
    return _changed(run, 64, shape, 16, 1, ranks=run.grid.world_size)


def _changed(
    run: Run, width: int, shape: Mapping[str, int], length: int, rows: int, *, ranks: int
) -> Run:
    """Return the run with another model and 4 micro-batches, and with only a data axis."""
    values, model = run.as_json(), run.config.model
    heads = max(1, width // model.head_dim)
    shared = max(1, model.num_attention_heads // model.num_key_value_heads)
    hidden = heads * model.head_dim
    if model.num_experts is not None:
        hidden = _multiple(hidden)
    factor = hidden / model.hidden_size
    values["model"] |= {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // shared if heads % shared == 0 else heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": max(length, model.max_position_embeddings),
        "intermediate_size": round(model.intermediate_size * factor),
        **shape,
    }
    values["model"].pop("preset", None)
    if model.num_experts is not None:
        values["model"]["moe_intermediate_size"] = _multiple(model.expert_width * factor)
    if model.sliding_window is not None:
        values["model"]["sliding_window"] = min(model.sliding_window, length)
    kept = ("model", "bf16", "data_types", "optimizer", "communication_data_type")
    config = parse_config(
        {
            **{key: values[key] for key in kept if key in values},
            "data": {**values["data"], "sequence_length": length},
            "training": {"steps": 1},
            "zero_optimization": {"stage": run.zero_stage},
            "parallel": {"gradient_reduction": run.gradient_reduction},
            "train_micro_batch_size_per_gpu": rows,
            "gradient_accumulation_steps": 4,
        }
    )
    return resolve_run(config, World(ranks, "the measurement"), name=run.name)


def _multiple(width: float) -> int:
    """Return the nearest width that the products of experts accept in any precision."""
    return max(1, round(width / EXPERT_MULTIPLE)) * EXPERT_MULTIPLE


def measure_cpu(run: Run, program: Sequence[str]) -> Cluster:
    """Measure this machine with as many processes as the run has ranks; takes a few seconds.

    Args:
        program: the command that measures it, and prints the figures.

    Raises:
        CpuSpeedError: the measurement failed.
    """
    with tempfile.TemporaryDirectory(prefix="megaspeed-cpu-") as folder:
        file = Path(folder) / "run.json"
        file.write_text(json.dumps(run.as_json()), encoding="utf-8")
        command = [*program, "--config", str(file), "--ranks", str(run.grid.world_size)]
        try:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            try:
                output, errors = process.communicate(timeout=_TIMEOUT_SECONDS)
            finally:  # not killed, as ``subprocess.run`` does: it ends its ranks
                process.terminate()
                process.wait()
            if process.returncode:
                reason = errors.strip().rpartition("\n")[-1] or f"exit code {process.returncode}"
                raise ValueError(reason)
            return cluster_of(run, json.loads(output))
        except (OSError, subprocess.TimeoutExpired, ValueError) as error:
            raise CpuSpeedError(f"this machine's speed could not be measured: {error}") from error


def cluster_of(run: Run, figures: Mapping[str, float]) -> Cluster:
    """Return the machine, from what ``cpu_speed`` measured.

    The time of a block that the prediction does not explain is pointwise, and gives the multiple
    ``Measured.pointwise``. That of the small run is the host's, the same for each layer and
    micro-batch. The measured block contains time of the host, and the small run contains pointwise
    operations. So both are computed in turns.

    Args:
        run: the run to be predicted.
        figures: rates in operations or bytes a second, times in seconds.
    """
    rate = figures["products"] / 1e12
    device = Device(
        name="cpu",
        memory_bytes=int(figures["memory_bytes"]),
        peak_fp32=rate,
        peak_16=rate,
        sustained_16=rate,
        memory_bandwidth=figures["bandwidth"] / 1e9,
        processors=1,
    )
    block, small = workload_of(block_run(run), "cpu"), workload_of(small_run(run), "cpu")
    layers = small.micro_batches * (small.model.num_hidden_layers + 2)
    known = ("optimizer", "latency", "message_bandwidth")
    measured = Measured(pointwise=0.0, host=0.0, **{name: figures[name] for name in known})

    def cluster(**changes: float) -> Cluster:
        return Cluster(
            device=device,
            gpus_per_node=run.grid.world_size,
            network_bandwidth=0.0,
            measured=replace(measured, **changes),
        )

    def block_seconds(pointwise: float) -> float:
        return Rates(block, cluster(pointwise=pointwise)).block().both

    for _ in range(_TURNS):
        without, once = block_seconds(0.0), block_seconds(1.0)
        pointwise = max(0.0, (figures["block"] - without) / (once - without))
        measured = replace(measured, pointwise=pointwise)
        idle = predict_step_time(small, cluster(host=0.0)).total
        measured = replace(measured, host=max(0.0, figures["small_step"] - idle) / layers)
    return cluster()

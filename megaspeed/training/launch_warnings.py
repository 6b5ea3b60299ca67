"""Warnings about launches that work, but waste speed or ignore what was asked for."""

import math
from collections.abc import Iterator

from megaspeed.config.dropout_cost import dropout_warning
from megaspeed.config.resolve import Run
from megaspeed.topology.launch import LaunchEnvironment


def launch_warnings(
    launch: LaunchEnvironment,
    run: Run,
    *,
    visible_gpus: int,
    has_bf16: bool,
    processors: int,
    threads: int,
    is_torchrun: bool = False,
) -> list[str]:
    """One warning for each such problem, with what to change.

    Args:
        launch: how this process was started.
        run: the resolved run.
        visible_gpus: how many GPUs this process sees.
        has_bf16: whether the GPU of this process supports bf16; false without a GPU.
        processors: number of processors of this machine.
        threads: number of CPU threads that torch uses in this process.
        is_torchrun: whether torchrun started it.
    """
    warnings = [
        *_one_gpu_a_rank(launch, visible_gpus),
        *_tensor_axis_in_one_machine(launch, run),
        *dropout_warning(run),
    ]
    if has_bf16 and not {"bf16", "fp16"} & run.config.model_fields_set:
        warnings.append(
            "the configuration states no precision, so the run trains in fp32, but this GPU "
            "computes in bf16 many times as fast (H100: 989 TFLOP/s, fp32 67) and with half the "
            "memory for activations: set bf16.enabled=true, or bf16.enabled=false if fp32 is meant"
        )
    if is_torchrun and run.config.training.restart:
        warnings.append(
            "training.restart has no effect under torchrun, which restarts ranks by itself: start "
            f"torchrun with --max-restarts {run.config.training.restart}"
        )
    fair = processors // launch.local_world_size
    if run.config.zero_optimization.offloads_optimizer and threads == 1 and fair > 1:
        warnings.append(
            "the optimizer runs on the CPU (zero_optimization.offload_optimizer) with 1 thread a "
            f"rank, but this machine has {processors} processors for {launch.local_world_size} "
            f"ranks, so a step takes longer than it must: export OMP_NUM_THREADS={fair} (torchrun "
            "sets it to 1)"
        )
    return warnings


def _one_gpu_a_rank(launch: LaunchEnvironment, visible_gpus: int) -> Iterator[str]:
    ranks = launch.local_world_size
    if launch.source == "SLURM_*" and ranks > 1 and visible_gpus == 1:
        yield (
            f"{ranks} ranks run on this machine, but srun shows each of them only its own GPU (as "
            "--gpus-per-task=1 does), so NCCL may not use NVLink between them: replace it with "
            f"--gpus-per-node={ranks}"
        )


def _tensor_axis_in_one_machine(launch: LaunchEnvironment, run: Run) -> Iterator[str]:
    ranks, tp = launch.local_world_size, run.grid.tp
    if ranks < launch.world_size and ranks % tp != 0:
        yield (
            f"parallel.tensor is {tp}, and {ranks} ranks run on this machine, so tensor groups "
            f"cross machines. A rank sends about {_tensor_bytes(run) / 1e9:.3g} GB a step over tp, "
            "and each block waits for this four times. Choose a parallel.tensor that divides "
            f"{ranks}, and let pp or dp cross; megaspeed doctor measures what each link carries"
        )


def _tensor_bytes(run: Run) -> int:
    """Bytes a rank sends per step: 4 all-reduces a block and micro-batch, each 2 (n-1)/n of h."""
    config, tp = run.config, run.grid.tp
    number_bytes = 4 if run.precision == "fp32" else 2
    tokens = run.batch.micro_batch_size * config.data.sequence_length
    hidden_bytes = tokens * config.model.hidden_size * number_bytes
    blocks = math.ceil(config.model.num_hidden_layers / run.grid.pp)
    messages = 4 * blocks * run.batch.gradient_accumulation_steps
    return messages * hidden_bytes * 2 * (tp - 1) // tp

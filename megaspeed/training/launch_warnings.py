"""Warnings about launches that work, but waste much of the machine's speed."""

import math

from megaspeed.config.resolve import Run
from megaspeed.topology.launch import LaunchEnvironment


def launch_warnings(
    launch: LaunchEnvironment, run: Run, *, visible_gpus: int, processors: int, threads: int
) -> list[str]:
    """One warning for each such problem, with what to change.

    Args:
        launch: how this process was started.
        run: the resolved run.
        visible_gpus: how many GPUs this process sees.
        processors: how many this machine has.
        threads: how many torch uses on the CPU in this process.
    """
    warnings = []
    ranks = launch.local_world_size
    if launch.source == "SLURM_*" and ranks > 1 and visible_gpus == 1:
        warnings.append(
            f"{ranks} ranks run on this machine, but srun shows each of them only its own GPU (as "
            "--gpus-per-task=1 does), so NCCL may not use NVLink between them: replace it by "
            f"--gpus-per-node={ranks}"
        )
    tp = run.grid.tp
    if ranks < launch.world_size and ranks % tp != 0:
        warnings.append(
            f"parallel.tensor is {tp}, and {ranks} ranks run on this machine, so tensor groups "
            f"cross machines. A rank sends about {_tensor_bytes(run) / 1e9:.3g} GB a step over tp, "
            "and waits for it four times in each block. Choose a parallel.tensor that divides "
            f"{ranks}, and let pp or dp cross; megaspeed doctor measures what each link carries"
        )
    fair = processors // ranks
    if run.config.zero_optimization.offloads_optimizer and threads == 1 and fair > 1:
        warnings.append(
            "the optimizer runs on the CPU (zero_optimization.offload_optimizer) with 1 thread a "
            f"rank, but this machine has {processors} processors for {ranks} ranks, so a step "
            f"takes longer than it must: export OMP_NUM_THREADS={fair} (torchrun sets it to 1)"
        )
    return warnings


def _tensor_bytes(run: Run) -> int:
    """What a rank sends for the all-reduces of its blocks: 4 h a micro-batch, each 2 (n-1)/n."""
    config, tp = run.config, run.grid.tp
    number_bytes = 4 if run.precision == "fp32" else 2
    tokens = run.batch.micro_batch_size * config.data.sequence_length
    hidden_bytes = tokens * config.model.hidden_size * number_bytes
    blocks = math.ceil(config.model.num_hidden_layers / run.grid.pp)
    messages = 4 * blocks * run.batch.gradient_accumulation_steps
    return messages * hidden_bytes * 2 * (tp - 1) // tp

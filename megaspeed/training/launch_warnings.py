"""Warnings about launches that work, but waste much of the machine's speed."""

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
    fair = processors // ranks
    if run.config.zero_optimization.offloads_optimizer and threads == 1 and fair > 1:
        warnings.append(
            "the optimizer runs on the CPU (zero_optimization.offload_optimizer) with 1 thread a "
            f"rank, but this machine has {processors} processors for {ranks} ranks, so a step "
            f"takes longer than it must: export OMP_NUM_THREADS={fair} (torchrun sets it to 1)"
        )
    return warnings

"""What rank 0 prints before the first step: layout, batch, model, kernels, and warnings.

3d: pp 2 x dp 2 x tp 2 = 8 ranks on cpu, ZeRO-3, fp32
step: 32 samples of 128 tokens; each data rank takes 4 micro-batches of 4, 1f1b
model: 1,082,112 parameters, 7.041 MFLOP a token
attention: scaled_dot_product_attention, fused
files: runs/3d
"""

from collections.abc import Iterator

import torch

from megaspeed.config.resolve import Run, describe_recomputation, dropout_warning
from megaspeed.model.documents import attends_without_mask
from megaspeed.model.gpt import DTYPES
from megaspeed.model.parameters import training_flops_per_token
from megaspeed.pipeline.partition import parameters_of_stages
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.metrics import device_name, peak_flops_per_second
from megaspeed.units import counted


def banner(run: Run, device: torch.device) -> Iterator[str]:
    """Yield lines that describe a run before its first step. ``megaspeed plan`` has the rest."""
    grid, batch, parallel = run.grid, run.batch, run.config.parallel
    yield (
        f"{run.name}: {grid} = {counted(grid.world_size, 'rank')} on {device_name(device)}, "
        f"ZeRO-{run.zero_stage}, {run.precision}"
        + (", sequence parallelism" if run.sequence_parallel else "")
    )
    yield (
        f"step: {batch.train_batch_size:,} samples of {run.config.data.sequence_length:,} tokens; "
        f"each data rank takes {counted(batch.gradient_accumulation_steps, 'micro-batch')} of "
        f"{batch.micro_batch_size:,}" + (f", {parallel.schedule}" if grid.pp > 1 else "")
    )
    flops = training_flops_per_token(run.config.model, run.config.data.sequence_length)
    peak = peak_flops_per_second(device, run.precision)
    yield (
        f"model: {sum(parameters_of_stages(run)):,} parameters, {flops / 1e6:,.4g} MFLOP a token"
        + ("" if peak is None else f"; MFU of {peak / 1e12:,.1f} TFLOP/s a rank (dense)")
    )
    yield f"attention: {describe_attention(run, device)}"
    if parallel.activation_checkpointing != "none":
        yield f"activations: {describe_recomputation(parallel)}"
    services = "".join(f", {service}" for service in run.config.training.report_to)
    yield f"files: {run.run_dir}{services}"


def describe_attention(run: Run, device: torch.device) -> str:
    """Describe which attention kernel this run uses, and if it is not the fastest one, why."""
    model, data = run.config.model, run.config.data
    if model.attention_dropout > 0:
        return (
            f"written out, not fused, because model.attention_dropout is {model.attention_dropout} "
            "(a fused kernel would drop different elements at each layout)"
        )
    fused = "scaled_dot_product_attention, fused"
    if data.reset_at_documents:
        key = "data.reset_at_documents"
    elif model.sliding_window is not None and model.sliding_window < data.sequence_length:
        key = "model.sliding_window"
    else:
        return fused
    if attends_without_mask(model, device, DTYPES[run.precision]):
        return f"FlashAttention, without a mask for {key}"
    return f"{fused}, with a mask for {key} (so not FlashAttention)"


def launch_warnings(
    launch: LaunchEnvironment,
    run: Run,
    *,
    visible_gpus: int,
    has_bf16: bool,
    processors: int,
    threads: int,
    torchrun_restarts: int | None = None,
) -> list[str]:
    """Return warnings about a launch that works, but is slow or ignores a key, with remedies.

    ``visible_gpus`` is the number of GPUs that this process sees, and ``has_bf16`` whether they
    compute in bf16. ``processors`` is the number of processors of this machine, and ``threads`` the
    number of torch's threads in this process, which may run on ``numa_nodes`` NUMA nodes.
    ``torchrun_restarts`` is None without torchrun.
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
    restarts = run.config.training.restart
    if torchrun_restarts is not None and torchrun_restarts < restarts:
        warnings.append(
            "training.restart has no effect under torchrun, which restarts ranks by itself: start "
            f"torchrun with --max-restarts {restarts}"
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
            f"parallel.tensor is {tp}, but {ranks} ranks run on this machine, so tensor groups "
            "cross machines, and each block waits for them four times a micro-batch. Choose a "
            f"parallel.tensor that divides {ranks}, and let pp or dp cross; megaspeed plan "
            "predicts the traffic, and megaspeed doctor measures what each link carries"
        )

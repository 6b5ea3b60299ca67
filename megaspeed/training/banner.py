"""What rank 0 prints before the first step: layout, pipeline stages, kernels, and warnings.

    3d: pp 2 x dp 2 x tp 2 = 8 ranks on cpu, ZeRO-3, fp32
    step: 32 samples of 128 tokens; each data rank takes 4 micro-batches of 4, 1f1b
    stage  layers                 parameters  weights      peak  dp 0 | dp 1
        0  embedding, blocks 0-2     883,584  3.4 MiB  21.1 MiB  0 1 | 2 3
        1  block 3, head             198,528  0.8 MiB  10.4 MiB  4 5 | 6 7
    peak: predicted memory of one rank, as in megaspeed plan; only tensors
    attention: scaled_dot_product_attention, fused
    operations: 7.041 MFLOP a token
    files: runs/3d

The columns ``dp 0``, ``dp 1``, ... list the tensor ranks of each data rank.
"""

import time
from collections.abc import Iterator, Sequence

import torch
from rich.console import Console
from rich.table import Table

from megaspeed.config.resolve import Precision, Run, describe_recomputation, dropout_warning
from megaspeed.model.documents import attends_without_mask
from megaspeed.model.gpt import DTYPES
from megaspeed.model.parameters import layer_count, training_flops_per_token
from megaspeed.pipeline.partition import layers_of_stages, parameters_of_stages
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.console import COLUMNS
from megaspeed.training.metrics import device_name, peak_flops_per_second
from megaspeed.units import counted

_PRODUCT_SIZE = 384
_WORTH_A_NOTE = 1.2
_MOST_STAGES = 6
_MOST_DATA_RANKS = 4


def banner(run: Run, device: torch.device) -> Iterator[str | Table]:
    """Yield lines and a table that describe a run before its first step: at most 15 lines, if none
    has more than 80 columns.
    """
    from megaspeed.planning.prediction import predict_peaks  # only rank 0 prints a banner

    grid, batch, parallel = run.grid, run.batch, run.config.parallel
    on = device_name(device)
    micro_batches = batch.gradient_accumulation_steps
    yield (
        f"{run.name}: {grid} = {counted(grid.world_size, 'rank')} on {on}, "
        f"ZeRO-{run.zero_stage}, {run.precision}"
        + (", sequence parallelism" if run.sequence_parallel else "")
    )
    yield (
        f"step: {batch.train_batch_size:,} samples of {run.config.data.sequence_length:,} tokens; "
        f"each data rank takes {counted(micro_batches, 'micro-batch')} of "
        f"{batch.micro_batch_size:,}" + (f", {parallel.schedule}" if grid.pp > 1 else "")
    )
    yield _stage_table(run, predict_peaks(run))
    yield "peak: predicted memory of one rank, as in megaspeed plan; only tensors"
    yield f"attention: {describe_attention(run, device)}"
    if parallel.activation_checkpointing != "none":
        yield f"activations: {describe_recomputation(parallel)}"
    yield f"operations: {_describe_operations(run, device, on)}"
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


def _describe_operations(run: Run, device: torch.device, device_name: str) -> str:
    flops = training_flops_per_token(run.config.model, run.config.data.sequence_length)
    count = f"{flops / 1e6:,.4g} MFLOP a token"
    if device.type == "cpu":
        slower = 1.0 if run.precision == "fp32" else time_of_products(run.precision)
        if slower < _WORTH_A_NOTE:
            return count
        return (
            f"{count}; a product takes {slower:.1f} times as long in {run.precision} as in fp32 on "
            "this CPU, so fp32 would be faster"
        )
    peak = peak_flops_per_second(device, run.precision)
    if peak is None:
        return f"{count}; no MFU, because the peak of {device_name} in {run.precision} is unknown"
    return f"{count}; MFU of {peak / 1e12:,.1f} TFLOP/s a rank (data sheet, dense)"


def time_of_products(precision: Precision) -> float:
    """Return how many times as long a product takes in this precision as in fp32, on this CPU.

    CPUs with AVX512-BF16 but without AMX may be slower in bf16. In bf16 this measurement takes
    10 ms.
    """

    def seconds(dtype: torch.dtype) -> float:
        a = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE, dtype=dtype)
        a @ a  # not timed: the first product of a dtype also makes its kernel
        times = []
        for _ in range(5):
            start = time.perf_counter()
            a @ a
            times.append(time.perf_counter() - start)
        return min(times)

    return seconds(DTYPES[precision]) / seconds(torch.float32)


def _stage_table(run: Run, predicted_peaks: Sequence[int]) -> Table:
    """Return a row for each pipeline stage. If there are many, only the first ones and the last.

    The last column has the ranks by data rank. If this is too wide, it has the first and the last.
    """
    table = _table(run, predicted_peaks, run.grid.dp <= _MOST_DATA_RANKS)
    if Console(width=1000).measure(table).maximum > COLUMNS:
        table = _table(run, predicted_peaks, False)
    return table


def _table(run: Run, predicted_peaks: Sequence[int], by_data_rank: bool) -> Table:
    layers, parameters = layers_of_stages(run), parameters_of_stages(run)
    element = DTYPES[run.precision].itemsize
    table = Table(box=None, pad_edge=False, header_style="")
    table.add_column("stage", justify="right")
    table.add_column("layers")
    for name in ("parameters", "weights", "peak"):
        table.add_column(name, justify="right", no_wrap=True)  # a terminal never cuts a digit
    groups = run.grid.dp if by_data_rank else 1
    size = run.grid.dp * run.grid.tp // groups
    table.add_column(" | ".join(f"dp {dp}" for dp in range(groups)) if by_data_rank else "ranks")
    for stage in _shown(run.grid.pp, _MOST_STAGES):
        if stage is None:
            table.add_row("...")
            continue
        table.add_row(
            str(stage),
            _describe_layers(layers[stage], layer_count(run.config.model)),
            f"{parameters[stage]:,}",
            _mebibytes(element * parameters[stage]),
            _mebibytes(predicted_peaks[stage]),
            " | ".join(_ranks((stage * groups + each) * size, size) for each in range(groups)),
        )
    return table


def _ranks(first: int, count: int) -> str:
    """Return neighbouring ranks: "0-3"."""
    return str(first) if count == 1 else f"{first}{' ' if count == 2 else '-'}{first + count - 1}"


def _shown(count: int, most: int) -> list[int | None]:
    """Return the indices 0 to ``count`` - 1, shortened to at most ``most`` entries.

    A shortened list has the first indices, None for the omitted ones, and the last index.
    """
    if count <= most:
        return list(range(count))
    return [*range(most - 2), None, count - 1]


def _mebibytes(number: int) -> str:
    return f"{number / 2**30:,.1f} GiB" if number >= 2**30 else f"{number / 2**20:,.1f} MiB"


def _describe_layers(layers: range, count: int) -> str:
    names = []
    if 0 in layers:
        names.append("embedding")
    blocks = [index - 1 for index in layers if 0 < index < count - 1]
    if blocks:
        names.append(
            f"blocks {blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else f"block {blocks[0]}"
        )
    if count - 1 in layers:
        names.append("head")
    return ", ".join(names)


def launch_warnings(
    launch: LaunchEnvironment,
    run: Run,
    *,
    visible_gpus: int,
    has_bf16: bool,
    processors: int,
    threads: int,
    numa_nodes: int = 1,
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
    offloads = run.config.zero_optimization.offloads_optimizer
    offload = "the optimizer runs on the CPU (zero_optimization.offload_optimizer)"
    if offloads and threads == 1 and fair > 1:
        warnings.append(
            f"{offload} with 1 thread a rank, but this machine has {processors} processors for "
            f"{launch.local_world_size} ranks, so a step takes longer than it must: export "
            f"OMP_NUM_THREADS={fair} (torchrun sets it to 1)"
        )
    if offloads and numa_nodes > 1 and run.grid.world_size > 1:
        warnings.append(
            f"{offload}, and this rank may run on any of {numa_nodes} NUMA nodes, so its states "
            "may be in memory far from its processors and its GPU: start the ranks with torchrun "
            "--numa-binding node"
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

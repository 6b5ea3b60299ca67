"""Measure the speed of this machine's processors, and print it as JSON.

    python -m megaspeed.measurement.cpu_speed --config ds_configs/zero1.json --ranks 2

All ranks measure the same at the same time, because they share cores and memory. Operations are
measured in the process's own CPU time, so another program on the machine does not disturb them. If
there are fewer processors than ranks, each rank has a part of one, and this time is multiplied.
Messages and steps are measured in wall time. Their first quartile counts, because other programs
can only make them slower.

``planning.measured_cpu`` states the shapes, and predicts step times from the figures.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaspeed.config.document import add_config_options
from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import World
from megaspeed.config.loading import load_run
from megaspeed.config.resolve import Run
from megaspeed.measurement.local_ranks import RanksFailed, run_on_ranks
from megaspeed.model.attention import RotaryAngles, window_mask
from megaspeed.model.gpt import DTYPES, Block
from megaspeed.model.micro_batch import MicroBatch
from megaspeed.planning.costs.network_time import HOPS
from megaspeed.planning.costs.workload import (
    Message,
    Wire,
    attended_tokens,
    attention_flops,
    block_products,
    workload_of,
)
from megaspeed.planning.measured_cpu import block_run, small_runs
from megaspeed.supervision.process_end import end_with_parent, ended_on_termination
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.launch import LaunchEnvironment, usable_processors
from megaspeed.training.rank_model import make_optimizer
from megaspeed.training.worker import Worker
from megaspeed.zero.reductions import sum_of_squares

_TIMEOUT_SECONDS = 150.0
_ROUNDS = range(3, 8)
_SECONDS, _SECONDS_OF_ALL = 0.07, 5.0
"""A round repeats each operation for at least the first time. The number of rounds, 3 to 7, is such
that single calls of all operations take at most the second time in all rounds, if 3 suffice."""
_LARGE_BYTES = 2 << 20
_REPEATS_OF_MESSAGES = 32
_STEPS, _WARM_UP_STEPS = 16, 4
_ELEMENTS = 1 << 24
"""Elements of a tensor that is read or written once: 64 MiB in fp32, more than a core's cache."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures. The exit code is 2 if the run is wrong, 1 if a rank failed."""
    parser = argparse.ArgumentParser(description="Measure the speed of this machine's processors")
    add_config_options(parser)
    parser.add_argument("--ranks", type=int, required=True, help="processes at the same time")
    options = parser.parse_args(arguments)
    end_with_parent(os.getppid())
    try:
        run = load_run(options.config, options.overrides, World(options.ranks, "--ranks"))
        with ended_on_termination(), tempfile.TemporaryDirectory(prefix="megaspeed-cpu-") as folder:
            figures = run_on_ranks(
                measure_rank,
                run,
                world_size=options.ranks,
                device_type="cpu",
                log=Path(folder) / "log",
                timeout_seconds=_TIMEOUT_SECONDS,
            )
    except KeyboardInterrupt:
        return 1
    except (ConfigError, RanksFailed) as error:
        sys.stderr.write(f"{error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    sys.stdout.write(json.dumps(figures[0]) + "\n")
    return 0


def measure_rank(launch: LaunchEnvironment, run: Run) -> dict[str, Any]:
    """Return the figures of this machine, the same on all ranks: means over the ranks.

    The steps of the small runs are those of the slowest rank. Rates are in operations or bytes a
    second, times in seconds.
    """
    small, block = small_runs(run), block_run(run)
    work, model = workload_of(block, "cpu"), block.config.model
    length = work.sequence_length
    kept = attended_tokens(model, length) / length
    attention_flops_kept = kept * attention_flops(model, length, work.tokens, 1)
    products = 3 * sum(product.flops for product in block_products(model, work.tokens, 1))
    grid = small[0].grid  # all ranks are data ranks
    with ParallelContext.create(grid, launch, timeout_seconds=_TIMEOUT_SECONDS) as context:
        group = context.world_group
        times = _wall_times(_cpu_seconds(_operations(block), group), group)
        messages = _messages(group) if launch.world_size > 1 else {}
        steps = [_step_seconds(each, context) for each in small]
    return {
        "processors": usable_processors(),
        "memory_bytes": psutil.virtual_memory().total // launch.world_size,
        "products": products / times["products"],
        "bandwidth": 3 * 4 * _ELEMENTS / times["bandwidth"],
        "attention": [
            attention_flops_kept / times["attention"],
            2.5 * attention_flops_kept / times["attention_backward"],
        ],
        "block": times["block"],
        "optimizer": times["optimizer"] / _ELEMENTS,
        "messages": messages,
        "small_steps": steps,
    }


def _operations(run: Run) -> dict[str, Callable[[], object]]:
    """Return the name of each figure -> the measured operation, in the shapes of ``block_run``."""
    torch.manual_seed(0)
    model, data, rows = run.config.model, run.config.data, run.batch.micro_batch_size
    length, dtype = data.sequence_length, DTYPES[run.precision]
    mask, window = None, model.sliding_window
    if window is not None and window < length:
        mask = window_mask(length, window, dtype, torch.device("cpu"))

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype)

    products = [
        (random(m, k), random(n, k), random(m, n))
        for m, n, k in block_products(model, rows * length, 1)
    ]

    def multiply() -> None:
        for x, weight, gradient in products:
            nn.functional.linear(x, weight)
            gradient @ weight
            gradient.t() @ x

    heads, groups = model.num_attention_heads, model.num_key_value_heads
    q, k, v = (random(rows, length, each, model.head_dim) for each in (heads, groups, groups))
    attend, attend_back = _attention(q, k, v, mask)
    block = Block(model, name="blocks.0", seed=0).to(dtype).train()
    for parameter in block.parameters():
        parameter.grad = torch.zeros_like(parameter)  # gradients are added to it
    x = random(rows, length, model.hidden_size).requires_grad_()
    of_x, samples, angles = random(*x.shape), torch.arange(rows), None
    if model.positions == "rotary":
        angles = RotaryAngles(model).of(None, length, dtype, x.device)

    def both_passes() -> None:
        x.grad = None
        block(x, samples, angles, mask).backward(of_x)

    a, b, c = (torch.randn(_ELEMENTS) for _ in range(3))
    return {
        "products": multiply,
        "attention": attend,
        "attention_backward": attend_back,
        "block": both_passes,
        "bandwidth": lambda: torch.add(a, b, out=c),
        "optimizer": _update(run, dtype),
    }


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return the forward and backward of the kernel, for (B, S, heads, K)."""
    q, k, v = (each.transpose(1, 2).requires_grad_() for each in (q, k, v))
    attend = partial(
        nn.functional.scaled_dot_product_attention,
        *(q, k, v),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    mixed = attend()
    gradient = torch.randn_like(mixed)
    return attend, lambda: torch.autograd.grad(mixed, (q, k, v), gradient, retain_graph=True)


def _update(run: Run, dtype: torch.dtype) -> Callable[[], object]:
    """The passes over all parameters in a step: the sum of squares of the gradients, clipping,
    AdamW, a copy of the new weights, and gradients set to zero."""
    master, total = torch.randn(_ELEMENTS), torch.randn(_ELEMENTS)
    weights = torch.empty(_ELEMENTS, dtype=dtype)
    master.grad = total
    optimizer = make_optimizer([{"params": [master]}], run.config.optimizer)

    def update() -> None:
        sum_of_squares([total])
        total.mul_(1.0)
        optimizer.step()
        weights.copy_(master)
        total.zero_()

    return update


def _cpu_seconds(
    operations: Mapping[str, Callable[[], object]], group: dist.ProcessGroup
) -> dict[str, float]:
    """Return the CPU seconds of one call of each operation, the median of several rounds.

    In each round, all operations are measured one after the other, so that a change of the
    machine's speed changes all of them. All ranks measure the same operation at the same time.
    """
    times: dict[str, list[float]] = {name: [] for name in operations}
    began = time.perf_counter()
    for operation in operations.values():
        operation()
    once = _slowest(time.perf_counter() - began, group)
    rounds = min(max(_ROUNDS.start, int(_SECONDS_OF_ALL / once)), _ROUNDS.stop - 1)
    for _, (name, operation) in itertools.product(range(rounds), operations.items()):
        dist.barrier(group)
        start, began, repeats = time.process_time(), time.perf_counter(), 0
        while repeats == 0 or time.perf_counter() - began < _SECONDS:
            operation()
            repeats += 1
        times[name].append((time.process_time() - start) / repeats)
    return {name: statistics.median(each) for name, each in times.items()}


def _messages(group: dist.ProcessGroup) -> dict[Message, Wire]:
    """Return the time of each kind of message.

    Before each call, a rank computes, as in training. So ranks arrive at different times, and other
    data is in the cache. Small and large messages take turns, so that a change of the
    machine's speed changes both.
    """
    ranks = dist.get_world_size(group)
    sizes = (ranks, _LARGE_BYTES // 4 // ranks * ranks)
    calls = {(kind, size): call for size in sizes for kind, call in _calls_of(size, group).items()}
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    times: dict[tuple[Message, int], list[float]] = {each: [] for each in calls}
    dist.barrier(group)
    for _, (each, call) in itertools.product(range(_REPEATS_OF_MESSAGES), calls.items()):
        for _ in range(4):
            b = (a @ b).clamp_(-1, 1)
        start = time.perf_counter()
        call()
        times[each].append(time.perf_counter() - start)
    found: dict[Message, Wire] = {}
    for kind, hops in HOPS.items():
        small, large = _means([_fast(times[kind, size]) for size in sizes], group)
        sent = 4 * sizes[1] * hops(ranks) / (1 if kind == "send" else ranks)
        # Other programs may hide the difference. So at least a tenth of the time is for the bytes.
        found[kind] = Wire(small / hops(ranks), sent / max(large - small, large / 10))
    return found


def _calls_of(size: int, group: dist.ProcessGroup) -> dict[Message, Callable[[], object]]:
    """Return each kind of message -> a call that sends one with ``size`` elements in all."""
    complete, part = torch.zeros(size), torch.zeros(size // dist.get_world_size(group))
    return {
        "all_reduce": partial(dist.all_reduce, complete, group=group),
        "all_gather": partial(dist.all_gather_into_tensor, complete, part, group=group),
        "reduce_scatter": partial(_reduce_scatter, complete, torch.zeros(size), group),
        "send": partial(_send_to_the_next, complete, group),
    }


def _reduce_scatter(complete: Tensor, parts: Tensor, group: dist.ProcessGroup) -> None:
    """As ZeRO does over gloo: ranks exchange parts, and each adds up what it has received."""
    dist.all_to_all_single(parts, complete, group=group)
    rows = parts.view(dist.get_world_size(group), -1)
    torch.sum(rows, 0, out=complete[: rows.shape[1]])


def _send_to_the_next(message: Tensor, group: dist.ProcessGroup) -> None:
    """The first rank sends to the second. The others only compute."""
    rank = dist.get_rank(group)
    if rank == 0:
        dist.send(message, 1, group=group)
    elif rank == 1:
        dist.recv(message, 0, group=group)


def _step_seconds(run: Run, context: ParallelContext) -> float:
    """Return the wall time of an optimizer step of a small run."""
    worker = Worker(run, context)
    size = run.batch.micro_batch_size, run.config.data.sequence_length
    tokens = torch.zeros(size, dtype=torch.int64)
    batch = MicroBatch(tokens=tokens, targets=tokens, samples=torch.arange(size[0]))
    times = []
    for _ in range(_STEPS):
        start = time.perf_counter()
        worker.train_step(lambda number: batch, learning_rate=1e-4)
        times.append(time.perf_counter() - start)
    return _slowest(_fast(times[_WARM_UP_STEPS:]), context.world_group)


def _fast(times: Sequence[float]) -> float:
    """Return the first quartile."""
    return statistics.quantiles(times, n=4)[0]


def _slowest(seconds: float, group: dist.ProcessGroup) -> float:
    of_all = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(of_all, op=dist.ReduceOp.MAX, group=group)
    return float(of_all)


def _means(seconds: Sequence[float], group: dist.ProcessGroup) -> list[float]:
    of_all = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(of_all, group=group)
    means: list[float] = (of_all / dist.get_world_size(group)).tolist()
    return means


def _wall_times(own: Mapping[str, float], group: dist.ProcessGroup) -> dict[str, float]:
    """Return the mean of the ranks' CPU times, as wall times.

    The threads of a rank compute together. They wait for each other if there are fewer processors.
    """
    ranks, threads = dist.get_world_size(group), torch.get_num_threads()
    share = max(1.0, ranks * threads / usable_processors()) / threads
    means = _means(list(own.values()), group)
    return {name: share * mean for name, mean in zip(own, means, strict=True)}


if __name__ == "__main__":
    sys.exit(main())

"""Measure the speed of this machine's processors, and print it as JSON.

    python -m megaspeed.measurement.cpu_speed --config ds_configs/zero1.json --ranks 2

All ranks measure the same at the same time, because they share cores and memory. Each figure is
the mean of the ranks. Operations are measured in a rank's own CPU time, so other programs on the
machine do not disturb them. If there are fewer processors than ranks, each rank has a part of one,
and this time is multiplied. Messages and steps are measured in wall time. Their first quartile
counts, because other programs can only make them longer.

``planning.measured_cpu`` states the shapes, and predicts step times from the figures.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import nn

from megaspeed.config.document import add_config_options
from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import World
from megaspeed.config.loading import load_run
from megaspeed.config.resolve import Run
from megaspeed.measurement.local_ranks import RanksFailed, run_on_ranks
from megaspeed.model.gpt import DTYPES, GPT
from megaspeed.model.micro_batch import MicroBatch
from megaspeed.planning.costs.workload import block_products
from megaspeed.planning.measured_cpu import block_run, small_run
from megaspeed.supervision.process_end import end_with_parent, ended_on_termination
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.launch import LaunchEnvironment, usable_processors
from megaspeed.training.rank_model import make_optimizer
from megaspeed.training.worker import Worker
from megaspeed.zero.reductions import sum_of_squares

_TIMEOUT_SECONDS = 150.0
_ROUNDS, _SECONDS = 7, 0.07
"""A round repeats an operation for at least this time."""

_CALLS = 32  # of a message, or of a step
_LARGE_MESSAGE = 1 << 19
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
    means = {name: statistics.fmean(each[name] for each in figures) for name in figures[0]}
    sys.stdout.write(json.dumps(means) + "\n")
    return 0


def measure_rank(launch: LaunchEnvironment, run: Run) -> dict[str, float]:
    """Return this rank's figures: rates in operations or bytes a second, times in seconds."""
    block, small = block_run(run), small_run(run)
    tokens = block.batch.micro_batch_size * block.config.data.sequence_length
    flops = 3 * sum(2 * math.prod(shape) for shape in _shapes(block, tokens))
    a, b, c = (torch.randn(_ELEMENTS) for _ in range(3))
    with ParallelContext.create(small.grid, launch, timeout_seconds=_TIMEOUT_SECONDS) as context:
        timed = partial(_seconds, group=context.world_group)
        latency, bandwidth = _messages(context.world_group)
        return {
            "memory_bytes": psutil.virtual_memory().total // launch.world_size,
            "products": flops / timed(_products(block)),
            "bandwidth": 3 * 4 * _ELEMENTS / timed(lambda: torch.add(a, b, out=c)),
            "block": timed(_block(block)),
            "optimizer": timed(_update(run)) / _ELEMENTS,
            "latency": latency,
            "message_bandwidth": bandwidth,
            "small_step": _step_seconds(small, context),
        }


def _seconds(operation: Callable[[], object], group: dist.ProcessGroup) -> float:
    """Return the seconds of one call, the median of rounds that all ranks begin together.

    They are the CPU seconds, as wall time: the threads of a rank compute together, and wait for
    each other if there are fewer processors.
    """
    operation()
    times = []
    for _ in range(_ROUNDS):
        dist.barrier(group)
        began, start, repeats = time.process_time(), time.perf_counter(), 0
        while repeats == 0 or time.perf_counter() - start < _SECONDS:
            operation()
            repeats += 1
        times.append((time.process_time() - began) / repeats)
    threads = torch.get_num_threads()
    waiting = max(1.0, dist.get_world_size(group) * threads / usable_processors())
    return waiting / threads * statistics.median(times)


def _shapes(run: Run, tokens: int) -> list[tuple[int, int, int]]:
    """Return (m, n, k) of each matrix product of a block's forward. Experts have equal loads."""
    products = block_products(run.config.model, tokens, 1)
    return [
        (max(1, m // matrices), n, k) for m, n, k, matrices, _ in products for _ in range(matrices)
    ]


def _products(run: Run) -> Callable[[], None]:
    """The matrix products of a block's forward and backward."""
    tokens = run.batch.micro_batch_size * run.config.data.sequence_length
    matrices = [
        [torch.randn(*shape).to(DTYPES[run.precision]) for shape in ((m, k), (n, k), (m, n))]
        for m, n, k in _shapes(run, tokens)
    ]

    def multiply() -> None:
        for x, weight, gradient in matrices:
            nn.functional.linear(x, weight)
            gradient @ weight
            gradient.t() @ x

    return multiply


def _block(run: Run) -> Callable[[], None]:
    """The forward and backward of a block, whose gradients are added to earlier ones."""
    model, rows = run.config.model, run.batch.micro_batch_size
    length = run.config.data.sequence_length
    dtype = DTYPES[run.precision]
    block = GPT(model, chunks=[range(1, 2)]).to(dtype).train()
    for parameter in block.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x = torch.randn(rows, length, model.hidden_size).to(dtype).requires_grad_()
    gradient, samples = torch.randn(x.shape).to(dtype), torch.arange(rows)

    def both_passes() -> None:
        x.grad = None
        block(x, samples).backward(gradient)

    return both_passes


def _update(run: Run) -> Callable[[], None]:
    """The passes over all parameters in a step: the sum of squares of the gradients, clipping,
    AdamW, a copy of the new weights, and gradients set to zero."""
    master, total = torch.randn(_ELEMENTS), torch.randn(_ELEMENTS)
    weights = torch.empty(_ELEMENTS, dtype=DTYPES[run.precision])
    master.grad = total
    group = {"params": [master], "is_orthogonalized": False}
    optimizer = make_optimizer([group], run.config.optimizer)

    def update() -> None:
        sum_of_squares([total])
        total.mul_(1.0)
        optimizer.step()
        weights.copy_(master)
        total.zero_()

    return update


def _messages(group: dist.ProcessGroup) -> tuple[float, float]:
    """Return the seconds of a hop, and the bytes a second that a rank sends, of an all-reduce.

    Before each call, a rank computes, as in training. So ranks arrive at different times, and other
    data is in the cache.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return 0.0, 1.0
    small, large = (_message_seconds(size, group) for size in (ranks, _LARGE_MESSAGE))
    sent_bytes = 2 * (ranks - 1) / ranks * 4 * _LARGE_MESSAGE
    # Other programs may hide the difference. So at least a tenth of the time is for the bytes.
    return small / (2 * (ranks - 1)), sent_bytes / max(large - small, large / 10)


def _message_seconds(elements: int, group: dist.ProcessGroup) -> float:
    a, b, message = torch.randn(512, 512), torch.randn(512, 512), torch.zeros(elements)
    times = []
    for _ in range(_CALLS):
        for _ in range(4):
            b = (a @ b).clamp_(-1, 1)
        start = time.perf_counter()
        dist.all_reduce(message, group=group)
        times.append(time.perf_counter() - start)
    return _first_quartile(times)


def _step_seconds(run: Run, context: ParallelContext) -> float:
    """Return the wall time of an optimizer step of a small run."""
    worker = Worker(run, context)
    size = run.batch.micro_batch_size, run.config.data.sequence_length
    tokens = torch.zeros(size, dtype=torch.int64)
    batch = MicroBatch(tokens=tokens, targets=tokens, samples=torch.arange(size[0]))
    times = []
    for _ in range(_CALLS):
        start = time.perf_counter()
        worker.train_step(lambda number: batch, learning_rate=1e-4)
        times.append(time.perf_counter() - start)
    return _first_quartile(times)


def _first_quartile(times: Sequence[float]) -> float:
    return statistics.quantiles(times, n=4)[0]


if __name__ == "__main__":
    sys.exit(main())

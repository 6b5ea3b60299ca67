"""A turn on one rank: it trains some steps, and times them.

    steps    1 .. W       W + 1 .. W + S    then, if the command asks for it,
             warm up      timed             "memory"   one more step, whose memory and traffic are
                                                       measured (``watched_step``)
                                            "parts"    the times of each step's parts, of all ranks
                                            "matmul"   the rate of a large matrix product

A step lasts from the end of the step before until its loss is read as a number. By then, a GPU has
finished it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import psutil
import torch

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.measurement.turns import Device, TimedRank
from megaspeed.measurement.watched_step import measure
from megaspeed.model.gpt import DTYPES
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.step_inputs import StepInputs
from megaspeed.training.worker import peak_memory

WARM_UP_STEPS = 3
"""Of ``bench`` and ``scaling``. DeepSpeed's engine records its ZeRO-3 gathers in the first two."""

_MATMUL_SIZES = {"cpu": 1024, "cuda": 8192}
_MATMUL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class Steps:
    """How a turn is taken."""

    warm_up: int
    timed: int
    timeout_seconds: float  # of a collective
    extra: Literal["memory", "parts", "matmul"] | None = None

    @property
    def total(self) -> int:
        """The number of steps, without the one that is measured."""
        return self.warm_up + self.timed


def take_turn(
    launch: LaunchEnvironment,
    make: Callable[[Run, ParallelContext], Any],
    run: Run,
    corpus: PreparedCorpus,
    steps: Steps,
) -> Iterator[Any]:
    """Train as one rank. Yield its ``TimedRank``, and then what ``steps.extra`` asks for.

    ``make`` builds what has ``Worker``'s ``train_step``: for "memory" a ``Watched``, for "parts" a
    ``Worker``.
    """
    with ParallelContext.create(run.grid, launch, timeout_seconds=steps.timeout_seconds) as context:
        trainer, inputs = make(run, context), StepInputs(run, corpus, context)
        samples, skipped, losses = run.batch.train_batch_size, 0, []
        timelines, ends = [], [time.perf_counter()]
        for number in range(steps.total):
            if number == steps.warm_up:
                forget_peak(context.device)  # the first step also compiles
            if number >= steps.warm_up and steps.extra == "parts":
                context.timeline.begin(number + 1)
            result = trainer.train_step(
                inputs.load(number * samples), inputs.learning_rate(number - skipped)
            )
            context.timeline.end()
            ends.append(time.perf_counter())
            losses.append(result.loss)
            skipped += result.skipped
            timelines.append(result.timelines)  # of the step before
        yield timed_rank(
            steps,
            ends,
            losses=losses,
            grad_norm=result.grad_norm,
            skipped_steps=skipped,
            peak_bytes=peak_memory(context.device),
            device=describe_device(context.device, run.grid.world_size),
        )
        if steps.extra == "memory":
            load = inputs.load(steps.total * samples)
            yield measure(trainer, load, inputs.learning_rate(steps.total - skipped))[1]
        elif steps.extra == "parts":
            timelines.append(trainer.timelines_of_last_step())
            # A rank has no times of a step (0) if its GPU had not finished it.
            known = [ranks for ranks in timelines if all(step > 0 for step, *_ in ranks)]
            if not known:
                raise RuntimeError(f"the parts of none of {steps.timed} steps are known")
            yield known
        elif steps.extra == "matmul":
            yield matmul_flops(context.device, DTYPES[run.precision])
        inputs.close()


def timed_rank(steps: Steps, ends: Sequence[float], **measured: Any) -> TimedRank:
    """Return what a rank has measured.

    ``ends`` are the start of the first step and the end of each step.
    """
    seconds = [end - start for start, end in pairwise(ends)]
    return TimedRank(
        warm_up_seconds=seconds[: steps.warm_up],
        step_seconds=seconds[steps.warm_up : steps.total],
        **measured,
    )


def describe_device(device: torch.device, ranks: int) -> Device:
    """Return the name and memory of a rank's device. On a CPU, all ranks share the memory."""
    threads = torch.get_num_threads()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Device(name=properties.name, memory_bytes=properties.total_memory, threads=threads)
    memory = psutil.virtual_memory().total // ranks
    return Device(name="CPU", memory_bytes=memory, threads=threads)


def forget_peak(device: torch.device) -> None:
    """Start the CUDA allocator's peak again. Do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


@torch.no_grad()
def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations a second of the fastest of several products of two large matrices.

    All ranks measure at about the same time, because they share the machine when they train, too.
    """
    size = _MATMUL_SIZES[device.type]
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds: list[float] = []
    end = time.perf_counter() + _MATMUL_SECONDS
    while len(seconds) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        _ = a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2.0 * size**3 / min(seconds)

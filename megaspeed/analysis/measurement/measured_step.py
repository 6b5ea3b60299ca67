"""One optimizer step, watched: the memory that a rank holds in it and the bytes that it sends.

Watching slows a step, so it is not a step to take the time of.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megaspeed.analysis.costs.memory import Category, MemoryBytes
from megaspeed.analysis.costs.traffic import Traffic
from megaspeed.analysis.measurement.allocations import AllocationLog
from megaspeed.analysis.measurement.traffic import TrafficLog
from megaspeed.training.worker import Load, StepResult, Worker
from megaspeed.zero import ZeroEngine
from megaspeed.zero.held_memory import (
    allocates_for_communication,
    held_gradients,
    held_optimizer_states,
    held_parameters,
)


@dataclass(frozen=True, kw_only=True)
class RankMeasurement:
    """What one rank held and sent in one step.

    Attributes:
        rank: counted over all ranks.
        pipeline_stage: of this rank.
        states: parameters, accumulated gradients and optimizer states, between two micro-batches
            (after the last one where the step has only one); activations are left out.
        peak: what was held at the step's highest moment.
        allocator_peak_bytes: the most that torch's CUDA allocator had handed out in this step; None
            on a CPU.
        traffic: bytes sent, by axis and collective.
    """

    rank: int
    pipeline_stage: int
    states: MemoryBytes
    peak: MemoryBytes
    allocator_peak_bytes: int | None
    traffic: Traffic


def measure_step(
    worker: Worker, load: Load, learning_rate: float
) -> tuple[StepResult, RankMeasurement]:
    """Takes one training step under observation; a collective, like the step itself.

    The optimizer's states must exist, so a step must have been taken before.
    """
    device = worker.context.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    log = AllocationLog(device, _category_of)
    _claim_states(log, worker.engine)
    log.claim_everything_else_alive("communication_buffers")
    traffic = TrafficLog(worker.context)
    with _watched(worker.engine, log, device) as states, traffic, log:
        result = worker.train_step(load, learning_rate)
    return result, RankMeasurement(
        rank=worker.context.rank,
        pipeline_stage=worker.context.pp_rank,
        states=states[0],
        peak=log.peak(),
        allocator_peak_bytes=(
            torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        ),
        traffic=traffic.traffic,
    )


def _category_of(module: str) -> Category | None:
    match allocates_for_communication(module):
        case True:
            return "communication_buffers"
        case False:
            return "activations"
        case None:
            return None


def _claim_states(log: AllocationLog, engine: ZeroEngine) -> None:
    log.claim("parameters", held_parameters(engine))
    log.claim("gradients", held_gradients(engine))
    log.claim("optimizer_states", held_optimizer_states(engine))


@contextmanager
def _watched(
    engine: ZeroEngine, log: AllocationLog, device: torch.device
) -> Iterator[list[MemoryBytes]]:
    """Claims gradients as they appear; the list receives the states after the first backward."""
    states: list[MemoryBytes] = []

    def claim_gradient(gradient: Tensor) -> None:
        log.claim("gradients", [gradient])

    def after_backward() -> None:
        log.claim("gradients", held_gradients(engine))
        if not states:
            states.append(_states(engine, device))

    hooks = [p.register_hook(claim_gradient) for p in engine.module.parameters()]
    engine.after_backward = after_backward
    engine.before_step = lambda: log.claim("gradients", held_gradients(engine))
    try:
        yield states
    finally:
        engine.after_backward = engine.before_step = lambda: None
        for hook in hooks:
            hook.remove()


def _states(engine: ZeroEngine, device: torch.device) -> MemoryBytes:
    log = AllocationLog(device)
    _claim_states(log, engine)
    return log.live()

"""Measures the memory that a rank holds, and the bytes that it sends, in one optimizer step.

    held before the step    parameters, gradients, optimizer states, buffers: listed by ``Watched``
    allocated in the step   gradients when autograd completes them; other tensors by the code
                            that allocates them

Measuring makes a step slower, so do not time the same step.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megaspeed.analysis.costs.memory import Category, MemoryBytes
from megaspeed.analysis.costs.traffic import Traffic
from megaspeed.analysis.measurement.allocations import AllocationLog
from megaspeed.analysis.measurement.traffic import TrafficLog
from megaspeed.topology.context import ParallelContext
from megaspeed.training.worker import Load, StepResult, Worker
from megaspeed.zero.model_states import (
    allocates_for_communication,
    held_gradients,
    held_optimizer_states,
    held_parameters,
)


@dataclass(frozen=True, kw_only=True)
class RankMeasurement:
    """What one rank held and sent in one step."""

    rank: int
    pipeline_stage: int
    states: MemoryBytes  # model states after the first micro-batch, without activations
    peak: MemoryBytes  # at the peak of the step
    allocator_peak_bytes: int | None  # of torch's CUDA allocator; None on a CPU
    traffic: Traffic  # bytes sent, by axis and collective


class Watched(Protocol):
    """One rank's training, with lists of the tensors that it holds at the time of the call."""

    context: ParallelContext

    def new_log(self) -> AllocationLog:
        """A log that recognises code that allocates for communication."""

    def parameters(self) -> Iterable[Tensor | None]:
        """The weights that the model computes with."""

    def gradients(self) -> Iterable[Tensor | None]:
        """Complete and partitioned gradients."""

    def optimizer_states(self) -> Iterable[Tensor | None]:
        """Master weights and moments."""

    def communication_buffers(self) -> Iterable[Tensor | None]:
        """Buffers that stay from step to step, if Python cannot reach them otherwise."""

    def differentiated(self) -> Iterable[Tensor]:
        """The tensors whose gradients autograd computes."""

    def call_after_backward(self, function: Callable[[], None]) -> None:
        """Sets a function to call after the backward of each micro-batch."""

    def train_step(self, load: Load, learning_rate: float) -> StepResult:
        """One optimizer step."""


def measure(
    watched: Watched, load: Load, learning_rate: float
) -> tuple[StepResult, RankMeasurement]:
    """Trains one step and measures it. All ranks call this together.

    The optimizer's states must exist, so this cannot be the first step.
    """
    context = watched.context
    on_gpu = context.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(context.device)
    log = watched.new_log()
    _claim_states(log, watched)
    log.claim("communication_buffers", watched.communication_buffers())
    log.claim_everything_else_alive("communication_buffers")
    traffic = TrafficLog(context)
    with _gradients_claimed(watched, log) as states, traffic, log:
        result = watched.train_step(load, learning_rate)
    return result, RankMeasurement(
        rank=context.rank,
        pipeline_stage=context.pp_rank,
        states=states[0],
        peak=log.peak(),
        allocator_peak_bytes=torch.cuda.max_memory_allocated(context.device) if on_gpu else None,
        traffic=traffic.traffic,
    )


def _claim_states(log: AllocationLog, watched: Watched) -> None:
    log.claim("parameters", watched.parameters())
    log.claim("gradients", watched.gradients())
    log.claim("optimizer_states", watched.optimizer_states())


@contextmanager
def _gradients_claimed(watched: Watched, log: AllocationLog) -> Iterator[list[MemoryBytes]]:
    """Claims gradients when they appear. The list receives the states after the first backward."""
    states: list[MemoryBytes] = []

    def claim_gradient(gradient: Tensor) -> None:
        log.claim("gradients", [gradient])

    def after_backward() -> None:
        log.claim("gradients", watched.gradients())
        if not states:
            held = watched.new_log()
            _claim_states(held, watched)
            states.append(held.live())

    hooks = [tensor.register_hook(claim_gradient) for tensor in watched.differentiated()]
    watched.call_after_backward(after_backward)
    try:
        yield states
    finally:
        watched.call_after_backward(lambda: None)
        for hook in hooks:
            hook.remove()


class WatchedZero:
    """A worker and the tensors of its ZeRO optimizer."""

    def __init__(self, worker: Worker) -> None:
        self.context = worker.context
        self.train_step = worker.train_step
        self._engine = worker.engine

    def new_log(self) -> AllocationLog:
        return AllocationLog(self.context.device, _category_of)

    def parameters(self) -> Iterable[Tensor | None]:
        return held_parameters(self._engine)

    def gradients(self) -> Iterable[Tensor | None]:
        return held_gradients(self._engine)

    def optimizer_states(self) -> Iterable[Tensor | None]:
        return held_optimizer_states(self._engine)

    def communication_buffers(self) -> Iterable[Tensor | None]:
        return ()  # Python can reach all of them

    def differentiated(self) -> Iterable[Tensor]:
        return self._engine.module.parameters()

    def call_after_backward(self, function: Callable[[], None]) -> None:
        self._engine.after_backward = function
        # After that, the gradients that the reduction made exist, too.
        self._engine.before_step = function


def _category_of(module: str) -> Category | None:
    for_communication = allocates_for_communication(module)
    if for_communication is None:
        return None
    return "communication_buffers" if for_communication else "activations"

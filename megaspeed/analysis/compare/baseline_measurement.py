"""One step of a baseline, watched as ``measurement.measured_step`` watches one of ZeRO.

    memory     DDP                               FSDP2
    parameters             whole, fp32           1/dp of each, fp32
    gradients              whole, fp32           whole until they are reduced, then 1/dp
    optimizer states       two moments, whole    two moments, 1/dp
    communication buffers  the buckets           gathered parameters, reduce-scatter buffers

FSDP2 says nowhere which tensors these are; what is read here is torch 2.13's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from megaspeed.analysis.compare.baselines import BaselineWorker
from megaspeed.analysis.compare.data_parallel import Ddp, local
from megaspeed.analysis.costs.memory import Category, MemoryBytes
from megaspeed.analysis.measurement.allocations import Allocation, AllocationLog
from megaspeed.analysis.measurement.measured_step import RankMeasurement
from megaspeed.analysis.measurement.traffic import TrafficLog
from megaspeed.training.worker import Load, StepResult


def measure_baseline_step(
    worker: BaselineWorker, load: Load, learning_rate: float
) -> tuple[StepResult, RankMeasurement]:
    """Takes one training step under observation; a collective, like the step itself.

    The optimizer's states must exist, so a step must have been taken before.
    """
    device = worker.context.device
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    log = _LocalAllocationLog(device, _category_of)
    _claim_states(log, worker)
    if isinstance(worker.engine, Ddp):
        log.claim("communication_buffers", worker.engine.buckets.values())
    log.claim_everything_else_alive("communication_buffers")
    traffic = TrafficLog(worker.context)
    with _watched(worker, log) as states, traffic, log:
        result = worker.train_step(load, learning_rate)
    return result, RankMeasurement(
        rank=worker.context.rank,
        pipeline_stage=worker.context.pp_rank,
        states=states[0],
        peak=log.peak(),
        allocator_peak_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else None,
        traffic=traffic.traffic,
    )


class _LocalAllocationLog(AllocationLog):
    """Counts of a sharded tensor the part that is here: the whole one has a size but no memory."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # then it is asked again, with the local parts
        return super().__torch_dispatch__(function, types, args, kwargs)

    def _record(self, tensor: Tensor, category: Category | None) -> Allocation | None:
        return super()._record(
            tensor._local_tensor if isinstance(tensor, DTensor) else tensor, category
        )


def _category_of(module: str) -> Category | None:
    if module.startswith(("torch.distributed.fsdp.", "torch.distributed.algorithms.")):
        return "communication_buffers"
    return None


def _claim_states(log: AllocationLog, worker: BaselineWorker) -> None:
    log.claim("parameters", (local(p) for p in worker.engine.model.parameters()))
    log.claim("gradients", _held_gradients(worker))
    log.claim("optimizer_states", _held_optimizer_states(worker))


def _held_gradients(worker: BaselineWorker) -> Iterator[Tensor | None]:
    for parameter in worker.engine.model.parameters():
        yield None if parameter.grad is None else local(parameter.grad)
    for unsharded in _unsharded_parameters(worker.engine.model):
        yield unsharded.unsharded_accumulated_grad
        yield unsharded.unsharded_param.grad


def _held_optimizer_states(worker: BaselineWorker) -> Iterator[Tensor]:
    for state in worker.optimizer.state.values():
        yield from (local(value) for value in state.values() if isinstance(value, Tensor))


def _unsharded_parameters(model: nn.Module) -> list[Any]:
    """FSDP2's record of each parameter while it is gathered; none for DDP."""
    states: list[Any] = [
        fully_shard.state(module)  # type: ignore[attr-defined]
        for module in model.modules()
        if isinstance(module, FSDPModule)
    ]
    return [
        parameter
        for state in states
        for group in state._fsdp_param_groups
        for parameter in group.fsdp_params
        if hasattr(parameter, "_unsharded_param")
    ]


@contextmanager
def _watched(worker: BaselineWorker, log: AllocationLog) -> Iterator[list[MemoryBytes]]:
    """Claims gradients as they appear; the list receives the states after the first backward."""
    states: list[MemoryBytes] = []

    def claim_gradient(gradient: Tensor) -> None:
        log.claim("gradients", [gradient])

    def after_backward() -> None:
        log.claim("gradients", _held_gradients(worker))
        if not states:
            held = _LocalAllocationLog(worker.context.device)
            _claim_states(held, worker)
            states.append(held.live())

    model = worker.engine.model
    gathered = [unsharded.unsharded_param for unsharded in _unsharded_parameters(model)]
    hooks = [p.register_hook(claim_gradient) for p in gathered or model.parameters()]
    worker.after_backward = after_backward
    try:
        yield states
    finally:
        worker.after_backward = lambda: None
        for hook in hooks:
            hook.remove()

"""One step of a baseline, watched as ``measurement.measured_step`` watches one of ZeRO.

    memory     DDP                               FSDP2
    parameters             whole, fp32           1/dp of each, fp32
    gradients              whole, fp32           whole until they are reduced, then 1/dp
    optimizer states       two moments, whole    two moments, 1/dp
    communication buffers  the buckets           gathered parameters, reduce-scatter buffers

FSDP2 says nowhere which tensors these are; what is read here is torch 2.13's.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from megaspeed.analysis.compare.baselines import BaselineWorker
from megaspeed.analysis.compare.data_parallel import Ddp, local
from megaspeed.analysis.costs.memory import Category
from megaspeed.analysis.measurement.allocations import Allocation, AllocationLog
from megaspeed.analysis.measurement.watched_step import RankMeasurement, measure
from megaspeed.training.worker import Load, StepResult


def measure_baseline_step(
    worker: BaselineWorker, load: Load, learning_rate: float
) -> tuple[StepResult, RankMeasurement]:
    """Takes one training step under observation; a collective, like the step itself.

    The optimizer's states must exist, so a step must have been taken before.
    """
    return measure(_WatchedBaseline(worker), load, learning_rate)


class _WatchedBaseline:
    """A baseline whose engine is looked into."""

    def __init__(self, worker: BaselineWorker) -> None:
        self.context = worker.context
        self.train_step = worker.train_step
        self._worker = worker
        self._model = worker.engine.model

    def new_log(self) -> AllocationLog:
        return _LocalAllocationLog(self.context.device, _category_of)

    def parameters(self) -> Iterable[Tensor | None]:
        return (local(p) for p in self._model.parameters())

    def gradients(self) -> Iterator[Tensor | None]:
        for parameter in self._model.parameters():
            yield None if parameter.grad is None else local(parameter.grad)
        for unsharded in _unsharded_parameters(self._model):
            yield unsharded.unsharded_accumulated_grad
            yield unsharded.unsharded_param.grad

    def optimizer_states(self) -> Iterator[Tensor]:
        for state in self._worker.optimizer.state.values():
            yield from (local(value) for value in state.values() if isinstance(value, Tensor))

    def communication_buffers(self) -> Iterable[Tensor | None]:
        engine = self._worker.engine
        return engine.buckets.values() if isinstance(engine, Ddp) else ()

    def differentiated(self) -> Iterable[Tensor]:
        gathered = [unsharded.unsharded_param for unsharded in _unsharded_parameters(self._model)]
        return gathered or self._model.parameters()

    def call_after_backward(self, function: Callable[[], None]) -> None:
        self._worker.after_backward = function


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

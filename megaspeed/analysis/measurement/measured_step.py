"""One training step of a ``Worker``, watched (see ``watched_step``)."""

from collections.abc import Callable, Iterable

from torch import Tensor

from megaspeed.analysis.costs.memory import Category
from megaspeed.analysis.measurement.allocations import AllocationLog
from megaspeed.analysis.measurement.watched_step import RankMeasurement, measure
from megaspeed.training.worker import Load, StepResult, Worker
from megaspeed.zero.held_memory import (
    allocates_for_communication,
    held_gradients,
    held_optimizer_states,
    held_parameters,
)


def measure_step(
    worker: Worker, load: Load, learning_rate: float
) -> tuple[StepResult, RankMeasurement]:
    """Takes one training step under observation; a collective, like the step itself.

    The optimizer's states must exist, so a step must have been taken before.
    """
    return measure(_WatchedZero(worker), load, learning_rate)


class _WatchedZero:
    """A worker whose ZeRO optimizer is looked into."""

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
        return ()  # all of them are within Python's reach

    def differentiated(self) -> Iterable[Tensor]:
        return self._engine.module.parameters()

    def call_after_backward(self, function: Callable[[], None]) -> None:
        self._engine.after_backward = function
        # What the reduction made is there then, too.
        self._engine.before_step = function


def _category_of(module: str) -> Category | None:
    match allocates_for_communication(module):
        case True:
            return "communication_buffers"
        case False:
            return "activations"
        case None:
            return None

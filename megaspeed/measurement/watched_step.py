"""Measure the memory that a rank holds, and the bytes that it sends, in one optimizer step.

    held before the step    parameters, gradients, optimizer states, buffers: listed by ``Watched``
    allocated in the step   gradients when autograd completes them; other tensors by the code
                            that allocates them

Measuring makes a step slower, so do not time the same step. A rank that is out of memory reports
what it holds and which changes free most memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaspeed.config.resolve import Run
from megaspeed.measurement.allocations import AllocationLog
from megaspeed.pipeline.schedules import Backward, Instruction
from megaspeed.planning.changes import single_changes
from megaspeed.planning.costs.memory import Category, MemoryBytes
from megaspeed.planning.costs.stage_memory import StageMemory
from megaspeed.planning.costs.traffic import Collective, Messages, Traffic, TrafficAxis
from megaspeed.planning.variants import Training
from megaspeed.topology.context import ParallelContext
from megaspeed.training.worker import Load, StepResult, Worker, peak_memory
from megaspeed.units import markdown_table, memory_unit
from megaspeed.zero.engine import ZeroEngine
from megaspeed.zero.model_states import master_partitions

# Operator -> its collective, and the index of the argument that is its message: the output of a
# gather, the input of all others. If the index is None, the message is the result.
_COUNTED: Mapping[str, tuple[Collective, int | None]] = MappingProxyType(
    {
        "c10d::allreduce_": ("all_reduce", 0),
        "c10d::allreduce_coalesced_": ("all_reduce", 0),
        "c10d::allgather_": ("all_gather", 0),
        "c10d::_allgather_base_": ("all_gather", 0),
        "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0),
        "c10d::reduce_scatter_": ("reduce_scatter", 1),
        "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
        "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
        "c10d::alltoall_base_": ("all_to_all", 1),
        "c10d::reduce_": ("reduce", 0),
        "c10d::broadcast_": ("broadcast", 0),
        "c10d::send": ("send", 0),
        # What torch's DTensor calls.
        "_c10d_functional::all_reduce": ("all_reduce", 0),
        "_c10d_functional::all_gather_into_tensor": ("all_gather", None),
        "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
        "_c10d_functional::broadcast": ("broadcast", 0),
        "_c10d_functional::all_to_all_single": ("all_to_all", 0),  # compiled blocks
    }
)
_SENDING_NOTHING = frozenset(
    {
        "c10d::recv_",
        "c10d::recv_any_source_",
        "c10d::barrier",
        "c10d::monitored_barrier_",
        "_c10d_functional::wait_tensor",
        "_c10d_functional::_wrap_tensor_autograd",
    }
)
_MOST_CHANGES = 3
_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})


@dataclass(frozen=True, kw_only=True)
class RankMeasurement:
    """What one rank held and sent in one step."""

    rank: int
    pipeline_stage: int
    states: MemoryBytes  # model states after the first micro-batch, without activations
    peak: MemoryBytes  # at the peak of the step
    traffic: Traffic  # bytes sent, by axis and collective


Held = Mapping[Category, Iterable[Tensor | None]]
"""Category -> tensors that a rank holds now. Communication buffers need not be listed if Python can
reach them."""


class Watched(Protocol):
    """One rank's training, and the tensors that it holds."""

    context: ParallelContext

    def held(self) -> Held:
        """The tensors that the rank holds at the time of the call."""

    def differentiated(self) -> Iterable[Tensor]:
        """The tensors whose gradients autograd computes."""

    def train_step(
        self, load: Load, learning_rate: float, after_backward: Callable[[], None]
    ) -> StepResult:
        """One optimizer step. ``after_backward`` is called after each micro-batch's backward."""


class WatchedWorker:
    """A worker and the tensors of its ZeRO optimizer."""

    def __init__(self, worker: Worker) -> None:
        self.context = worker.context
        self._worker = worker

    def held(self) -> Held:
        return held_by(self._worker.engine)

    def differentiated(self) -> Iterable[Tensor]:
        return self._worker.engine.module.parameters()

    def train_step(
        self, load: Load, learning_rate: float, after_backward: Callable[[], None]
    ) -> StepResult:
        def watched_program() -> Iterator[Instruction]:
            for instruction in self._worker.program:
                yield instruction
                if isinstance(instruction, Backward):
                    after_backward()

        executor = self._worker.compute_gradients(load, watched_program())
        after_backward()  # now the gradients that the reduction made exist, too
        return self._worker.update_weights(executor, learning_rate)


def held_by(engine: ZeroEngine) -> Held:
    """Return the model states of a rank: partitions, and what stays gathered, at ZeRO-3."""
    states = engine.optimizer.optimizer.state.values()
    moments = (each for state in states for each in state.values() if isinstance(each, Tensor))
    parameters = list(engine.module.parameters())
    return {
        "parameters": [
            *(parameter.data for parameter in parameters if getattr(parameter, "ds_persist", True)),
            *(getattr(parameter, "ds_tensor", None) for parameter in parameters),
        ],
        "gradients": held_gradients(engine),
        "optimizer_states": [*master_partitions(engine.optimizer), *moments],
    }


def held_gradients(engine: ZeroEngine) -> Iterator[Tensor | None]:
    """Yield gradients, complete or partitioned, accumulated or not."""
    yield from engine.gradients.tensors()
    for parameter in (*engine.module.parameters(), *master_partitions(engine.optimizer)):
        yield parameter.grad


def measure(
    trainer: Worker | Watched, load: Load, learning_rate: float
) -> tuple[StepResult, RankMeasurement]:
    """Train one step and measure it. All ranks call this together.

    The optimizer's states must exist, so this cannot be the first step. Compiled blocks run without
    compilation, because torch 2.13 compiles nothing while operations are watched.
    """
    watched = WatchedWorker(trainer) if isinstance(trainer, Worker) else trainer
    context = watched.context
    log = AllocationLog(context.device, _category_of)
    _claim(log, watched.held())
    log.claim_everything_else_alive("communication_buffers")
    traffic = TrafficLog(context)
    states: list[MemoryBytes] = []

    def after_backward() -> None:
        log.claim("gradients", watched.held()["gradients"])
        if not states:
            states_log = AllocationLog(context.device)
            _claim(states_log, {**watched.held(), "communication_buffers": ()})
            states.append(states_log.live())

    hooks = [
        tensor.register_hook(lambda gradient: log.claim("gradients", [gradient]))
        for tensor in watched.differentiated()
    ]
    try:
        with torch.compiler.set_stance("force_eager"), traffic, log:
            result = watched.train_step(load, learning_rate, after_backward)
    finally:
        for hook in hooks:
            hook.remove()
    return result, RankMeasurement(
        rank=context.rank,
        pipeline_stage=context.pp_rank,
        states=states[0],
        peak=log.peak(),
        traffic=traffic.traffic,
    )


def _claim(log: AllocationLog, held: Held) -> None:
    for category, tensors in held.items():
        log.claim(category, tensors)


_FOR_COMMUNICATION = (
    "torch.distributed.fsdp.",
    "torch.distributed.algorithms.",
    "deepspeed.runtime.zero.",
    "deepspeed.runtime.comm.",
    "megaspeed.zero.buckets",
    "megaspeed.zero.compression",
    "megaspeed.zero.gradients",
    "megaspeed.zero.layer_gathers",
    "megaspeed.zero.muon",
    "megaspeed.zero.reductions",
)
"""Modules whose tensors are communication buffers; a dot at the end stands for all of a package."""


def _category_of(module: str) -> Category | None:
    """Return the category of what a module allocates; None if this depends on its caller."""
    if module == "deepspeed.runtime.zero.linear":  # a linear layer's forward and backward
        return "activations"
    return "communication_buffers" if module.startswith(_FOR_COMMUNICATION) else None


class TrafficLog(TorchDispatchMode):
    """Count the bytes that this rank hands to its process groups within a block, by axis.

        DeepSpeed, megaspeed, autograd -> torch.distributed -> c10d operator -> gloo or NCCL
                                                               ^ counted here

    Every collective of torch is an operator of its dispatcher, in forward and backward and for
    every caller. An unknown collective is an error. Only the sender of a message counts it.

    Data ranks are one axis, dp, or two, shard and replica. A data or tensor axis that spans all
    ranks uses the world's group (``topology/context.py``). fp64 messages of that group count for
    the world, all others for the axis.
    """

    def __init__(self, context: ParallelContext) -> None:
        super().__init__()
        self._world = context.world_group.group_name
        # If an axis has the world's group, its entry replaces the world's, because it comes later.
        groups = reversed(context.groups_by_axis.items())
        self._axes: dict[str, TrafficAxis] = {group.group_name: axis for axis, group in groups}
        self._messages = Messages()

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank has sent so far, by axis and collective."""
        return self._messages.traffic()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        operator = function._schema.name
        if function.namespace not in _NAMESPACES or operator in _SENDING_NOTHING:
            return function(*args, **(kwargs or {}))
        if operator not in _COUNTED:
            raise RuntimeError(
                f"Every collective must be counted, but {operator} is not known. Add it to the "
                f"table of {__name__}: which collective it is, and which argument is its message."
            )
        group = _group_in(args)
        if group.size() > 1 and group.group_name not in self._axes:
            raise RuntimeError(
                f"Every collective must run along an axis, but {operator} runs over ranks "
                f"{dist.get_process_group_ranks(group)}, and no axis of this rank has that group."
            )
        result = function(*args, **(kwargs or {}))
        if group.size() > 1:
            collective, argument = _COUNTED[operator]
            message = result if argument is None else args[argument]
            parts = args[4] if operator == "c10d::alltoall_base_" else ()
            if parts:  # rows for each rank, and unequal
                row_bytes = message.shape[1:].numel() * message.itemsize
                sent_bytes = (sum(parts) - parts[group.rank()]) * row_bytes
                self._messages.add_sent(self._axes[group.group_name], collective, sent_bytes)
            else:
                self._count(collective, group, message)
        return result

    def _count(self, collective: Collective, group: dist.ProcessGroup, message: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(message) if isinstance(leaf, Tensor)]
        axis = self._axes[group.group_name]
        if group.group_name == self._world and all(t.dtype == torch.float64 for t in tensors):
            axis = "world"
        message_bytes = sum(tensor.nbytes for tensor in tensors)
        self._messages.add(axis, collective, message_bytes, ranks=group.size())


def _group_in(arguments: Sequence[Any]) -> dist.ProcessGroup:
    """The process group of an operator: one of its arguments, or named by the last one."""
    for argument in arguments:
        is_object = isinstance(argument, torch.ScriptObject)
        if is_object and str(argument._type()).endswith("ProcessGroup"):
            return dist.ProcessGroup.unbox(argument)
    return dist.distributed_c10d._resolve_process_group(arguments[-1])


def explain_out_of_memory(run: Run, context: ParallelContext, engine: ZeroEngine | None) -> str:
    """Report what a rank that is out of memory holds, predicted and measured, and the best changes.

    ``engine`` is None if memory ran out before it was built.
    """
    predicted = asdict(StageMemory(run, context.pp_rank).peak)
    log = AllocationLog(context.device)
    _claim(log, {} if engine is None else held_by(engine))
    held, total = asdict(log.live()), sum(predicted.values())
    unit = memory_unit([total])
    rows = [
        (name.replace("_", " "), unit.of(size), unit.of(held[name]) if held[name] else "-")
        for name, size in predicted.items()
    ]
    rows.append(("total, at the peak", unit.of(total), unit.of(peak_memory(context.device))))
    where = "on the GPU" if context.device.type == "cuda" else "of the process with its libraries"
    changes = single_changes(
        Training(stated=run.config, run=run), max(1, torch.cuda.device_count())
    )[:_MOST_CHANGES]
    return "\n".join(
        [
            f"Memory of rank {context.rank} (pipeline stage {context.pp_rank}), measured {where}:",
            *markdown_table((unit.name, "predicted", "measured"), rows),
            "Changes that free most memory on the fullest rank (predicted):"
            if changes
            else "No single change of the settings frees memory: use more ranks.",
            *(f"    {unit.named(freed)}: --set {' '.join(text)}" for freed, text in changes),
        ]
    )

"""Counts the bytes that a rank hands to its process groups.

    DeepSpeed, megaspeed, autograd -> torch.distributed -> c10d operator -> gloo or NCCL
                                                           ^ counted here

Every collective of torch is an operator of its dispatcher, in forward and backward and for every
caller. An unknown collective is an error. Only the sender of a message counts it, not its receiver.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaspeed.analysis.costs.traffic import Collective, Messages, Traffic, TrafficAxis
from megaspeed.topology.context import ParallelContext

_Message = Callable[[Sequence[Any], Any], Any]


def _argument(index: int) -> _Message:
    return lambda arguments, _result: arguments[index]


def _result(_arguments: Sequence[Any], result: Any) -> Any:
    return result


# Operator -> its collective, and its message: the output of a gather, the input of all others.
_COUNTED: Mapping[str, tuple[Collective, _Message]] = MappingProxyType(
    {
        "c10d::allreduce_": ("all_reduce", _argument(0)),
        "c10d::allreduce_coalesced_": ("all_reduce", _argument(0)),
        "c10d::allgather_": ("all_gather", _argument(0)),
        "c10d::_allgather_base_": ("all_gather", _argument(0)),
        "c10d::allgather_into_tensor_coalesced_": ("all_gather", _argument(0)),
        "c10d::reduce_scatter_": ("reduce_scatter", _argument(1)),
        "c10d::_reduce_scatter_base_": ("reduce_scatter", _argument(1)),
        "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", _argument(1)),
        "c10d::reduce_": ("reduce", _argument(0)),
        "c10d::broadcast_": ("broadcast", _argument(0)),
        "c10d::send": ("send", _argument(0)),
        # What torch's DTensor calls.
        "_c10d_functional::all_reduce": ("all_reduce", _argument(0)),
        "_c10d_functional::all_gather_into_tensor": ("all_gather", _result),
        "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", _argument(0)),
        "_c10d_functional::broadcast": ("broadcast", _argument(0)),
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
_NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})


class TrafficLog(TorchDispatchMode):
    """Counts the messages that this rank sends within a block, by axis.

    A data or tensor axis that spans all ranks uses the world's group (``topology/context.py``).
    fp64 messages of that group count for the world, all others for the axis.

    Args:
        context: this rank's groups.
    """

    def __init__(self, context: ParallelContext) -> None:
        super().__init__()
        self._world = context.world_group.group_name
        axes: list[tuple[dist.ProcessGroup | None, TrafficAxis]] = [
            (context.world_group, "world"),
            (context.pp_group, "pp"),
            (context.dp_group, "dp"),
            (context.tp_group, "tp"),
        ]
        # If an axis has the world's group, its entry replaces the world's, because it comes later.
        self._axes = {
            group.group_name: axis for group, axis in axes if group is not None and group.size() > 1
        }
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
            raise NotImplementedError(
                f"Every collective must be counted, but {operator} is not known. Add it to the "
                f"table of {__name__}: which collective it is, and which argument is its message."
            )
        group = self._known_group(operator, args)
        result = function(*args, **(kwargs or {}))
        if group.size() > 1:
            self._count(operator, group, args, result)
        return result

    def _known_group(self, operator: str, arguments: Sequence[Any]) -> dist.ProcessGroup:
        group = _group_in(arguments)
        if group.size() > 1 and group.group_name not in self._axes:
            raise NotImplementedError(
                f"Every collective runs along an axis, but {operator} runs over ranks "
                f"{dist.get_process_group_ranks(group)}, and no axis of this rank has that group."
            )
        return group

    def _count(
        self, operator: str, group: dist.ProcessGroup, arguments: Sequence[Any], result: Any
    ) -> None:
        collective, message = _COUNTED[operator]
        leaves = tree_leaves(message(arguments, result))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        axis = self._axes[group.group_name]
        if group.group_name == self._world and all(t.dtype == torch.float64 for t in tensors):
            axis = "world"
        message_bytes = sum(tensor.nbytes for tensor in tensors)
        self._messages.add(axis, collective, message_bytes, ranks=group.size())


def _group_in(arguments: Sequence[Any]) -> dist.ProcessGroup:
    """The process group of an operator: one of its arguments, or named by the last one."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject) and _is_group(argument):
            return dist.ProcessGroup.unbox(argument)
    return dist.distributed_c10d._resolve_process_group(arguments[-1])


def _is_group(argument: torch.ScriptObject) -> bool:
    return str(argument._type()).endswith("ProcessGroup")

"""Record what a step launches, sends and reads, from within torch's dispatcher."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# These make a view or allocate memory, and launch no kernel.
NO_KERNEL = frozenset(
    """
    view _unsafe_view t transpose expand slice select split split_with_sizes unsqueeze squeeze
    permute detach alias as_strided narrow chunk unbind _reshape_alias lift_fresh unflatten diagonal
    set_ is_same_size result_type _has_same_storage_numel resize_ empty empty_like empty_strided
    new_empty new_empty_strided
    """.split()  # noqa: SIM905  one name after another reads better here
)
# In the dispatcher, these operators copy numbers from the device to the host.
_READS = frozenset(("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"))
# These do the same, but a CPU answers before the call reaches the dispatcher.
READS_BEFORE_DISPATCH = ("tolist", "cpu", "numpy")
_PEERS = {"c10d::send": 2, "c10d::recv_": 2}
_OURS = ("/megaspeed/", "/deepspeed/")


@dataclass(frozen=True)
class Message:
    """One call of a process group.

    Attributes:
        operator: such as ``c10d::allreduce_``.
        group: global ranks of the group.
        tensors: (shape, dtype) of each tensor.
        peer: global rank of the other end of a send or a receive.
        splits: of an all-to-all, the elements (that it receives from, that it sends to) each rank.
            Empty if all parts are equal.
    """

    operator: str
    group: tuple[int, ...]
    tensors: tuple[tuple[tuple[int, ...], str], ...]
    peer: int | None = None
    splits: tuple[tuple[int, ...], ...] = ()


class Recorder(TorchDispatchMode):
    """Record this thread's operations within its block, including those of its backward passes.

    Attributes:
        launches: aten operator -> how often it ran. Each is a kernel on a GPU.
        messages: calls of process groups, in order.
        reads: where in the code -> how often the host asks for numbers of the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.messages: list[Message] = []
        self.reads: Counter[str] = Counter()
        self._on_host: dict[int, Tensor] = {}  # keeps them alive, so that no id is used twice
        self._functions = _Functions(self)

    def __enter__(self) -> Self:
        self._functions.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._functions.__exit__(*error)

    def read(self, what: str) -> None:
        """Record that the host asks for a number of the device."""
        self.reads[f"{caller()} {what}"] += 1

    def made_on_host(self, tensor: Tensor) -> None:
        """Record that a tensor was made of Python numbers, in host memory."""
        self._on_host[id(tensor)] = tensor

    def is_on_host(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether there is at least one tensor and all of them are in host memory."""
        return bool(tensors) and all(id(tensor) in self._on_host for tensor in tensors)

    def _reads(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether the host waits for a copy, or for the size of a result."""
        if name == "repeat_interleave":
            return kwargs.get("output_size") is None
        if name != "copy_" or self.is_on_host(args[1:2]) or not self.is_on_host(args[:1]):
            return False
        return not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        namespace, _, name = function._schema.name.partition("::")
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if namespace == "c10d":
            self.messages.append(_message(function._schema.name, args))
            result = function(*args, **(kwargs or {}))
            if name == "recv_":
                for tensor in inputs:  # a fake peer sends nothing, so the memory may contain a NaN
                    tensor.zero_()
            return result
        on_host = self.is_on_host(inputs)
        if not on_host:
            if name in _READS or self._reads(name, args, kwargs or {}):
                self.read(name)
            elif name not in NO_KERNEL:
                self.launches[name] += 1
        result = function(*args, **(kwargs or {}))
        if on_host:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.made_on_host(leaf)
        return result


class _Functions(TorchFunctionMode):
    """Records what the dispatcher does not see: reads that a CPU answers, tensors of numbers."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in READS_BEFORE_DISPATCH and not self._recorder.is_on_host(args[:1]):
            self._recorder.read(name)
        result = function(*args, **(kwargs or {}))
        if (kwargs or {}).get("pin_memory"):
            self._recorder.made_on_host(result)
        if function is torch.tensor:
            if _stays_on_host(kwargs or {}):
                self._recorder.made_on_host(result)
            else:
                # torch copies the numbers to the device and waits for the copy.
                self._recorder.read("tensor on the device from Python numbers")
        return result


def _stays_on_host(kwargs: Mapping[str, Any]) -> bool:
    """Return whether the device is omitted or the word "cpu". The run passes a ``torch.device``."""
    device = kwargs.get("device")
    return device is None or (device == "cpu" and isinstance(device, str))


def caller() -> str:
    """Return the nearest place in the code of megaspeed or DeepSpeed, as file:line function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if any(part in file for part in _OURS) and "/tests/" not in file:
            package = next(part for part in _OURS if part in file)
            where = file[file.rindex(package) + 1 :]
            return f"{where}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


def group_in(args: Sequence[Any]) -> dist.ProcessGroup:
    """Return the process group among the arguments of a ``c10d`` operator."""
    return next(
        dist.ProcessGroup.unbox(argument)
        for argument in args
        if isinstance(argument, torch.ScriptObject)
        and str(argument._type()).endswith("ProcessGroup")
    )


def _message(operator: str, args: Sequence[Any]) -> Message:
    ranks = tuple(dist.get_process_group_ranks(group_in(args)))
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    described = tuple((tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors)
    if operator == "c10d::alltoall_base_" and args[3]:
        return Message(operator, ranks, described, splits=(tuple(args[3]), tuple(args[4])))
    place = _PEERS.get(operator)
    return Message(operator, ranks, described, None if place is None else ranks[args[place]])

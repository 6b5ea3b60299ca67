"""Find work on two streams that touches the same memory without an order between the two.

Every operation of torch is a launch on the current stream. It reads its inputs and writes what its
schema states. Two accesses to overlapping memory race if at least one is a write and neither is
known to be done when the other starts. This is so if the vector clock of the later access does not
contain the time of the earlier one.

An asynchronous collective, and every send and receive, is a launch on the stream of its group, as
in NCCL. It starts after the current stream's work, and the stream that calls ``work.wait()``
continues after it. A collective that is not asynchronous runs on the current stream.

The host is a stream, too. Its memory is pinned memory, and what is computed from it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaspeed.pipeline import p2p
from megaspeed.zero import reductions
from tests.paper_gpu.accelerator import Clock, PaperAccelerator, PaperStream, join
from tests.paper_gpu.recorder import NO_KERNEL, READS_BEFORE_DISPATCH, caller, group_in

# The index of the argument that a call of a process group writes. Other calls write all arguments.
_WRITTEN = {
    "c10d::send": (),
    "c10d::_allgather_base_": (0,),
    "c10d::allgather_into_tensor_coalesced_": (0,),
    "c10d::_reduce_scatter_base_": (0,),
    "c10d::alltoall_base_": (0,),
}


@dataclass(frozen=True)
class _Access:
    """Bytes [start, stop) of a storage, touched at ``time`` of a stream."""

    start: int
    stop: int
    stream: int
    time: int
    write: bool
    where: str


class _Host(PaperStream):
    """The host. All that it launches later is ordered after what it has waited for."""

    def __init__(self, accelerator: PaperAccelerator) -> None:
        super().__init__(accelerator, name="host")
        self.clock = accelerator.host_clock
        self.clock[self.number] = 0


class _PinnedMemory(TorchFunctionMode):
    """Reports to a finder what is allocated in pinned memory."""

    def __init__(self, finder: "RaceFinder") -> None:
        super().__init__()
        self._finder = finder

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in READS_BEFORE_DISPATCH and self._finder.is_on_host(args[:1]):
            self._finder.read_by_host(args[0], f"{caller()} {name}")
        result = function(*args, **(kwargs or {}))
        if (kwargs or {}).get("pin_memory"):
            self._finder.made_on_host(result)
        return result


class RaceFinder(TorchDispatchMode):
    """Check every operation within its block.

    Attributes:
        races: (where in the code the first access is, where the second is) -> how often.
    """

    def __init__(self, accelerator: PaperAccelerator) -> None:
        super().__init__()
        self._accelerator = accelerator
        self._accesses: dict[int, list[_Access]] = defaultdict(list)
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no key is reused
        self._streams: dict[str, PaperStream] = {}
        self._works: dict[int, tuple[dist.Work, Clock]] = {}  # kept alive for the same reason
        self._patch = pytest.MonkeyPatch()
        self._host, self._host_memory = _Host(accelerator), set[int]()
        self._pinned = _PinnedMemory(self)
        self.races: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> Self:
        self._wait, finder = FakeWork.wait, self

        def wait(work: FakeWork, *args: Any) -> Any:
            finder.join(work)
            return finder._wait(work, *args)

        FakeWork.wait = wait  # type: ignore[assignment, method-assign]
        for module in (p2p, reductions):
            # A message is a second storage of the same memory, so its accesses would not be found.
            self._patch.setattr(module, "as_message", lambda tensor: tensor)
        self._pinned.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._pinned.__exit__(*error)
        FakeWork.wait = self._wait  # type: ignore[method-assign]
        self._patch.undo()

    def join(self, work: dist.Work) -> None:
        """Make the current stream wait for a collective."""
        _, clock = self._works.pop(id(work), (None, {}))
        join(self._accelerator.current_stream().clock, clock)

    def made_on_host(self, tensor: Tensor) -> None:
        """Note that a tensor is in the host's memory."""
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage
        self._host_memory.add(storage._cdata)

    def is_on_host(self, tensors: Sequence[Any]) -> bool:
        """Return whether there is at least one tensor, and all are in the host's memory."""
        own = [one.untyped_storage()._cdata in self._host_memory for one in _tensors(tensors)]
        return bool(own) and all(own)

    def read_by_host(self, tensor: Tensor, where: str) -> None:
        self._host.launch()
        self._touch(tensor, False, where, self._host)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = function._schema.name
        result = function(*args, **(kwargs or {}))
        if name.partition("::")[2] not in NO_KERNEL:
            where = f"{caller()} {name}"
            if self.is_on_host([args, kwargs]):
                for one in _tensors(result):
                    self.made_on_host(one)
            stream = self._stream_of(function._schema, args, kwargs or {})
            stream.launch()
            for tensor, write in _touched(function._schema, args, kwargs or {}, result):
                self._touch(tensor, write, where, stream)
            if stream not in (self._accelerator.current_stream(), self._host):
                boxed = result[-1] if isinstance(result, tuple) else result
                work = dist.Work.unbox(boxed)
                self._works[id(work)] = work, dict(stream.clock)
            if name == "c10d::allreduce_" and "all_gather_numbers" in where:
                # The host reads the numbers that it gathered. On a CPU, the dispatcher does not
                # see this read.
                self._accelerator.host_clock.update(self._accelerator.current_stream().clock)
        return result

    def _stream_of(
        self, schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> PaperStream:
        """Return an operation's stream. The stream of a group starts after the current stream."""
        current = self._accelerator.current_stream()
        if self.is_on_host([args, kwargs]):
            return self._host
        if not schema.name.startswith("c10d::"):
            return current
        given = {a.name: value for a, value in zip(schema.arguments, args, strict=False)}
        if not (given | dict(kwargs)).get("async_op", True):
            return current
        group = group_in(args).group_name
        if group not in self._streams:
            self._streams[group] = PaperStream(self._accelerator, name=f"group {group}")
        join(self._streams[group].clock, current.clock)
        return self._streams[group]

    def _touch(self, tensor: Tensor, write: bool, where: str, stream: PaperStream) -> None:
        storage = tensor.untyped_storage()
        if tensor.numel() == 0 or storage.nbytes() == 0:
            return
        size = tensor.element_size()
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        start = int(tensor.storage_offset()) * size
        own = _Access(
            start,
            start + (last + 1) * size,
            stream.number,
            stream.clock[stream.number],
            write,
            where,
        )
        # Keep it: its memory may be freed and then reused by another tensor.
        identity = storage._cdata
        self._storages[identity] = storage
        kept = []
        for other in self._accesses[identity]:
            overlaps = other.start < own.stop and own.start < other.stop
            done = other.time <= stream.clock.get(other.stream, 0)
            if overlaps and not done and (write or other.write):
                self.races[other.where, where] += 1
            covered = own.start <= other.start and other.stop <= own.stop
            if not (covered and done and (write or not other.write)):
                kept.append(other)
        self._accesses[identity] = [*kept, own]


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _touched(
    schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> Iterator[tuple[Tensor, bool]]:
    """Yield (tensor, whether it is written) for each tensor of one operation."""
    inputs = []
    for index, argument in enumerate(schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        write = argument.alias_info is not None and argument.alias_info.is_write
        if schema.name.startswith("c10d::"):
            write = index in _WRITTEN.get(schema.name, (index,))
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                inputs.append(leaf)
                yield leaf, write
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor) and not any(leaf is given for given in inputs):
            yield leaf, True

r"""Record every tensor storage that a block of code allocates and frees, and its category.

    with AllocationLog(device) as log:        bytes
        ...                                     |      /\     /\    <- peak
    log.claim("gradients", tensors)             |  /\_/  \___/  \
    log.peak() -> MemoryBytes                   |_/______________\___ time (allocations and frees)

The log counts torch storages. It does not see the workspaces of operations, nor other memory of the
process or an allocator. A storage has one category from its allocation until it is freed. The
category may become known late (a gradient is recognised when it is complete), so the peak is a list
of storages, whose categories are read at the end. torch's memory tracker
(``torch.distributed._tools``) does the same for FSDP's categories.
"""

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaspeed.planning.costs.memory import Category, MemoryBytes


@dataclass(slots=True)
class Allocation:
    """A storage from its allocation until it is freed or resized."""

    size_bytes: int
    category: Category


class AllocationLog(TorchDispatchMode):
    """Record the storages on one kind of device; see the module's docstring.

    Args:
        device: where memory is counted. Storages on other devices are ignored.
        category_of: module name of the code that allocates -> the category of what it allocates.
            If it returns None, the caller of that code decides. If no caller decides, storages
            are activations.
    """

    def __init__(
        self, device: torch.device, category_of: Callable[[str], Category | None] = lambda _: None
    ) -> None:
        super().__init__()
        self._device_type = device.type
        self._category_of = category_of
        self._live: dict[int, Allocation] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._total = 0
        self._peak_total = 0
        self._peak: list[Allocation] = []  # the storages at the time of the peak

    def claim(self, category: Category, tensors: Iterable[Tensor | None]) -> None:
        """Set the category of these tensors' storages. Add storages that are not in the log."""
        for tensor in tensors:
            if tensor is not None:
                allocation = self._record(tensor, category)
                if allocation is not None:
                    allocation.category = category

    def claim_everything_else_alive(self, category: Category) -> None:
        """Add every tensor that Python can reach and that is not in the log yet."""
        gc.collect()  # frees objects that only objects like them refer to
        for thing in gc.get_objects():
            # isinstance reads the __class__ of a proxy object, which may raise; type does not.
            if issubclass(type(thing), Tensor):
                self._record(thing, category)

    def live(self) -> MemoryBytes:
        """Return the bytes held now, by category."""
        return _by_category(self._live.values())

    def peak(self) -> MemoryBytes:
        """Return the bytes of each category at the moment when their sum was largest."""
        return _by_category(self._peak)

    def __enter__(self) -> Self:
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            self._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]
        super().__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        super().__exit__(kind, error, trace)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # torch then calls it again with the local parts
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._record(leaf, None)
        return result

    def _record(self, tensor: Tensor, category: Category | None) -> Allocation | None:
        if isinstance(tensor, DTensor):  # it has a size but no memory
            tensor = tensor._local_tensor
        if tensor.device.type != self._device_type:
            return None
        if tensor.layout != torch.strided:  # a sparse tensor has no storage, but its parts do
            return None
        if isinstance(tensor, FakeTensor):  # torch.compile traces with these; they have no memory
            return None
        storage = tensor.untyped_storage()
        known = self._live.get(storage._cdata)
        if known is not None and known.size_bytes != storage.nbytes():
            self._resized(storage)  # by an operation such as ``Tensor.resize_``
            return self._live.get(storage._cdata)
        if known is not None or storage.nbytes() == 0:
            return known
        return self._add(storage, category or self._category_of_caller())

    def _add(self, storage: torch.UntypedStorage, category: Category) -> Allocation:
        allocation = Allocation(storage.nbytes(), category)
        key = storage._cdata
        self._live[key] = allocation
        self._references[key] = weakref.ref(storage, lambda _: self._end(key))
        self._total += allocation.size_bytes
        if self._total > self._peak_total:
            self._peak_total, self._peak = self._total, list(self._live.values())
        return allocation

    def _end(self, key: int) -> Allocation | None:
        self._references.pop(key, None)
        allocation = self._live.pop(key, None)
        if allocation is not None:
            self._total -= allocation.size_bytes
        return allocation

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage has another size: it counts as freed and allocated again."""
        if storage.device.type != self._device_type:
            return
        before = self._end(storage._cdata)
        if storage.nbytes():
            self._add(storage, before.category if before else self._category_of_caller())

    def _category_of_caller(self) -> Category:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            category = self._category_of(frame.f_globals.get("__name__", ""))
            if category is not None:
                return category
            frame = frame.f_back
        return "activations"


def _by_category(allocations: Iterable[Allocation]) -> MemoryBytes:
    totals: Counter[str] = Counter()
    for allocation in allocations:
        totals[allocation.category] += allocation.size_bytes
    return MemoryBytes(**totals)

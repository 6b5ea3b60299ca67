"""Full recomputation whose inputs wait in host memory between forward and backward.

    forward     input of block i   --copies--> page-locked host memory     while block i computes
    backward    host memory        --copies--> device                      while block i + 1 does

With this, a GPU keeps no activation of a recomputed block, so the memory of its activations does
not grow with the number of blocks (Bekman et al. 2025, "Arctic Long Sequence Training"). torch's
``save_on_cpu`` copies on the computing stream, and the host waits for it.

At most two inputs are on the device. The next block waits until the copy of the input before has
left, and memory for the way back is allocated on the computing stream.
"""

from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_SLAB_BYTES = 256 << 20
"""An input is kept in parts of this size, because torch rounds the size of page-locked memory up to
a power of two (2.13, CachingHostAllocator.h)."""


@dataclass(eq=False)  # found in a list by identity: == of tensors is no bool
class _Held:
    """An input that a backward will need."""

    on_host: list[Tensor]  # its parts, one after another
    shape: torch.Size
    device: torch.device
    on_device: Tensor | None = None
    arrived: Any = None  # the event of its arrival on the device


class HostInputs:
    """Keeps the tensors that autograd saves within ``hooks`` in host memory."""

    def __init__(self) -> None:
        self._accelerator = get_accelerator()
        self._stream = self._accelerator.Stream()
        self._held: list[_Held] = []
        self._leaving: tuple[Tensor, Any] | None = None  # a tensor, and the event of its copy
        self._buffers: list[Tensor] = []  # of page-locked memory; not in use

    def hooks(self) -> saved_tensors_hooks:
        """A context in which saved tensors are copied to host memory."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, x: Tensor) -> _Held:
        self._wait_for_leaving()
        parts = x.reshape(-1).split(_SLAB_BYTES // x.element_size())
        held = _Held([*map(self._buffer, parts)], x.shape, x.device)
        self._stream.wait_stream(self._accelerator.current_stream())
        with self._accelerator.stream(self._stream):
            for buffer, part in zip(held.on_host, parts, strict=True):
                buffer.copy_(part, non_blocking=True)
        self._leaving = x.detach(), self._stream.record_event()
        self._held.append(held)
        return held

    def _unpack(self, held: _Held) -> Tensor:
        self._wait_for_leaving()
        index = self._held.index(held)
        self._fetch(held)
        self._accelerator.current_stream().wait_event(held.arrived)
        if index > 0:  # the block before is next: its input travels while this block computes
            self._fetch(self._held[index - 1])
        self._held.pop(index)
        # Copies of one stream are in order, so the next one cannot overwrite it too early.
        self._buffers += held.on_host
        assert held.on_device is not None
        return held.on_device

    def _fetch(self, held: _Held) -> None:
        if held.on_device is None:
            dtype = held.on_host[0].dtype
            # On the computing stream, which frees it: so the allocator may reuse it at once.
            held.on_device = torch.empty(held.shape, dtype=dtype, device=held.device)
            self._stream.wait_stream(self._accelerator.current_stream())
            with self._accelerator.stream(self._stream):
                parts = held.on_device.view(-1).split([len(part) for part in held.on_host])
                for part, buffer in zip(parts, held.on_host, strict=True):
                    part.copy_(buffer, non_blocking=True)
            held.arrived = self._stream.record_event()

    def _wait_for_leaving(self) -> None:
        """Free the input that was copied last, once the copy has ended."""
        if self._leaving is not None:
            self._accelerator.current_stream().wait_event(self._leaving[1])
            self._leaving = None

    def _buffer(self, x: Tensor) -> Tensor:
        for index, buffer in enumerate(self._buffers):
            if buffer.shape == x.shape and buffer.dtype == x.dtype:
                return self._buffers.pop(index)
        # Only page-locked memory is copied while the host continues. Locking takes long, so buffers
        # are used again.
        return self._accelerator.pin_memory(torch.empty(x.shape, dtype=x.dtype))

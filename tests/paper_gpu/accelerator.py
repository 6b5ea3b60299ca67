"""An accelerator for DeepSpeed that is a CPU and claims to be an asynchronous device.

DeepSpeed asks its accelerator whether work is done when a call returns. A CPU answers yes, and
DeepSpeed skips its streams, its events and its synchronisations. This one answers no. Its streams
and events run nothing, because the CPU has done the work already. They record two things.

What the host waits for:

    device   until a stream, or the complete device, has no work left
    event    for one event, while later work stays queued: DeepSpeed's limit on how many parameters
             ZeRO-3 gathers ahead, and its copies of offloaded gradients

What happens before what: the host and each stream have a vector clock (Lamport 1978; Mattern 1989).
A launch, a wait or a synchronisation advances or joins clocks as CUDA would order the work.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.paper_gpu.recorder import caller
from tests.support.wide_product import wide_products

Clock = dict[int, int]
"""Stream number -> how much of its work is known to be done."""


def join(clock: Clock, other: Clock) -> None:
    """Raise a clock so that it includes what the other one knows to be done."""
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


class PaperStream:
    """A queue of work on the device."""

    def __init__(
        self, accelerator: "PaperAccelerator", name: str = "side", priority: int = 0
    ) -> None:
        self._accelerator = accelerator
        self.priority = priority
        self.number = accelerator.add(self)
        self.name = name
        self.clock: Clock = {self.number: 0}

    def launch(self) -> int:
        """Launch a kernel after all that the host knows of. Return its time in this stream."""
        join(self.clock, self._accelerator.host_clock)
        self.clock[self.number] += 1
        return self.clock[self.number]

    def synchronize(self) -> None:
        self._accelerator.waits["device", f"{caller()} {self.name} stream"] += 1
        join(self._accelerator.host_clock, self.clock)

    def wait_stream(self, other: "PaperStream") -> None:
        join(self.clock, other.clock)

    def wait_event(self, event: "PaperEvent") -> None:
        join(self.clock, event.clock)

    def record_event(self, event: "PaperEvent | None" = None) -> "PaperEvent":
        event = event or PaperEvent(self._accelerator)
        event.record(self)
        return event

    def query(self) -> bool:
        return False  # the host never knows whether the device is done


class PaperEvent:
    """A place in a stream."""

    def __init__(self, accelerator: "PaperAccelerator") -> None:
        self._accelerator = accelerator
        self.clock: Clock = {}

    def record(self, stream: PaperStream | None = None) -> None:
        self.clock = dict((stream or self._accelerator.current_stream()).clock)

    def wait(self, stream: PaperStream | None = None) -> None:
        (stream or self._accelerator.current_stream()).wait_event(self)

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._accelerator.waits["event", caller()] += 1
        join(self._accelerator.host_clock, self.clock)

    def elapsed_time(self, end: "PaperEvent") -> float:
        return 1.0  # milliseconds; DeepSpeed divides by it


class PaperAccelerator(CPU_Accelerator):
    """An accelerator that takes DeepSpeed's CUDA branches on a CPU.

    Attributes:
        waits: (kind, where in the code) -> how often the host has waited.
        host_clock: what the host knows to be done.
        kept: (storage, stream's name) of each ``Tensor.record_stream``. Such memory is not reused
            before the stream has reached this point.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[tuple[str, str]] = Counter()
        self.host_clock: Clock = {}
        self.kept: list[tuple[torch.UntypedStorage, str]] = []
        self._numbers = itertools.count()
        self._streams: list[PaperStream] = []
        self._default = PaperStream(self, "default")
        self._current = self._default

    def add(self, stream: PaperStream) -> int:
        """Register a new stream. Return its number."""
        self._streams.append(stream)
        return next(self._numbers)

    @property
    def device_waits(self) -> dict[str, int]:
        """Return where the host waits for all work of a stream or of the device, and how often."""
        return {where: count for (kind, where), count in self.waits.items() if kind == "device"}

    @property
    def event_waits(self) -> dict[str, int]:
        """Return where the host waits for one event, and how often."""
        return {where: count for (kind, where), count in self.waits.items() if kind == "event"}

    def is_synchronized_device(self) -> bool:
        return False

    def synchronize(self, device_index: int | None = None) -> None:
        self.waits["device", f"{caller()} whole device"] += 1
        for stream in self._streams:
            join(self.host_clock, stream.clock)

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    @property
    def Stream(self) -> Any:
        return lambda device=None, priority=0: PaperStream(self, priority=priority)

    @property
    def Event(self) -> Any:
        return lambda *args, **kwargs: PaperEvent(self)

    @contextmanager
    def stream(self, stream: PaperStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def current_stream(self, device_index: int | None = None) -> PaperStream:
        return self._current

    def default_stream(self, device_index: int | None = None) -> PaperStream:
        return self._default


class _OnDevice(TorchFunctionMode):
    """Makes ``is_cuda`` true in megaspeed's code, and allocates ordinary memory instead of pinned
    memory, which needs a GPU.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(function, "__self__", None) is Tensor.is_cuda:
            frame = sys._getframe(1)
            while "/paper_gpu/" in frame.f_code.co_filename and frame.f_back:  # other modes
                frame = frame.f_back
            return "/megaspeed/" in frame.f_code.co_filename
        return function(*args, **{k: v for k, v in (kwargs or {}).items() if k != "pin_memory"})


@contextmanager
def paper_accelerator() -> Iterator[PaperAccelerator]:
    """Replace DeepSpeed's accelerator in this block. The engine must be built within the block.

    ``is_cuda`` of a tensor is true in megaspeed's code, and torch's current stream is that of the
    accelerator. The CPU also has the kernel of GPUs that adds products to sums in fp32.
    """
    accelerator = PaperAccelerator()
    record_stream = torch.Tensor.record_stream

    def note_stream(tensor: Tensor, stream: PaperStream) -> None:
        accelerator.kept.append((tensor.untyped_storage(), stream.name))

    torch.Tensor.record_stream = note_stream  # type: ignore[assignment,method-assign]
    set_accelerator(accelerator)
    try:
        with (
            wide_products(),
            patch.object(torch.cuda, "current_stream", accelerator.current_stream),
            _OnDevice(),
        ):
            yield accelerator
    finally:
        set_accelerator(CPU_Accelerator())
        torch.Tensor.record_stream = record_stream  # type: ignore[method-assign]

"""An accelerator for DeepSpeed that is a CPU and claims to be an asynchronous device.

DeepSpeed asks its accelerator whether work is done when a call returns. A CPU says yes, and
DeepSpeed skips its streams, its events and its synchronisations. This one says no. Its streams and
events do nothing, because the CPU has done the work already; they record what the host waits for.

Two kinds of waits are told apart:

    device   the host waits until a stream, or the whole device, has nothing left to do
    event    the host waits for one event, while later work stays queued: DeepSpeed's limit on how
             many parameters ZeRO-3 gathers ahead
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from tests.paper_gpu.recorder import caller


class PaperStream:
    """A queue of work on the device."""

    def __init__(self, waits: Counter[tuple[str, str]], name: str = "side") -> None:
        self._waits = waits
        self.name = name

    def synchronize(self) -> None:
        self._waits["device", f"{caller()} {self.name} stream"] += 1

    def wait_stream(self, other: PaperStream) -> None:
        """The device waits, not the host."""

    def wait_event(self, event: PaperEvent) -> None:
        """The device waits, not the host."""

    def record_event(self, event: PaperEvent | None = None) -> PaperEvent:
        return event or PaperEvent(self._waits)

    def query(self) -> bool:
        return False  # a device is never known to be done


class PaperEvent:
    """A place in a stream."""

    def __init__(self, waits: Counter[tuple[str, str]]) -> None:
        self._waits = waits

    def record(self, stream: PaperStream | None = None) -> None:
        """The device takes a note, the host does not wait."""

    def wait(self, stream: PaperStream | None = None) -> None:
        """The device waits, not the host."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._waits["event", caller()] += 1

    def elapsed_time(self, end: PaperEvent) -> float:
        return 1.0  # milliseconds; DeepSpeed divides by it


class PaperAccelerator(CPU_Accelerator):  # type: ignore[misc]
    """Takes DeepSpeed's CUDA branches on a CPU.

    Attributes:
        waits: (kind, where in the code) -> how often the host has waited.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[tuple[str, str]] = Counter()
        self._default = PaperStream(self.waits, "default")
        self._current = self._default

    @property
    def device_waits(self) -> dict[str, int]:
        """Where the host waits for all work of a stream or of the device."""
        return {where: count for (kind, where), count in self.waits.items() if kind == "device"}

    @property
    def event_waits(self) -> dict[str, int]:
        """Where the host waits for one event."""
        return {where: count for (kind, where), count in self.waits.items() if kind == "event"}

    def is_synchronized_device(self) -> bool:
        return False

    def synchronize(self, device_index: int | None = None) -> None:
        self.waits["device", f"{caller()} whole device"] += 1

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    @property
    def Stream(self) -> Any:
        return lambda *args, **kwargs: PaperStream(self.waits)

    @property
    def Event(self) -> Any:
        return lambda *args, **kwargs: PaperEvent(self.waits)

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


@contextmanager
def paper_accelerator() -> Iterator[PaperAccelerator]:
    """DeepSpeed's accelerator in this block; for a process that builds its engine within it."""
    accelerator = PaperAccelerator()
    record_stream = torch.Tensor.record_stream
    # A tensor of a CPU knows no streams of ours; nothing is freed too early here.
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
    set_accelerator(accelerator)
    try:
        yield accelerator
    finally:
        set_accelerator(CPU_Accelerator())
        torch.Tensor.record_stream = record_stream  # type: ignore[method-assign]
    sys.stdout.flush()

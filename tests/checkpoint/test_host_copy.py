"""Copies for a background save: only the saving thread waits for the device.

The device is simulated. It runs its queued work only when somebody waits for an event.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megaspeed.checkpoint import tensors as pieces_module
from megaspeed.checkpoint.tensors import HostCopy, Piece

SLAB_BYTES = 4096
SHAPES = [(3,), (20, 10), (7, 11), (16, 16), (30, 30), (1, 1)]


class Stream:
    """The queued work of the simulated device, in order."""

    def __init__(self) -> None:
        self.enqueued: list[Callable[[], object]] = []

    def run(self, number: int) -> None:
        """Do the first ``number`` parts of the work."""
        for work in self.enqueued[:number]:
            work()
        del self.enqueued[:number]


class OnDevice(Tensor):
    """Values on the simulated device. Copying them is queued, and must not wait."""

    stream: Stream

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if function is not Tensor.copy_:
            return super().__torch_function__(function, types, arguments, options)
        assert options == {"non_blocking": True}
        host, original = arguments
        original.stream.enqueued.append(lambda: host.copy_(original.as_subclass(Tensor)))
        return host


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Return the stream of the simulated device. torch's event and pinned memory use
    this stream.
    """
    stream = Stream()

    class Event:
        def __init__(self, device: torch.device) -> None:
            assert device.type == "cuda", "a CPU has no events"

        def record(self) -> None:
            self.before = len(stream.enqueued)

        def synchronize(self) -> None:
            stream.run(self.before)

    monkeypatch.setattr(torch, "Event", Event)
    return stream


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, bool]]]:
    """Yield (bytes, pinned) of every allocation of host memory that is not empty."""
    monkeypatch.setattr(pieces_module, "SLAB_BYTES", SLAB_BYTES)
    made: list[tuple[int, bool]] = []
    empty = torch.empty

    def record(elements: int, *, dtype: torch.dtype, pin_memory: bool = False) -> Tensor:
        if elements > 0:
            made.append((elements * dtype.itemsize, pin_memory))
        return empty(elements, dtype=dtype)

    with mock.patch.object(torch, "empty", record):
        yield made


def make_pieces(stream: Stream | None = None) -> list[Piece]:
    """Return pieces of random values. They are on the simulated device if there is a stream."""
    pieces = []
    for number, shape in enumerate(SHAPES):
        values = torch.randn(shape)
        if stream is not None:
            values = values.as_subclass(OnDevice)
            values.stream = stream
        pieces.append(Piece(f"weights.{number}", shape, (0,) * len(shape), values))
    return pieces


def plain(piece: Piece) -> Tensor:
    """Return a copy of the present values."""
    return piece.values.as_subclass(Tensor).clone()


def test_copies_arrive_in_the_order_of_the_stream_without_waiting(
    stream: Stream, allocations: list[tuple[int, bool]]
) -> None:
    pieces = make_pieces(stream)
    host_copy = HostCopy()
    for _ in range(2):
        asked = [plain(piece) for piece in pieces]
        copies, wait = host_copy.take(pieces)
        assert len(stream.enqueued) == len(pieces), "the training waited for a copy"
        step = [piece.values.as_subclass(Tensor).add_ for piece in pieces]
        stream.enqueued += [partial(add, 1.0) for add in step]  # the next optimizer step
        wait()
        assert len(stream.enqueued) == len(pieces), "it waits only for the copies"
        stream.run(len(pieces))
        for piece, copy, values in zip(pieces, copies, asked, strict=True):
            assert torch.equal(copy.values, values) and not torch.equal(plain(piece), values)
            assert (copy.key, copy.offsets) == (piece.key, piece.offsets)


@pytest.mark.parametrize("on_device", [True, False])
def test_the_memory_is_a_few_slabs_taken_once(
    stream: Stream, allocations: list[tuple[int, bool]], on_device: bool
) -> None:
    """The sizes in bytes, at multiples of 64, are 64, 832, 320, 1024, 3648, 64."""
    pieces = make_pieces(stream if on_device else None)
    host_copy = HostCopy()
    copies, _ = host_copy.take(pieces)
    host_copy.take(pieces)
    assert allocations == [(SLAB_BYTES, on_device), (3648 + 64, on_device)]
    starts = [copy.values.data_ptr() for copy in copies]
    assert [start - starts[0] for start in starts[:4]] == [0, 64, 896, 1216]
    assert starts[5] - starts[4] == 3648


def test_a_piece_larger_than_a_slab_has_one_of_its_own(
    allocations: list[tuple[int, bool]],
) -> None:
    values = torch.randn(SLAB_BYTES)
    (copy,), _ = HostCopy().take([Piece("weights.large", (SLAB_BYTES,), (0,), values)])
    assert allocations == [(4 * SLAB_BYTES, False)] and torch.equal(copy.values, values)


def test_nothing_is_waited_for_on_a_cpu() -> None:
    pieces = make_pieces()
    copies, wait = HostCopy().take(pieces)
    asked = [plain(piece) for piece in pieces]
    for piece in pieces:
        piece.values.zero_()
    wait()
    assert all(torch.equal(copy.values, was) for copy, was in zip(copies, asked, strict=True))

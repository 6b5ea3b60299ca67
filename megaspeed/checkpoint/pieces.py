"""What one rank has of the checkpoint's tensors: rectangles of logical tensors, as views.

    flat range of a tensor shard  --rectangles-->  pieces  --planners-->  files

The same pieces are written from and read into.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megaspeed.checkpoint.rectangles import rectangles_of
from megaspeed.tensor_parallel import ParameterShard

# A rectangle is copied to host memory before it is written, and whole rows of it are read where a
# part of them is needed, so they must not be large; and the index lists every one, so they must not
# be many.
LARGEST_PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class Piece:
    """A rectangle of one tensor of the checkpoint.

    Attributes:
        key: the tensor's name in the checkpoint.
        full_shape: of the logical tensor.
        offsets: where in it the rectangle begins.
        values: the rectangle's elements, of its shape, contiguous.
    """

    key: str
    full_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Tensor


def pieces_of(
    key: str, shard: ParameterShard, start: int, values: Tensor, *, part: range | None = None
) -> Iterator[Piece]:
    """The pieces of one flat fragment.

    Args:
        key: the tensor's name in the checkpoint.
        shard: the tensor shard that the fragment is of.
        start: the fragment's first element in the flattened shard.
        values: its elements, flat.
        part: which elements of the flattened shard are wanted; all where left out.
    """
    stop = start + values.numel()
    low, high = (start, stop) if part is None else (max(start, part.start), min(stop, part.stop))
    largest = LARGEST_PIECE_BYTES // values.element_size()
    for rectangle in rectangles_of(shard, low, high, largest=largest):
        flat = values.narrow(0, rectangle.start - start, rectangle.elements)
        yield Piece(key, shard.full_shape, rectangle.offsets, flat.view(rectangle.sizes))


class HostCopy:
    """Copies of pieces in host memory, for a save that goes on while the originals change.

    The memory is kept from one save to the next: pinned pages take long to get.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def take(self, pieces: Iterable[Piece]) -> list[Piece]:
        """The same pieces with values of now; those taken before are overwritten."""
        pieces = list(pieces)
        if not self._buffers:
            self._buffers = [_host_buffer(piece.values) for piece in pieces]
        copies = []
        for piece, buffer in zip(pieces, self._buffers, strict=True):
            buffer.copy_(piece.values, non_blocking=True)
            copies.append(Piece(piece.key, piece.full_shape, piece.offsets, buffer))
        if any(piece.values.is_cuda for piece in pieces):
            torch.cuda.synchronize()
        return copies


def _host_buffer(values: Tensor) -> Tensor:
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)

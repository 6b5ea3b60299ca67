"""The tensors of a checkpoint: names and shapes, and the parts that one rank holds.

    weights.blocks.0.mlp.up.weight       (F, D)   float32
    exp_avg.blocks.0.mlp.up.weight       (F, D)   float32
    exp_avg_sq.blocks.0.mlp.up.weight    (F, D)   float32

They follow from the model and the optimizer (``kinds_of``). A matrix that Muon updates has

    weights.blocks.0.mlp.up.weight       (F, D)   float32
    momentum.blocks.0.mlp.up.weight      (F, D)   float32

With ``model.router_bias_rate``, each block also has the bias of its E experts:

    router_bias.blocks.0.mlp.router      (E,)     float32

An imported model that was not trained yet has weights only. With
``parallel.gradient_compression`` there are also, of each compressed matrix,

    feedback0.blocks.0.mlp.up.weight     (F, D)   what data rank or replica 0 has not sent, ...
    factor0.blocks.0.mlp.up.weight       (D, r)   PowerSGD's Q of tensor rank 0, factor1, ...

The first and the last pipeline stage each have these tensors for a tied weight, under the names of
the embedding and of the head.

    flat range of a tensor shard  --boxes-->  pieces  --writing, reading-->  files

ZeRO cuts a rank's tensors into flat ranges, and a checkpoint stores boxes of logical tensors. A
flat range of a matrix is at most three boxes of each section of its rows:

    local shard, 4 columns        elements [2, 14)
    . . a a                       a: the rest of the first row
    b b b b                       b: complete rows
    b b b b
    c c . .                       c: the beginning of the last row

Rows and columns of the shard are shifted to their place in the logical tensor
(``tensor_parallel.shards.ParameterShard``). Vocabulary padding is not stored, because it belongs
to no logical tensor.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megaspeed.config.errors import shortened
from megaspeed.config.model import ModelConfig
from megaspeed.config.run import Compression
from megaspeed.model.parameters import (
    EMBEDDING_WEIGHT,
    HEAD_WEIGHT,
    Parameter,
    Shape,
    parameters_of,
)
from megaspeed.tensor_parallel.shards import ParameterShard, is_compressed, shard_of
from megaspeed.topology.grid import Grid

WEIGHTS = "weights"
"""Master weights."""
ADAMW_STATE = ("exp_avg", "exp_avg_sq")
"""Adam's first and second moment (Kingma and Ba 2015, algorithm 1)."""
MUON_STATE = ("momentum",)
"""The momentum of a matrix (Jordan et al. 2024)."""

ROUTER_BIAS = "router_bias"
"""The bias that balances the experts of a block (``training/balance.py``)."""

FEEDBACK, FACTOR = "feedback", "factor"
"""Kinds of state of compressed gradients. In a name, the data rank follows the first, the tensor
rank the second."""

BYTES_PER_ELEMENT = 4
"""Every tensor is fp32."""

MOST_LISTED = 10
"""How many problems of the tensors of one checkpoint are listed. The rest is counted."""

# A piece is copied from a GPU before it is written, and complete rows of it are read even if only a
# part of a row is needed, so pieces must not be large. The index lists every piece, so there must
# not be many.
LARGEST_PIECE_BYTES = 16 << 20

SLAB_BYTES = 256 << 20
"""Host memory for copies is allocated in slabs of this size; a power of two."""
ALIGNMENT_BYTES = 64
"""Each copy begins at a cache line of its slab."""


def key(kind: str, name: str) -> str:
    """The name in a checkpoint of one of the tensors of a parameter."""
    return f"{kind}.{name}"


def expected_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Full name -> full, unpadded shape of every parameter; a tied head is the embedding."""
    return {name: parameter.shape for name, parameter in parameters_of(model).items()}


def kinds_of(parameter: Parameter, optimizer: str | None) -> tuple[str, ...]:
    """The kinds of tensors that a checkpoint has of a parameter.

    ``optimizer`` is the ``optimizer.type`` of the run; None for an imported model, which has
    weights only. Muon updates the matrices of blocks, and AdamW all other parameters.
    """
    if optimizer is None:
        return (WEIGHTS,)
    is_muon = optimizer == "Muon" and parameter.is_block_matrix
    return (WEIGHTS, *(MUON_STATE if is_muon else ADAMW_STATE))


def expected_tensors(model: ModelConfig, optimizer: str | None) -> dict[str, Shape]:
    """Name in the checkpoint -> shape of every tensor in a checkpoint of the model.

    ``optimizer`` is as in ``kinds_of``.
    """
    named = parameters_of(model).items()
    tensors = {key(k, name): each.shape for name, each in named for k in kinds_of(each, optimizer)}
    if optimizer is not None and model.router_bias_rate > 0.0:
        routers = ((name, each) for name, each in named if each.row.kind == "router")
        tensors |= {router_bias_key(name): (each.shape[0],) for name, each in routers}
    return tensors


def router_bias_key(name: str) -> str:
    """The name in a checkpoint of a router's bias. ``name`` is the full name of its weight."""
    return key(ROUTER_BIAS, name.removesuffix(".weight"))


def compression_tensors(
    model: ModelConfig, compression: Compression | None, grid: Grid
) -> dict[str, Shape]:
    """Name in the checkpoint -> shape of the tensors that compression adds on a grid.

    With shards and replicas, PowerSGD's Q is not saved, because it may be of parts of matrices.
    """
    matrices = {
        name: parameter
        for name, parameter in parameters_of(model).items()
        if grid.senders > 1 and is_compressed(model, parameter, compression, size=grid.tp)
    }
    if model.tie_word_embeddings and grid.pp > 1 and EMBEDDING_WEIGHT in matrices:
        matrices[HEAD_WEIGHT] = matrices[EMBEDDING_WEIGHT]
    tensors: dict[str, Shape] = {}
    for name, parameter in matrices.items():
        if compression is not None and compression.error_feedback:
            ranks = range(grid.senders)
            tensors |= {key(f"{FEEDBACK}{rank}", name): parameter.shape for rank in ranks}
        if compression is not None and compression.type == "powersgd" and not grid.is_hybrid:
            for rank in range(grid.tp):
                shard = shard_of(model, parameter, rank=rank, size=grid.tp)
                tensors[key(f"{FACTOR}{rank}", name)] = (shard.local_shape[1], compression.rank)
    return tensors


def mismatches(expected: Mapping[str, Shape], saved: Mapping[str, Shape]) -> list[str]:
    """The differences between the tensors of a checkpoint and those of a model, as sentences.

    Both arguments have names in the checkpoint, or both have names of parameters. Optimizer state
    with the same problem as its weight is not listed. At most ten problems are listed.
    """
    problems = dict(_problems(expected, saved))

    def is_of_weight(full_name: str) -> bool:
        kind, _, name = full_name.partition(".")
        is_state = kind in (*ADAMW_STATE, *MUON_STATE)
        return is_state and problems.get(key(WEIGHTS, name)) == problems[full_name]

    sentences = (f"{name} {why}" for name, why in problems.items() if not is_of_weight(name))
    return shortened(sentences, MOST_LISTED)


def shape_text(shape: Shape) -> str:
    """A shape for a message.

    >>> shape_text((301, 32)), shape_text((32,))
    ('301 x 32', '32')
    """
    return " x ".join(map(str, shape)) or "a single number"


def _problems(
    expected: Mapping[str, Shape], saved: Mapping[str, Shape]
) -> Iterator[tuple[str, str]]:
    """(name, problem) of each tensor that differs."""
    for name, shape in expected.items():
        if name not in saved:
            yield name, f"({shape_text(shape)}) is missing in the checkpoint"
        elif tuple(saved[name]) != tuple(shape):
            there, here = shape_text(saved[name]), shape_text(shape)
            yield name, f"is {there} in the checkpoint, but {here} in the model"
    for name, shape in saved.items():
        if name not in expected:
            yield name, f"({shape_text(shape)}) is in the checkpoint, but not in the model"


@dataclass(frozen=True, order=True)
class Box:
    """A part of a tensor: in each dim, ``sizes`` indices from ``offsets`` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """The index after the last one, in each dim."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def elements(self) -> int:
        return prod(self.sizes)

    def __str__(self) -> str:
        spans = zip(self.offsets, self.ends, strict=True)
        return "[" + ", ".join(f"{start}:{end}" for start, end in spans) + "]"


def boxes_of(
    shard: ParameterShard, start: int, stop: int, *, largest: int
) -> Iterator[tuple[Box, int]]:
    """The boxes of elements [start, stop) of a flattened shard, each with its first element there.

    Args:
        shard: which part of the logical tensor the local tensor is.
        start, stop: the flat range.
        largest: how many elements a box may have. A single row of a matrix may have more.
    """
    vector = len(shard.full_shape) == 1
    width = 1 if vector else shard.local_shape[1]
    first_column = 0 if shard.columns is None else shard.columns.start
    section_start = 0
    for rows in shard.rows:
        section_stop = section_start + len(rows) * width
        low, high = max(start, section_start), min(stop, section_stop)
        while low < high:
            row, column = divmod(low - section_start, width)
            if column or high - low < width:
                height, length = 1, min(width - column, high - low)
            else:
                height, length = min((high - low) // width, max(1, largest // width)), width
            offsets, sizes = (rows.start + row, first_column + column), (height, length)
            yield Box(offsets[:1], sizes[:1]) if vector else Box(offsets, sizes), low
            low += height * length
        section_start = section_stop


def tiling_problem(shape: tuple[int, ...], boxes: Iterable[Box]) -> str | None:
    """Why some element of a tensor is not in exactly one of ``boxes``; None if all are.

    If the boxes are inside the tensor, share no element, and have as many elements as the tensor,
    then they contain every element once. The time is about proportional to the number of boxes,
    because in a checkpoint few boxes share a row.
    """
    # A sweep along the first dim: only boxes that reach into this row can share an element.
    reaching: list[Box] = []
    elements = 0
    for box in sorted(box for box in boxes if 0 not in box.sizes):
        if not _inside(box, shape):
            return f"{box} is not inside its {' x '.join(map(str, shape))}"
        reaching = [other for other in reaching if other.ends[0] > box.offsets[0]]
        shared = next((other for other in reaching if _overlap(other, box)), None)
        if shared is not None:
            return f"{shared} and {box} both hold some of its elements"
        reaching.append(box)
        elements += box.elements
    missing = prod(shape) - elements
    return f"{missing:,} of its {prod(shape):,} elements are in no file" if missing else None


def _inside(box: Box, shape: tuple[int, ...]) -> bool:
    if not len(box.offsets) == len(box.sizes) == len(shape) > 0:
        return False
    return all(
        min(offset, size) >= 0 and offset + size <= extent
        for offset, size, extent in zip(box.offsets, box.sizes, shape, strict=True)
    )


def _overlap(one: Box, other: Box) -> bool:
    starts, ends = map(max, one.offsets, other.offsets), map(min, one.ends, other.ends)
    return all(start < end for start, end in zip(starts, ends, strict=True))


@dataclass(frozen=True)
class Piece:
    """A box of one tensor of the checkpoint."""

    key: str  # the tensor's name in the checkpoint
    full_shape: tuple[int, ...]  # the shape of the logical tensor
    offsets: tuple[int, ...]  # where the box begins in the logical tensor
    values: Tensor  # the elements of the box; contiguous, in its shape

    @property
    def box(self) -> Box:
        return Box(self.offsets, tuple(self.values.shape))


@dataclass(frozen=True)
class WrittenBox:
    """A box of one tensor of the checkpoint, and its place in a file."""

    key: str  # the tensor's name in the checkpoint
    full_shape: tuple[int, ...]  # the shape of the logical tensor
    box: Box
    file: str  # the name of the file
    start: int  # the first byte of the box's archive in the file
    size_bytes: int  # the size of the archive


def pieces_of(
    key: str, shard: ParameterShard, start: int, values: Tensor, *, part: range | None = None
) -> Iterator[Piece]:
    """The pieces of one flat fragment.

    Args:
        key: the tensor's name in the checkpoint.
        shard: the tensor shard that contains the fragment.
        start: the fragment's first element in the flattened shard.
        values: the elements of the fragment, flat.
        part: the range of the flattened shard that is wanted; all of it if omitted.
    """
    stop = start + values.numel()
    low, high = (start, stop) if part is None else (max(start, part.start), min(stop, part.stop))
    largest = LARGEST_PIECE_BYTES // values.element_size()
    for box, first in boxes_of(shard, low, high, largest=largest):
        flat = values.narrow(0, first - start, box.elements)
        yield Piece(key, shard.full_shape, box.offsets, flat.view(box.sizes))


class HostCopy:
    """Copies of pieces in host memory, for a save that continues while the originals change.

    The first copy allocates the memory and later copies reuse it, because locking pages takes
    seconds. The memory is 4 bytes for each element: of each parameter that this rank writes, 12 for
    the weight and AdamW's two moments, or 8 for the weight and Muon's momentum. If the pieces are
    on a GPU, the memory is page-locked.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def take(self, pieces: Iterable[Piece]) -> tuple[list[Piece], Callable[[], None]]:
        """Copy the pieces' current values over the earlier copies, without waiting for a GPU.

        The copies are enqueued on the current stream. Work that is enqueued later, such as the next
        optimizer step, runs after them, so it cannot change what they read. A stream of their own
        would hide the transfer (0.7 s for 18 GB at 25 GB/s, once a save), but each optimizer step
        would have to wait for it.

        Returns:
            The same pieces with values in host memory, and a function that waits until these values
            have arrived.
        """
        pieces = list(pieces)
        if not self._buffers:
            self._buffers = list(_host_buffers([piece.values for piece in pieces]))
        copies = []
        for piece, buffer in zip(pieces, self._buffers, strict=True):
            buffer.copy_(piece.values, non_blocking=True)
            copies.append(Piece(piece.key, piece.full_shape, piece.offsets, buffer))
        devices = {piece.values.device for piece in pieces}
        events = [torch.Event(device) for device in devices if device.type != "cpu"]
        for event in events:
            event.record()

        def wait() -> None:
            for event in events:
                event.synchronize()

        return copies, wait


def _host_buffers(originals: Sequence[Tensor]) -> Iterator[Tensor]:
    """A tensor in host memory for each of the originals, cut from as few allocations as possible.

    torch rounds a page-locked allocation up to a power of two. A single one of 18 GB would lock
    32 GB, so the memory is taken in slabs.
    """
    pinned = any(not original.is_cpu for original in originals)
    left = sum(map(_aligned_bytes, originals))
    slab, used = torch.empty(0, dtype=torch.uint8), 0
    for original in originals:
        size = _aligned_bytes(original)
        if used + size > slab.nbytes:
            slab_bytes = max(size, min(SLAB_BYTES, left))
            slab, used = torch.empty(slab_bytes, dtype=torch.uint8, pin_memory=pinned), 0
        buffer = slab[used : used + original.nbytes]
        yield buffer.view(original.dtype).view(original.shape)
        used, left = used + size, left - size


def _aligned_bytes(values: Tensor) -> int:
    return -(-values.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

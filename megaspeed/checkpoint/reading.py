"""Reads checkpoints, whichever layout wrote them.

    __0_0.distcp    | archive | archive | ...          one for each saved box, as torch.save writes
    archive         | ... | data/0: the elements, row by row | ...
    .metadata       torch's index: the box and the place of each archive

Each process reads only the rows that its pieces overlap, and writes them where they belong. torch's
own reader loads each saved box completely and copies a part of it.

The index is a pickle, and a pickle may call any function of the machine that reads it. Here it may
only contain the parts of an index, so that a checkpoint from an unknown source cannot run code.

Importing torch.distributed.checkpoint takes about a second of processor time. So a run imports this
module only when it saves or loads, and only on the ranks that need the index.
"""

import pickle
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping
from enum import EnumType
from io import FileIO
from mmap import ACCESS_READ, ALLOCATIONGRANULARITY, mmap
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.folders import INDEX
from megaspeed.checkpoint.run_state import RunState
from megaspeed.checkpoint.tensors import BYTES_PER_ELEMENT, WEIGHTS, Piece, WrittenBox, key
from megaspeed.model.gpt import GPT
from megaspeed.supervision.answers import describe, gather
from megaspeed.tensor_parallel.parallelize import materialize

_ELEMENTS = "/data/0"
"""The end of the name of an archive's entry with the elements of its only tensor, uncompressed."""

_NO_ARCHIVE = (BadZipFile, NotImplementedError, OverflowError, ValueError, struct.error)

_METADATA = "torch.distributed.checkpoint.metadata"
_PARTS_OF_AN_INDEX = {
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *(("torch", dtype) for dtype in ("float32", "bfloat16", "float16")),
    ("pathlib", "PosixPath"),
}
_GETATTR = ("builtins", "getattr")
"""How Python 3.11.0 to 3.11.3 name a member of an enumeration in a pickle."""


def make_index(boxes: Iterable[WrittenBox]) -> Metadata:
    """The index of these boxes of fp32 tensors."""
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for written in boxes:
        name, box = written.key, written.box
        if name not in tensors:
            properties = TensorProperties(dtype=torch.float32)
            tensors[name] = TensorStorageMetadata(properties, torch.Size(written.full_shape), [])
        sizes = torch.Size(box.sizes)
        tensors[name].chunks.append(ChunkStorageMetadata(torch.Size(box.offsets), sizes))
        place = _StorageInfo(written.file, written.start, written.size_bytes)
        places[MetadataIndex(name, box.offsets)] = place
    return Metadata(state_dict_metadata=dict(tensors), storage_data=places)


def read_index(folder: Path) -> Metadata:
    """The index of the checkpoint in ``folder``.

    Raises CheckpointError if it cannot be read, or is not an index of tensors.
    """
    path = folder / INDEX
    try:
        with path.open("rb") as file:
            index = _IndexUnpickler(file).load()
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(f"{path} is not an index of tensors ({error})") from error
    if not isinstance(index, Metadata):
        raise CheckpointError(f"{path} is not an index of tensors but {type(index).__name__}")
    return index


def tensors_of(index: Metadata) -> dict[str, TensorStorageMetadata]:
    """Name -> shape, dtype and saved boxes of each tensor in an index."""
    entries = index.state_dict_metadata.items()
    return {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}


def saved_shapes(folder: Path) -> Mapping[str, tuple[int, ...]]:
    """Name -> full shape of each tensor of a checkpoint."""
    return {name: tuple(tensor.size) for name, tensor in tensors_of(read_index(folder)).items()}


def read_pieces(
    folder: Path, pieces: Iterable[Piece], group: dist.ProcessGroup | None = None
) -> None:
    """Fill the values of pieces from the checkpoint in ``folder``.

    Args:
        folder: a checkpoint whose checksums are correct.
        pieces: what this process needs; fp32, on any device.
        group: the ranks that call this function together; None for a single process.

    Raises:
        CheckpointError: on every rank, if a rank could not read a file, or a part of a tensor is
            missing.
    """
    if group is not None:
        gather(group, lambda: read_pieces(folder, pieces), CheckpointError)
        return
    try:
        _read(folder, pieces)
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{folder}: {describe(error)}") from error


def load_model(checkpoint: Path) -> GPT:
    """The model with the checkpoint's master weights, in evaluation mode and without gradients.

    Raises CheckpointError if it cannot be read.
    """
    config = RunState.read(checkpoint).model_section()
    with torch.device("meta"):
        model = GPT(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    materialize(
        model,
        lambda name: torch.empty(shapes[name], dtype=torch.float32),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    model.requires_grad_(False)
    # A tied head is among them once, as the embedding. It was saved under this name.
    read_pieces(
        checkpoint,
        [
            Piece(key(WEIGHTS, name), tuple(weight.shape), (0,) * weight.dim(), weight)
            for name, weight in model.named_parameters()
        ],
    )
    return model.eval()


def _read(folder: Path, pieces: Iterable[Piece]) -> None:
    index = read_index(folder)
    tensors, places = tensors_of(index), index.storage_data
    by_key: dict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_key[piece.key].append(piece)
    by_file: dict[str, list[tuple[ReadItem, Piece]]] = defaultdict(list)
    for name, wanted in by_key.items():
        for item, piece in _overlaps(name, tensors.get(name), wanted):
            # Only the name is used, so an index cannot point to another folder.
            file = Path(places[item.storage_index].relative_path).name
            by_file[file].append((item, piece))
    for file, items in by_file.items():
        with (folder / file).open("rb", buffering=0) as stream:
            for item, piece in items:
                assert item.storage_index.index is not None
                sizes = tensors[piece.key].chunks[item.storage_index.index].sizes
                place = places[item.storage_index]
                _read_overlap(stream, place.offset, place.length, sizes, item, piece)


def _overlaps(
    name: str, saved: TensorStorageMetadata | None, pieces: list[Piece]
) -> list[tuple[ReadItem, Piece]]:
    """The overlaps of the saved boxes of one tensor with its pieces, each with its piece."""
    if saved is None:
        raise CheckpointError(f"{name} is missing in the checkpoint")
    if saved.properties.dtype != torch.float32:
        raise CheckpointError(f"{name} is {saved.properties.dtype}, but must be float32")
    boxes = [ChunkStorageMetadata(torch.Size(p.offsets), p.values.shape) for p in pieces]
    items = create_read_items_for_chunk_list(name, saved, boxes)
    found = sum(item.lengths.numel() for item in items)
    wanted = sum(piece.values.numel() for piece in pieces)
    if found != wanted:
        raise CheckpointError(
            f"a rank needs {wanted:,} elements of {name}, but the checkpoint has {found:,} of them"
        )
    return [(item, pieces[item.dest_index.index or 0]) for item in items]


def _find_elements(stream: FileIO, offset: int, length: int) -> tuple[int, int]:
    """Return where the elements of an archive begin in the file, and their number of bytes.

    The reader of torch 2.11 does not know the number of bytes. The local header of an entry has 30
    bytes; the lengths of the two fields that follow it, name and extra, are at byte 26.

    Raises one of ``_NO_ARCHIVE`` if there is no such archive.
    """
    begin = offset - offset % ALLOCATIONGRANULARITY  # a zip archive may have bytes before it
    size = offset + length - begin
    view: Any = mmap(stream.fileno(), size, offset=begin, access=ACCESS_READ)
    with view:
        with ZipFile(view) as archive:
            (entry,) = (one for one in archive.infolist() if one.filename.endswith(_ELEMENTS))
        sizes = struct.unpack_from("<HH", view, entry.header_offset + 26)
        return begin + entry.header_offset + 30 + sum(sizes), entry.file_size


def _read_overlap(
    stream: FileIO, offset: int, length: int, sizes: torch.Size, item: ReadItem, piece: Piece
) -> None:
    """Fill a part of ``piece`` from a saved box of ``sizes``. Read complete rows of the box."""
    target = _part(piece.values.detach(), item.dest_offsets, item.lengths)
    try:
        start, found_bytes = _find_elements(stream, offset, length)
    except _NO_ARCHIVE as error:
        raise CheckpointError(f"{stream.name} has no tensor at byte {offset:,}") from error
    if found_bytes != sizes.numel() * BYTES_PER_ELEMENT:
        raise CheckpointError(
            f"the tensor at byte {offset:,} of {stream.name} has {found_bytes:,} bytes, but the "
            f"index states {list(sizes)} elements of {BYTES_PER_ELEMENT} bytes"
        )
    first_row, rows = item.storage_offsets[0], item.lengths[0]
    stream.seek(start + first_row * sizes[1:].numel() * BYTES_PER_ELEMENT)
    in_place = target.is_cpu and target.is_contiguous() and target.dtype == torch.float32
    if in_place and item.lengths[1:] == sizes[1:]:
        _fill(target, stream)
    else:
        complete_rows = torch.empty((rows, *sizes[1:]))
        _fill(complete_rows, stream)
        columns = torch.Size((0, *item.storage_offsets[1:]))
        target.copy_(_part(complete_rows, columns, item.lengths))


def _part(tensor: Tensor, offsets: torch.Size, sizes: torch.Size) -> Tensor:
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def _fill(tensor: Tensor, file: FileIO) -> None:
    """Read the bytes of a contiguous tensor in host memory."""
    unread = tensor.view(-1).numpy().data.cast("B")
    while len(unread):  # the kernel returns at most 2 GiB at once
        size = file.readinto(unread)
        if not size:
            raise CheckpointError(f"{file.name} ends before its tensors end")
        unread = unread[size:]


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == _GETATTR:
            return _member
        if (module, name) not in _PARTS_OF_AN_INDEX:
            raise _foreign(f"{module}.{name}")
        return super().find_class(module, name)


def _member(enumeration: Any, name: str) -> Any:
    """Replace getattr, which could reach any function from any class."""
    if not isinstance(enumeration, EnumType):
        raise _foreign(f"{name} of {enumeration!r}")
    return enumeration[name]


def _foreign(what: str) -> CheckpointError:
    return CheckpointError(
        f"the index of the checkpoint names {what}, which no index of tensors contains; megaspeed "
        "did not write this checkpoint, so use another one"
    )

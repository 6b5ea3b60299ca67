"""The index of a checkpoint's tensors, as torch.distributed.checkpoint writes it.

    tensor    its dtype and shape, and the boxes in which it was saved
    box       its offsets and sizes in the tensor -> file, first byte, number of bytes

The index is a pickle, and a pickle may call any function of the machine that reads it. Here it may
only contain the parts of an index, so that a checkpoint from an unknown source cannot run code.

Importing torch.distributed.checkpoint takes about a second of processor time. So a run imports this
module only when it saves or loads, and only on the ranks that need the index.
"""

import pickle
from collections.abc import Iterable, Iterator, Mapping
from enum import EnumType
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.manifest import INDEX, FileDigest
from megaspeed.checkpoint.tensors import (
    BYTES_PER_ELEMENT,
    MOST_LISTED,
    Box,
    WrittenBox,
    mismatches,
    tiling_problem,
)
from megaspeed.config.errors import shortened
from megaspeed.model.parameters import Shape

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


def index_problems(
    index: Metadata, expected: Mapping[str, Shape] | None, files: Mapping[str, FileDigest]
) -> list[str]:
    """The problems of an index, a sentence for each.

    Args:
        index: the index of a checkpoint.
        expected: name -> shape of every tensor that it must have; None if that is not known.
        files: name -> digest of the files of the checkpoint; only their sizes are used.

    Raises:
        CheckpointError: it is not an index of tensors.
    """
    try:
        tensors = tensors_of(index)
        problems = []
        if expected is not None:
            shapes = {name: tuple(tensor.size) for name, tensor in tensors.items()}
            problems = mismatches(expected, shapes)
        places = index.storage_data if isinstance(index.storage_data, dict) else {}
        wrong = [
            f"{name}: {problem}"
            for name, tensor in tensors.items()
            for problem in _tensor_problems(name, tensor, places, files)
        ]
        if not wrong and len({(p.relative_path, p.offset) for p in places.values()}) < len(places):
            wrong = [f"{INDEX} states the same place for two boxes"]
        return problems + shortened(wrong, MOST_LISTED)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{INDEX} is not an index of tensors ({error})") from error


def _tensor_problems(
    name: str,
    tensor: TensorStorageMetadata,
    places: Mapping[MetadataIndex, Any],
    files: Mapping[str, FileDigest],
) -> Iterator[str]:
    if tensor.properties.dtype != torch.float32:
        yield f"it is {tensor.properties.dtype}, but must be torch.float32"
    boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks]
    tiling = tiling_problem(tuple(tensor.size), boxes)
    if tiling is not None:
        yield tiling
    for box in boxes:
        problem = _place_problem(places.get(MetadataIndex(name, box.offsets)), box, files)
        if problem is not None:
            yield problem


def _place_problem(place: Any, box: Box, files: Mapping[str, FileDigest]) -> str | None:
    """Why the place of a box in the index is impossible."""
    right_types = isinstance(place, _StorageInfo) and [str, int, int, type(None)] == list(
        map(type, (place.relative_path, place.offset, place.length, place.transform_descriptors))
    )
    if not right_types or place.relative_path not in files:
        return f"no file of the checkpoint contains its {box}"
    name, box_bytes = place.relative_path, box.elements * BYTES_PER_ELEMENT
    if place.offset < 0 or place.offset + place.length > files[name].size_bytes:
        return f"its {box} is not inside {name}, according to the index"
    if place.length < box_bytes:
        return (
            f"its {box} has {place.length:,} bytes in {name}, according to the index, but its "
            f"{box.elements:,} elements take {box_bytes:,}"
        )
    return None


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

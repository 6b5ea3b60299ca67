"""Checks that the files contain what the index states: each rectangle once, as a tensor.

    __0_0.distcp    | archive | archive | ...      each rectangle's offset and length: one archive
    archive         | data.pkl: shape, dtype | data/0: the elements |

Checksums alone are not enough: a new manifest can be written for an index with mistakes.
"""

import pickle
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from io import BytesIO, FileIO
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from megaspeed.checkpoint.coverage import Box
from megaspeed.checkpoint.manifest import FileSeal

ELEMENTS = "data/0"
"""The record of an archive that holds the elements of its only tensor, uncompressed."""

BYTES_PER_ELEMENT = 4
"""Every tensor is fp32."""

_TENSOR = "data.pkl"
_LARGEST_PICKLE_BYTES = 1 << 12
_ZIP_BEGINS, _ZIP_ENDS, _ZIP_END_BYTES = b"PK\x03\x04", b"PK\x05\x06", 22


def place_problem(place: Any, box: Box, files: Mapping[str, FileSeal]) -> str | None:
    """Why a rectangle cannot lie where the index says, by the sizes of the files alone."""
    if place is None or not _is_place(place) or place.relative_path not in files:
        return f"no file of the checkpoint holds its {box}"
    name, elements = place.relative_path, prod(box.sizes)
    if place.offset < 0:
        return f"its {box} is said to stand at byte {place.offset:,} of {name}"
    if place.offset + place.length > files[name].size_bytes:
        return f"its {box} is said to stand behind the end of {name}"
    if place.length < elements * BYTES_PER_ELEMENT:
        return (
            f"its {box} is said to have {place.length:,} bytes in {name}, and its {elements:,} "
            f"elements take {elements * BYTES_PER_ELEMENT:,}"
        )
    return None


def shared_bytes(index: Metadata) -> Iterator[str]:
    """A sentence for each two rectangles of an index that are said to be in the same bytes.

    Every place is one that `place_problem` finds nothing wrong with.
    """
    by_file: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for name, box, place in _rectangles(index):
        by_file[place.relative_path].append(
            (place.offset, place.offset + place.length, f"{name} {box}")
        )
    for file, spans in by_file.items():
        spans.sort()
        for (_, end, one), (start, _, other) in pairwise(spans):
            if start < end:
                yield f"{one} and {other} are said to be in the same bytes of {file}"


def archive_problems(folder: Path, index: Metadata, names: Collection[str]) -> Iterator[str]:
    """A sentence for each rectangle in the files ``names`` that is not the tensor it should be.

    Reads the directory of each archive, not its elements.
    """
    by_file: dict[str, list[tuple[str, Box, _StorageInfo]]] = defaultdict(list)
    for name, box, place in _rectangles(index):
        if place.relative_path in names:
            by_file[place.relative_path].append((name, box, place))
    for file, rectangles in by_file.items():
        with (folder / file).open("rb", buffering=0) as stream:
            for name, box, place in rectangles:
                problem = _archive_problem(stream, box, place)
                if problem is not None:
                    yield f"{name}: its {box} at byte {place.offset:,} of {file} {problem}"


def _is_place(place: Any) -> bool:
    return (
        isinstance(place, _StorageInfo)
        and type(place.relative_path) is str
        and type(place.offset) is int
        and type(place.length) is int
        and place.transform_descriptors is None
    )


def _rectangles(index: Metadata) -> Iterator[tuple[str, Box, _StorageInfo]]:
    for name, entry in index.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            for chunk in entry.chunks:
                box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
                yield name, box, index.storage_data[MetadataIndex(name, chunk.offsets)]


def _archive_problem(stream: FileIO, box: Box, place: _StorageInfo) -> str | None:
    try:
        if not _is_one_archive(stream, place):
            return "is not one archive from its first byte to its last"
        view: Any = _create_file_view(stream, place.offset, place.length)
        archive: Any = torch._C.PyTorchFileReader(view)
        if archive.get_record_size(_TENSOR) > _LARGEST_PICKLE_BYTES:
            return "is more than a tensor"
        shape = _saved_shape(archive.get_record(_TENSOR))
        start, size = archive.get_record_offset(ELEMENTS), archive.get_record_size(ELEMENTS)
    except Exception as error:  # a damaged archive or pickle may raise anything
        return f"is no archive of a float32 tensor ({str(error).partition('. ')[0]})"
    if shape != box.sizes:
        return f"is a tensor of {list(shape)}"
    if size != prod(box.sizes) * BYTES_PER_ELEMENT or start + size > place.length:
        return f"has {size:,} bytes of elements"
    return None


def _is_one_archive(stream: FileIO, place: _StorageInfo) -> bool:
    """Whether it begins and ends as a zip archive without a comment does."""
    stream.seek(place.offset)
    begins = stream.read(len(_ZIP_BEGINS)) == _ZIP_BEGINS
    stream.seek(place.offset + max(0, place.length - _ZIP_END_BYTES))
    return begins and stream.read(len(_ZIP_ENDS)) == _ZIP_ENDS


def _saved_shape(pickled: bytes) -> tuple[int, ...]:
    """Of a contiguous float32 tensor as torch.save pickles it; anything else raises."""
    loaded = _TensorUnpickler(BytesIO(pickled)).load()
    if not isinstance(loaded, _SavedTensor):
        raise pickle.UnpicklingError("it is no tensor")
    return loaded.shape


class _SavedTensor:
    """In the place of torch's function that makes the tensor."""

    def __init__(self, storage: Any, offset: int, shape: Any, stride: Any, *_: Any) -> None:
        self.shape = tuple(shape)
        contiguous = tuple(prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))
        if (storage, offset) != (_FLOATS, 0) or (prod(self.shape) and stride != contiguous):
            raise pickle.UnpicklingError("it is a view, or of another dtype")


_FLOATS = "torch.FloatStorage"
_NAMES: Mapping[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _SavedTensor,
    ("torch", "FloatStorage"): _FLOATS,
    ("collections", "OrderedDict"): dict,
}


class _TensorUnpickler(pickle._Unpickler):
    """The one in Python: the one in C takes memory for as many objects as a pickle claims."""

    def find_class(self, module: str, name: str) -> Any:
        found: Callable[..., Any] | str | None = _NAMES.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return found

    def persistent_load(self, pid: Any) -> Any:
        """The class of a storage, of which the record is the only one."""
        return pid[1] if pid[0] == "storage" and pid[2] == "0" else None

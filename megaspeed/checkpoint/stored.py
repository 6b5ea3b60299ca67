"""Checks that the files contain each rectangle of the index exactly once, as a tensor.

    __0_0.distcp    | archive | archive | ...      one for each rectangle; offsets are in the index
    archive         | data.pkl: shape, dtype | data/0: the elements |

Checksums alone are not enough, because a manifest may have been written for a wrong index.
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
    """Why the location of a rectangle in the index is impossible, by the sizes of the files."""
    if place is None or not _is_place(place) or place.relative_path not in files:
        return f"no file of the checkpoint holds its {box}"
    name, elements = place.relative_path, prod(box.sizes)
    if place.offset < 0:
        return f"its {box} has the impossible offset {place.offset:,} in {name}"
    if place.offset + place.length > files[name].size_bytes:
        return f"its {box} ends after the end of {name}, according to the index"
    if place.length < elements * BYTES_PER_ELEMENT:
        return (
            f"its {box} has {place.length:,} bytes in {name}, according to the index, but its "
            f"{elements:,} elements take {elements * BYTES_PER_ELEMENT:,}"
        )
    return None


def shared_bytes(index: Metadata) -> Iterator[str]:
    """A sentence for each two rectangles of an index whose byte ranges overlap.

    `place_problem` must have found no problem before.
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
                yield f"{one} and {other} have the same bytes of {file}, according to the index"


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
    """Whether it begins and ends like a zip archive without a comment."""
    stream.seek(place.offset)
    begins = stream.read(len(_ZIP_BEGINS)) == _ZIP_BEGINS
    stream.seek(place.offset + max(0, place.length - _ZIP_END_BYTES))
    return begins and stream.read(len(_ZIP_ENDS)) == _ZIP_ENDS


def _saved_shape(pickled: bytes) -> tuple[int, ...]:
    """The shape of a contiguous float32 tensor, as torch.save pickles it; anything else raises."""
    loaded = _TensorUnpickler(BytesIO(pickled)).load()
    if not isinstance(loaded, _SavedTensor):
        raise pickle.UnpicklingError("it is no tensor")
    return loaded.shape


class _SavedTensor:
    """Replaces the torch function that creates the tensor, and only keeps the shape."""

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
    """Python's own unpickler. The one in C allocates as much memory as a pickle requests."""

    def find_class(self, module: str, name: str) -> Any:
        found: Callable[..., Any] | str | None = _NAMES.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return found

    def persistent_load(self, pid: Any) -> Any:
        """The class of the storage, if the pickle refers to the only storage of the archive."""
        return pid[1] if pid[0] == "storage" and pid[2] == "0" else None

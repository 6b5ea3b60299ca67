"""torch.distributed.checkpoint's reader for the files of a checkpoint, with two differences.

An index and nothing else is taken from the pickle. The library keeps its index (``.metadata``) as
one, and a pickle may call any function of the machine that reads it. Here it may name what an index
is made of, so that a checkpoint from a stranger is data and not a program.

A rank reads the rows that it needs, to where they belong. The library loads each saved rectangle
whole and copies a part of it.

    __0_0.distcp    | archive | archive | ...     one for each rectangle, as torch.save writes it
    archive         | ... | data/0: the elements, row by row | ...
"""

import pickle
from collections import defaultdict
from collections.abc import Mapping
from enum import EnumType
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.stored import BYTES_PER_ELEMENT, ELEMENTS

INDEX = ".metadata"

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


class CheckpointReader(FileSystemReader):
    """Reads the fp32 tensors of one checkpoint's folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index.

        Raises:
            CheckpointError: it cannot be read, or is no index of tensors.
        """
        path = Path(self.path) / INDEX
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

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Takes the index: which rectangles there are, and where each one lies."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._index = metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copies every part that the plan names to where the planner wants it."""
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            # The name alone: an index cannot point out of its folder.
            by_file[Path(self.storage_data[item.storage_index].relative_path).name].append(item)
        for name, items in by_file.items():
            self._read_file(Path(self.path) / name, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(self, path: Path, items: list[ReadItem], planner: LoadPlanner) -> None:
        with path.open("rb", buffering=0) as file:
            for item in items:
                target = planner.resolve_tensor(item).detach()
                self._read_part(file, item, target)
                planner.commit_tensor(item, target)

    def _read_part(self, file: FileIO, item: ReadItem, target: Tensor) -> None:
        """Fills ``target`` with a part of a saved rectangle: whole rows of it are read at once."""
        place = self.storage_data[item.storage_index]
        sizes = _sizes_of(self._index, item.storage_index)
        row_elements = sizes[1:].numel()
        first_row, rows = item.storage_offsets[0], item.lengths[0]
        archive: Any = torch._C.PyTorchFileReader(self._slice_file(file, place))
        start = place.offset + archive.get_record_offset(ELEMENTS)  # as torch.load(mmap=True) does
        file.seek(start + first_row * row_elements * BYTES_PER_ELEMENT)
        in_place = target.is_cpu and target.is_contiguous() and target.dtype == torch.float32
        if in_place and item.lengths[1:] == sizes[1:]:
            _fill(target, file)
        else:
            whole = torch.empty((rows, *sizes[1:]))
            _fill(whole, file)
            for dim in range(1, whole.dim()):
                whole = whole.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
            target.copy_(whole)


def saved_shapes(folder: Path) -> Mapping[str, tuple[int, ...]]:
    """Name -> full shape of each tensor of a checkpoint whose checksums are right."""
    index = CheckpointReader(folder).read_metadata().state_dict_metadata
    return {
        name: tuple(tensor.size)
        for name, tensor in index.items()
        if isinstance(tensor, TensorStorageMetadata)
    }


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == _GETATTR:
            return _member
        if (module, name) not in _PARTS_OF_AN_INDEX:
            raise _foreign(f"{module}.{name}")
        return super().find_class(module, name)


def _member(enumeration: Any, name: str) -> Any:
    """In the place of getattr, which could reach any function from any class."""
    if not isinstance(enumeration, EnumType):
        raise _foreign(f"{name} of {enumeration!r}")
    return enumeration[name]


def _foreign(what: str) -> CheckpointError:
    return CheckpointError(
        f"the index of the checkpoint names {what}, which no index of tensors holds; it was made "
        "by something else than megaspeed, so take another checkpoint"
    )


def _sizes_of(index: Metadata, rectangle: MetadataIndex) -> torch.Size:
    tensor = index.state_dict_metadata[rectangle.fqn]
    assert isinstance(tensor, TensorStorageMetadata) and rectangle.index is not None
    return tensor.chunks[rectangle.index].sizes


def _fill(tensor: Tensor, file: FileIO) -> None:
    """Reads as many bytes as a contiguous tensor in host memory has, to where it lies."""
    unread = tensor.view(-1).numpy().data.cast("B")
    while len(unread):  # the kernel gives at most 2 GiB at once
        count = file.readinto(unread)
        if not count:
            raise CheckpointError(f"{file.name} ends before its tensors do")
        unread = unread[count:]

"""A checkpoint's tensors written by a process that is no rank of a run, one rectangle at a time.

    pieces, made as they are asked for  ->  __0_0.distcp  __0_1.distcp  ...  ->  .metadata

The files are those that torch.distributed.checkpoint writes. Its own writer is given all tensors at
once and puts what a process has into one file; here no more than one piece is in memory, and ranks
that check the checkpoint later share several files between them.
"""

import pickle
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megaspeed.checkpoint.hashed_files import HashedFiles
from megaspeed.checkpoint.manifest import FileSeal
from megaspeed.checkpoint.pieces import Piece
from megaspeed.checkpoint.reader import INDEX
from megaspeed.checkpoint.saving import one_checksum

FILE_BYTES = 1 << 30
"""After how many bytes the next file begins."""


def write_pieces_alone(
    folder: Path, pieces: Iterable[Piece], *, file_bytes: int = FILE_BYTES
) -> dict[str, FileSeal]:
    """Writes pieces and their index into ``folder``; together they are each tensor once.

    Args:
        folder: an empty one.
        pieces: fp32, in host memory; they are taken one by one.
        file_bytes: after how many bytes the next file begins.

    Returns:
        Name -> what it is, of every file written.

    Raises:
        OSError: a file could not be written.
    """
    writer = _Writer(folder, file_bytes)
    try:
        with one_checksum():
            writer.write(iter(pieces))
    except RuntimeError as error:  # torch's archive writer tells so of a full disk
        raise writer.files.failure or error from error
    return writer.files.seals


class _Writer:
    def __init__(self, folder: Path, file_bytes: int) -> None:
        self.files = HashedFiles()
        self._folder = folder
        self._file_bytes = file_bytes
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}

    def write(self, pieces: Iterator[Piece]) -> None:
        piece = next(pieces, None)
        for number in count():
            if piece is None:
                break
            name = f"__0_{number}.distcp"
            with self.files.create_stream(self._folder / name, "wb") as stream:
                while piece is not None and stream.tell() < self._file_bytes:
                    start = stream.tell()
                    # A storage of its own: of a view, torch would save all that it is a view of.
                    torch.save(torch.from_numpy(piece.values.numpy()), stream)
                    self._note(piece, _StorageInfo(name, start, stream.tell() - start))
                    piece = next(pieces, None)
        index = Metadata(state_dict_metadata=dict(self._tensors), storage_data=self._places)
        with self.files.create_stream(self._folder / INDEX, "wb") as stream:
            pickle.dump(index, stream)

    def _note(self, piece: Piece, place: _StorageInfo) -> None:
        tensor = self._tensors.setdefault(
            piece.key,
            TensorStorageMetadata(
                TensorProperties(dtype=piece.values.dtype), torch.Size(piece.full_shape), []
            ),
        )
        tensor.chunks.append(ChunkStorageMetadata(torch.Size(piece.offsets), piece.values.shape))
        self._places[MetadataIndex(piece.key, piece.offsets)] = place

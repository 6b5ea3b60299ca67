"""Writes a checkpoint: a folder in the format of torch.distributed.checkpoint.

    rank 0      enough space on the disk? -> step-N.writing/
    all ranks   pieces -> their own files, hashed and flushed to the disk
    rank 0      index, run state, manifest -> rename to step-N -> delete older ones

A process may be killed at any point: a folder named step-N is complete. If one rank fails, the save
fails on all ranks, and the run continues.

Files are written with torch.save, one piece after the other, and not with torch's own
``FileSystemWriter``: it needs all pieces in memory at once, flushes to the disk before Python's
buffers are empty (torch 2.13, distributed/checkpoint/filesystem.py, ``finish``), and synchronises
the training's GPU stream.
"""

import os
import pickle
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch.serialization import get_crc32_options, set_crc32_options
from typing_extensions import Buffer  # collections.abc has it from Python 3.12

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.folders import (
    INDEX,
    CheckpointFolder,
    Checksum,
    FileDigest,
    discard,
    size_problems,
    write_files,
    write_manifest,
)
from megaspeed.checkpoint.run_state import RUN_STATE, RunState
from megaspeed.checkpoint.tensors import BYTES_PER_ELEMENT, Piece, WrittenBox, expected_tensors
from megaspeed.files.paths import free_bytes
from megaspeed.supervision.answers import broadcast, gather


@dataclass(frozen=True)
class SaveReport:
    """The result of one save."""

    step: int  # the saved step
    checkpoint: Path  # the folder of the checkpoint, even if the save failed
    size_bytes: int  # the size of all its files; 0 if the save failed
    seconds: float  # the duration on this rank
    # the part of ``seconds`` for which the training thread waited. It excludes a background save's
    # copy from a GPU to host memory, because only the GPU waits for it.
    stall_seconds: float
    error: str | None  # why it failed; None if it did not
    deleted: tuple[Path, ...]  # older checkpoints that were deleted


@dataclass(frozen=True)
class Saver:
    """Writes checkpoints into one folder. All ranks of ``group`` call ``save`` together."""

    folder: CheckpointFolder  # the folder of checkpoints, on a file system that all ranks share
    group: dist.ProcessGroup  # all ranks, over gloo
    keep_last: int  # how many of the newest checkpoints are kept
    keep_every: int  # steps between two milestones; 0 for none
    expected: Mapping[str, tuple[int, ...]]  # name -> shape of every tensor of a checkpoint
    # name -> content of files that belong to the model, such as its tokenizer; used on rank 0
    beside: Mapping[str, bytes] = field(default_factory=dict)

    def save(self, pieces: Sequence[Piece], state: RunState) -> SaveReport:
        """Write one checkpoint. Report failures of the disk on any rank, and do not raise."""
        start = time.perf_counter()
        step = state.progress.step
        error: str | None = None
        size_bytes, deleted = 0, tuple[Path, ...]()
        try:
            size_bytes, deleted = self._write(step, pieces, state)
        except CheckpointError as failure:
            error = str(failure)
        seconds = time.perf_counter() - start
        path = self.folder.path(step)
        return SaveReport(step, path, size_bytes, seconds, seconds, error, deleted)

    def _write(
        self, step: int, pieces: Sequence[Piece], state: RunState
    ) -> tuple[int, tuple[Path, ...]]:
        rank = self.group.rank()
        writing = broadcast(self.group, lambda: self._begin(step), CheckpointError)
        try:
            written = gather(
                self.group, lambda: write_pieces(writing, pieces, rank=rank), CheckpointError
            )
            return broadcast(
                self.group, lambda: self._finish(writing, written, state), CheckpointError
            )
        except CheckpointError:
            if rank == 0:  # all ranks have ended their files: they raise this error together
                discard(writing)
            raise

    def _begin(self, step: int) -> Path:
        needed = sum(map(prod, self.expected.values())) * BYTES_PER_ELEMENT
        free = free_bytes(self.folder.root)
        if free < needed:
            raise CheckpointError(
                f"a checkpoint takes {needed:,} bytes, but {self.folder.root} has {free:,} free; "
                f"make room, or lower training.keep_last ({self.keep_last})"
            )
        return self.folder.begin(step)

    def _finish(
        self, writing: Path, written: Sequence["WrittenPieces"], state: RunState
    ) -> tuple[int, tuple[Path, ...]]:
        size_bytes = _complete(writing, written, self.expected, state, self.beside)
        checkpoint = self.folder.commit(writing)
        return size_bytes, tuple(self.folder.prune(checkpoint, self.keep_last, self.keep_every))


def write_checkpoint(
    folder: Path, pieces: Iterable[Piece], state: RunState, beside: Mapping[str, bytes]
) -> None:
    """Write a checkpoint from a process that is not a rank of a run.

    Args:
        folder: an empty folder.
        pieces: fp32, in host memory. Each piece is written before the next one is requested, so
            only one needs to be in memory.
        state: the run state; its model and optimizer determine the names and shapes of the tensors.
        beside: name -> content of files that belong to the model, such as its tokenizer.

    Raises:
        CheckpointError: the pieces do not contain every element of every tensor exactly once.
        OSError: a file could not be written.
    """
    expected = expected_tensors(state.model_section(), state.optimizer)
    written = write_pieces(folder, pieces)
    _complete(folder, [written], expected, state, beside)


@dataclass
class WrittenPieces:
    """The files that one process has written, and the place of each piece in them."""

    # name -> size and checksum of each file
    files: dict[str, FileDigest] = field(default_factory=dict)
    boxes: list[WrittenBox] = field(default_factory=list)


def write_pieces(folder: Path, pieces: Iterable[Piece], *, rank: int = 0) -> WrittenPieces:
    """Write pieces into the file ``__RANK_0.distcp``.

    Raises OSError if the file could not be written.
    """
    written = WrittenPieces()
    name = f"__{rank}_0.distcp"
    with _hashed_file(folder / name, written.files) as stream, _without_crc32():
        for piece in pieces:
            start = stream.tell()
            # Not a view of a larger tensor: torch would write all of its storage.
            torch.save(torch.from_numpy(piece.values.detach().cpu().numpy()), stream)
            size_bytes = stream.tell() - start
            written.boxes.append(
                WrittenBox(piece.key, piece.full_shape, piece.box, name, start, size_bytes)
            )
    return written


def _complete(
    folder: Path,
    written: Sequence[WrittenPieces],
    expected: Mapping[str, tuple[int, ...]],
    state: RunState,
    beside: Mapping[str, bytes],
) -> int:
    """Write the remaining files of a checkpoint whose pieces are written; return its size.

    Raises CheckpointError if the pieces do not contain every element of every tensor exactly once,
    or if a file that another process has written has the wrong size.
    """
    # Imported here: importing torch.distributed.checkpoint takes a second.
    from megaspeed.checkpoint.inspection import index_problems
    from megaspeed.checkpoint.reading import make_index

    files = {name: digest for each in written for name, digest in each.files.items()}
    index = make_index(chain.from_iterable(each.boxes for each in written))
    problems = [*size_problems(folder, files).values(), *index_problems(index, expected, files)]
    if problems:
        raise CheckpointError("; ".join(problems))
    with _hashed_file(folder / INDEX, files) as stream:
        pickle.dump(index, stream)
    files |= write_files(folder, {RUN_STATE: state.to_bytes(), **beside})
    write_manifest(folder, files)  # last: a folder with a manifest is complete
    return sum(digest.size_bytes for digest in files.values())


@contextmanager
def _hashed_file(path: Path, digests: dict[str, FileDigest]) -> Iterator[Any]:
    """A new file to write to. At the end it is flushed to the disk, and added to ``digests``.

    Raises OSError if the disk refuses a write. (torch itself raises a RuntimeError in this case.)
    """
    with path.open("wb") as file:
        stream = _HashingStream(file)
        try:
            yield stream
            file.flush()
            os.fsync(file.fileno())
        except RuntimeError as error:
            if stream.failure is None:
                raise
            raise stream.failure from error
    digests[path.name] = FileDigest(stream.tell(), stream.checksum.hexdigest())


class _HashingStream:
    """A file that is written from its beginning to its end and hashed on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = 0
        self.checksum = Checksum()
        self.failure: OSError | None = None

    def write(self, data: Buffer) -> int:
        self.checksum.update(data)
        try:
            written = self._file.write(data)
        except OSError as error:
            self.failure = error
            raise
        self._size += written
        return written

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Do nothing: torch calls it after each tensor, but one flush of the file is enough."""


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Let torch.save omit its own checksums, because the manifest has one of every file."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)

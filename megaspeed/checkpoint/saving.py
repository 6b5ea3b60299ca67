"""One save, from every rank's pieces to a folder that is whole or not there.

    rank 0      room on the disk? -> step-N.writing/
    all ranks   pieces -> their own files, hashed, flushed to the disk
    rank 0      index, run state, manifest -> rename to step-N -> latest -> older ones deleted

A process may die at any point: what is called step-N is whole. An error of any rank fails the save
on all of them, and nothing but the save.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.serialization import get_crc32_options, set_crc32_options

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.folders import CheckpointFolder
from megaspeed.checkpoint.hashed_files import HashedFiles
from megaspeed.checkpoint.manifest import FileSeal, size_problems, write_manifest
from megaspeed.checkpoint.pieces import Piece
from megaspeed.checkpoint.planners import SavePieces
from megaspeed.checkpoint.reader import saved_shapes
from megaspeed.checkpoint.run_state import RUN_STATE, RunState
from megaspeed.checkpoint.stored import BYTES_PER_ELEMENT
from megaspeed.checkpoint.tensors import mismatches
from megaspeed.checkpoint.together import first_failure, from_rank_0, gathered, told
from megaspeed.checkpoint.tokenizer_files import write_tokenizer_files
from megaspeed.files.durable import write_file


@dataclass(frozen=True)
class SaveReport:
    """How one save ended.

    Attributes:
        step: that it is of.
        checkpoint: the folder that it made, or was to make.
        size_bytes: of all its files; 0 where it failed.
        seconds: from its beginning to the end on this rank.
        stall_seconds: the part of ``seconds`` for which the training thread waited. It excludes a
            background save's copy from a GPU to host memory, because only the GPU waits for it.
        error: why it failed; None if it did not.
        deleted: older checkpoints that made way.
    """

    step: int
    checkpoint: Path
    size_bytes: int
    seconds: float
    stall_seconds: float
    error: str | None
    deleted: tuple[Path, ...]


@dataclass(frozen=True)
class Saver:
    """Writes checkpoints into one folder. Every rank of ``group`` calls ``save`` together.

    Attributes:
        folder: where checkpoints go, on a file system that all ranks share.
        group: all ranks, over gloo.
        keep_last: how many checkpoints stay.
        expected: name -> shape of every tensor of a checkpoint.
        beside: name -> content of files that go with the model, as its tokenizer; on rank 0.
    """

    folder: CheckpointFolder
    group: dist.ProcessGroup
    keep_last: int
    expected: Mapping[str, tuple[int, ...]]
    beside: Mapping[str, bytes] = field(default_factory=dict)

    def save(self, pieces: Sequence[Piece], state: RunState) -> SaveReport:
        """Writes one checkpoint; never raises for what the disk or another rank's disk does."""
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
        writing = from_rank_0(self.group, lambda: self._begin(step))
        try:
            everyones = gathered(self.group, write_pieces(writing, pieces, self.group))
            return from_rank_0(self.group, lambda: self._finish(writing, everyones, state))
        except CheckpointError:
            if self.group.rank() == 0:
                self.folder.discard(writing)
            raise

    def _begin(self, step: int) -> Path:
        needed = sum(map(math.prod, self.expected.values())) * BYTES_PER_ELEMENT
        free = self.folder.free_bytes()
        if free < needed:
            raise CheckpointError(
                f"a checkpoint takes {needed:,} bytes, and {self.folder.root} has {free:,} free; "
                f"make room, or lower training.keep_last ({self.keep_last})"
            )
        return self.folder.begin(step)

    def _finish(
        self, writing: Path, everyones: Sequence[Mapping[str, FileSeal]], state: RunState
    ) -> tuple[int, tuple[Path, ...]]:
        alone = write_run_state(writing, state) | write_tokenizer_files(writing, self.beside)
        seals = _one_writer_each([*everyones, alone])
        # torch has checked that each tensor it was given is there once, but not that it was all.
        problems = [
            *size_problems(writing, seals).values(),
            *mismatches(self.expected, saved_shapes(writing)),
        ]
        if problems:
            raise CheckpointError("; ".join(problems))
        write_manifest(writing, seals)
        self.folder.commit(writing)
        deleted = tuple(self.folder.prune(self.keep_last))
        return sum(seal.size_bytes for seal in seals.values()), deleted


def write_pieces(
    folder: Path, pieces: Iterable[Piece], group: dist.ProcessGroup
) -> dict[str, FileSeal]:
    """Writes every rank's pieces and the index into ``folder``; returns this rank's files.

    Raises:
        CheckpointError: on every rank, where a rank could not write, or where the pieces of all
            ranks are not every tensor once.
    """
    if not dist.is_initialized():
        # torch would take this rank for the only one, and let it write the index of its own part.
        raise CheckpointError("the process groups have ended before the save")
    files = HashedFiles()
    # HashedFiles flushes to the disk itself, so the writer need not. If a GPU is visible, torch
    # would copy ahead by default and synchronise the GPU's default stream, which is the training's,
    # every 10 MB, even if all pieces are in host memory (torch 2.13,
    # distributed/checkpoint/filesystem.py:398).
    writer = dcp.FileSystemWriter(folder, sync_files=False, per_thread_copy_ahead=0)
    writer.fs = files
    try:
        with one_checksum():
            dcp.save({}, storage_writer=writer, planner=SavePieces(pieces), process_group=group)
    except CheckpointException as error:
        # It is raised on all ranks together, so that all come here.
        refusals = gathered(group, None if files.failure is None else told(files.failure))
        own, _ = error.failures.get(group.rank(), (None, None))
        if own is not None and not isinstance(own, Exception):
            raise own from error  # Ctrl-C, which torch has caught
        refused = [f"rank {rank}: {why}" for rank, why in enumerate(refusals) if why is not None]
        raise CheckpointError(refused[0] if refused else first_failure(error)) from error
    return files.seals


@contextmanager
def one_checksum() -> Iterator[None]:
    """Lets torch leave its own checksum out of the archives: the manifest has one of every byte."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _one_writer_each(everyones: Iterable[Mapping[str, FileSeal]]) -> dict[str, FileSeal]:
    seals: dict[str, FileSeal] = {}
    for written in everyones:
        twice = seals.keys() & written.keys()
        if twice:
            raise CheckpointError(f"two ranks wrote {', '.join(sorted(twice))}")
        seals |= written
    return seals


def write_run_state(folder: Path, state: RunState) -> dict[str, FileSeal]:
    """Writes it into ``folder``; returns the file as it is."""
    content = state.to_bytes()
    write_file(folder / RUN_STATE, lambda file: file.write(content))
    return {RUN_STATE: FileSeal.of(content)}

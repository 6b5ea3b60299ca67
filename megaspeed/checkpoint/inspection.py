"""Checks whether a checkpoint is complete: every byte and every element.

manifest.json  ->  each file exists, with its size and its checksum
run_state.json ->  the model and the optimizer  ->  names and shapes of all tensors
.metadata      ->  each tensor is float32, and each element is in exactly one box
                   each box is inside one of the files

Checksums alone are not enough, because a manifest may have been written for a wrong index.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.folders import (
    INDEX,
    MANIFEST,
    FileDigest,
    file_problems,
    locate,
    read_manifest,
    size_problems,
)
from megaspeed.checkpoint.reading import read_index, tensors_of
from megaspeed.checkpoint.run_state import RUN_STATE, RunState
from megaspeed.checkpoint.tensors import (
    BYTES_PER_ELEMENT,
    MOST_LISTED,
    Box,
    expected_tensors,
    mismatches,
    tiling_problem,
)
from megaspeed.config.errors import shortened
from megaspeed.model.parameters import Shape
from megaspeed.supervision.answers import broadcast, gather

NO_FILE = slice(0)
"""The share of files to read for a quick look, which checks the sizes of large files only."""


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The content of a checkpoint, as far as it can be read, and all its problems."""

    checkpoint: Path  # its folder
    problems: tuple[str, ...]  # a sentence for each problem; empty if the checkpoint is complete
    # name -> digest of each file in the manifest
    files: Mapping[str, FileDigest] = field(default_factory=dict)
    state: RunState | None = None  # the state of the run; None if it cannot be read

    @property
    def size_bytes(self) -> int:
        """The size of all files except the manifest."""
        return sum(digest.size_bytes for digest in self.files.values())


def newest_complete(
    candidates: Sequence[Path], group: dist.ProcessGroup | None = None
) -> tuple[Path | None, tuple[tuple[Path, str], ...]]:
    """The first complete checkpoint of ``candidates``, and the problems of each one before it.

    The checkpoint is None if none is complete. Every byte of each is read.

    Args:
        candidates: checkpoints, newest first; the same on all ranks.
        group: its ranks call this together, and each reads a share of the files. All read the index
            and the run state. None for a single process.
    """
    skipped: list[tuple[Path, str]] = []
    for checkpoint in candidates:
        problems = _problems_on_all_ranks(checkpoint, group)
        if not problems:
            return checkpoint, tuple(skipped)
        skipped.append((checkpoint, problems))
    return None, tuple(skipped)


def checkpoint_named(path: Path, report: Callable[[str], None] = lambda problem: None) -> Path:
    """The newest complete checkpoint at a path that a user names. Reads every byte of it.

    Args:
        path: a checkpoint, a folder of checkpoints, or the folder of a run.
        report: is called with the problems of each newer checkpoint that was skipped.

    Raises:
        CheckpointError: there is no complete checkpoint.
    """
    checkpoint, skipped = newest_complete(locate(path))
    problems = [f"{other}: {why}" for other, why in skipped]
    if checkpoint is None:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise CheckpointError(f"{path} has no complete checkpoint{listed}")
    for problem in problems:
        report(f"skipped {problem}")
    return checkpoint


def inspect(checkpoint: Path, share: slice = slice(None)) -> Inspection:
    """The content and all problems of a checkpoint.

    Args:
        checkpoint: its folder.
        share: the files to read, of all files sorted by name. The index and the run state are
            always read.
    """
    try:
        files = read_manifest(checkpoint)
    except CheckpointError as error:
        return Inspection(checkpoint=checkpoint, problems=(str(error),))
    needed = {RUN_STATE, INDEX}
    damaged = {name: f"{MANIFEST} does not list {name}" for name in needed - files.keys()}
    read = (needed & files.keys()).union(sorted(files)[share])
    damaged |= file_problems(checkpoint, {name: files[name] for name in sorted(read)})
    if not share.start:  # otherwise another rank checks the sizes of all files
        damaged = size_problems(checkpoint, files) | damaged
    problems = list(damaged.values())
    state = expected = None
    try:
        if RUN_STATE not in damaged:
            state = RunState.read(checkpoint)
            model = state.model_section()
            expected = expected_tensors(model, state.optimizer) | state.compression_tensors(model)
        if INDEX not in damaged:
            problems += index_problems(read_index(checkpoint), expected, files)
    except CheckpointError as error:
        problems.append(str(error))
    return Inspection(checkpoint=checkpoint, problems=tuple(problems), files=files, state=state)


def _problems_on_all_ranks(checkpoint: Path, group: dist.ProcessGroup | None) -> str:
    """The problems found by the lowest rank that found any; empty if no rank found any."""
    if group is None:
        return "; ".join(inspect(checkpoint).problems)
    share = slice(group.rank(), None, group.size())
    found = gather(group, lambda: "; ".join(inspect(checkpoint, share).problems), CheckpointError)
    return broadcast(group, lambda: next(filter(None, found), ""), CheckpointError)


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
    if not isinstance(place, _StorageInfo) or place.relative_path not in files:
        return f"no file of the checkpoint contains its {box}"
    file_bytes, box_bytes = files[place.relative_path].size_bytes, box.elements * BYTES_PER_ELEMENT
    if place.length < box_bytes or not 0 <= place.offset <= file_bytes - place.length:
        return (
            f"its {box}, which takes {box_bytes:,} bytes, has {place.length:,} bytes from "
            f"{place.offset:,} on in the {file_bytes:,} bytes of {place.relative_path}, according "
            "to the index"
        )
    return None

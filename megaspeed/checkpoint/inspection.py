"""Checks whether a checkpoint is complete: every byte and every element.

manifest.json  ->  each file exists, with its size and its checksum
run_state.json ->  the model  ->  names and shapes of all tensors
.metadata      ->  each tensor is float32, and each element is in exactly one box
                   each box is at one place of one file
files          ->  at this place is an archive of a tensor with the shape of the box

Checksums alone are not enough, because a manifest may have been written for a wrong index.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.utils import _create_file_view
from torch.serialization import skip_data

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.folders import locate, step_named
from megaspeed.checkpoint.index import index_problems, read_index, tensors_of
from megaspeed.checkpoint.manifest import (
    INDEX,
    MANIFEST,
    FileDigest,
    file_problems,
    read_manifest,
    size_problems,
)
from megaspeed.checkpoint.reading import ELEMENTS
from megaspeed.checkpoint.run_state import RUN_STATE, RunState
from megaspeed.checkpoint.tensors import (
    BYTES_PER_ELEMENT,
    MOST_LISTED,
    Box,
    expected_tensors,
)
from megaspeed.config.errors import shortened
from megaspeed.config.model import ModelConfig
from megaspeed.supervision.answers import broadcast, gather


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The content of a checkpoint, as far as it can be read, and all its problems."""

    checkpoint: Path  # its folder
    problems: tuple[str, ...]  # a sentence for each problem; empty if the checkpoint is complete
    # files in the folder that are not in the manifest. They do no harm.
    strays: tuple[str, ...] = ()
    # name -> digest of each file in the manifest
    files: Mapping[str, FileDigest] = field(default_factory=dict)
    state: RunState | None = None  # the state of the run; None if it cannot be read
    model: ModelConfig | None = None  # the configuration of the model; None if it cannot be read

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


def inspect(checkpoint: Path) -> Inspection:
    """The content and all problems of a checkpoint. Reads every byte of it."""
    return _inspect(checkpoint, slice(None))


def glance(checkpoint: Path) -> Inspection:
    """The content and problems of a checkpoint. Of large files, only the sizes are checked."""
    return _inspect(checkpoint, slice(0))


def _problems_on_all_ranks(checkpoint: Path, group: dist.ProcessGroup | None) -> str:
    """The problems found by the lowest rank that found any; empty if no rank found any."""
    if group is None:
        return "; ".join(inspect(checkpoint).problems)
    share = slice(group.rank(), None, group.size())
    found = gather(group, lambda: "; ".join(_inspect(checkpoint, share).problems), CheckpointError)
    return broadcast(group, lambda: next(filter(None, found), ""), CheckpointError)


def _inspect(checkpoint: Path, share: slice) -> Inspection:
    """Read the index, the run state, and a share of the files, sorted by name."""
    try:
        files = read_manifest(checkpoint)
    except CheckpointError as error:
        return Inspection(checkpoint=checkpoint, problems=(str(error),))
    unlisted = {
        name: f"{MANIFEST} does not list {name}" for name in (RUN_STATE, INDEX) if name not in files
    }
    names = {*sorted(files)[share], *({RUN_STATE, INDEX} & files.keys())}
    damaged = file_problems(checkpoint, {name: files[name] for name in files if name in names})
    # Only the rank whose share begins with the first file checks the sizes of all files.
    sized = {name: files[name] for name in names} if share.start else files
    damaged = {**unlisted, **size_problems(checkpoint, sized), **damaged}
    problems = list(damaged.values())
    state = model = expected = None
    try:
        if RUN_STATE not in damaged:
            state = RunState.read(checkpoint)
            problems += _name_problems(checkpoint, state)
            model = state.model_section()
            expected = expected_tensors(model, state.kinds) | state.compression_tensors(model)
        if INDEX not in damaged:
            index = read_index(checkpoint)
            wrong = index_problems(index, expected, files)
            if not wrong:
                readable = names - damaged.keys()
                wrong = shortened(_archive_problems(checkpoint, index, readable), MOST_LISTED)
            problems += wrong
    except CheckpointError as error:
        problems.append(str(error))
    return Inspection(
        checkpoint=checkpoint,
        problems=tuple(problems),
        strays=_strays(checkpoint, files),
        files=files,
        state=state,
        model=model,
    )


def _strays(checkpoint: Path, files: Mapping[str, FileDigest]) -> tuple[str, ...]:
    try:
        names = {path.name for path in checkpoint.iterdir()}
    except OSError:  # a running job has deleted the checkpoint meanwhile
        return ()
    return tuple(sorted(names - set(files) - {MANIFEST}))


def _name_problems(checkpoint: Path, state: RunState) -> Iterator[str]:
    step = step_named(checkpoint.resolve().name)
    if step is not None and step != state.progress.step:
        yield (
            f"its name has step {step}, but its {RUN_STATE} has step {state.progress.step}; "
            "rename it back"
        )


def _archive_problems(folder: Path, index: Metadata, names: Collection[str]) -> Iterator[str]:
    """A sentence for each box in the files ``names`` whose archive is not a tensor of its shape.

    Reads the directory of each archive, not its elements.
    """
    by_file: dict[str, list[tuple[str, Box, _StorageInfo]]] = defaultdict(list)
    for name, tensor in tensors_of(index).items():
        for chunk in tensor.chunks:
            place = index.storage_data[MetadataIndex(name, chunk.offsets)]
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            by_file[place.relative_path].append((name, box, place))
    for file in sorted(by_file.keys() & set(names)):
        with (folder / file).open("rb", buffering=0) as stream:
            for name, box, place in by_file[file]:
                problem = _archive_problem(stream, box, place)
                if problem is not None:
                    yield f"{name}: its {box} at byte {place.offset:,} of {file} {problem}"


def _archive_problem(stream: FileIO, box: Box, place: _StorageInfo) -> str | None:
    view: Any = _create_file_view(stream, place.offset, place.length)
    try:
        with skip_data():  # shape and dtype, without the elements
            tensor = torch.load(view, weights_only=True)
    except Exception as error:  # a damaged archive or pickle may raise anything
        return f"is not an archive of a tensor ({str(error).partition('. ')[0]})"
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
        return "is not a float32 tensor"
    if tensor.shape != box.sizes or not tensor.is_contiguous() or tensor.storage_offset():
        return f"is a tensor of {list(tensor.shape)}, but must be {list(box.sizes)}, row by row"
    view = _create_file_view(stream, place.offset, place.length)
    found_bytes = torch._C.PyTorchFileReader(view).get_record_size(ELEMENTS)
    if found_bytes != (box_bytes := box.elements * BYTES_PER_ELEMENT):
        return f"has {found_bytes:,} bytes of elements, but must have {box_bytes:,}"
    return None

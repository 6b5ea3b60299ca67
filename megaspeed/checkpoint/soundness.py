"""Whether a checkpoint is what a run of its configuration saves: every byte, every element.

manifest.json  ->  every file: there, of its size, of its checksum
run_state.json ->  the model  ->  names and shapes of all tensors
.metadata      ->  each of them, float32, every element in exactly one place of one file, which
                   holds a tensor of that shape there
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megaspeed.checkpoint.coverage import Box, tiling_problem
from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.folders import step_named
from megaspeed.checkpoint.manifest import (
    MANIFEST,
    FileSeal,
    problems_by_file,
    read_manifest,
    size_problems,
)
from megaspeed.checkpoint.reader import INDEX, CheckpointReader
from megaspeed.checkpoint.run_state import RUN_STATE, RunState
from megaspeed.checkpoint.stored import archive_problems, place_problem, shared_bytes
from megaspeed.checkpoint.tensors import MOST_TOLD, expected_tensors, mismatches
from megaspeed.config.errors import shortened
from megaspeed.config.model import ModelConfig
from megaspeed.model.parameters import Shape


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What a checkpoint holds, as far as it can be read, and all that is wrong with it.

    Attributes:
        checkpoint: its folder.
        problems: a sentence each; none where it is whole.
        strays: files in the folder that the manifest does not know: odd, and no harm.
        files: name -> seal, of all that belong to it but the manifest.
        state: None where it cannot be read.
        model: of which the tensors are; None where it cannot be told.
    """

    checkpoint: Path
    problems: tuple[str, ...]
    strays: tuple[str, ...] = ()
    files: Mapping[str, FileSeal] = field(default_factory=dict)
    state: RunState | None = None
    model: ModelConfig | None = None

    @property
    def size_bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(seal.size_bytes for seal in self.files.values())


def problems_of(checkpoint: Path) -> list[str]:
    """All that is wrong with a checkpoint, a sentence each; reads every byte of it."""
    return list(inspect(checkpoint).problems)


def inspect(checkpoint: Path) -> Inspection:
    """What a checkpoint holds; reads every byte of it."""
    return _inspect(checkpoint, slice(None))


def inspect_share(checkpoint: Path, rank: int, ranks: int) -> Inspection:
    """What a checkpoint holds; of its files, sorted by name, reads every ``ranks``-th one whole.

    The shares of all ranks together are what `inspect` reads.
    """
    return _inspect(checkpoint, slice(rank, None, ranks))


def glance(checkpoint: Path) -> Inspection:
    """What a checkpoint holds, in a moment: of the large files only the sizes are checked."""
    return _inspect(checkpoint, slice(0))


def _inspect(checkpoint: Path, read: slice) -> Inspection:
    """Reads the index, the run state, and ``read`` of the sorted names of the files."""
    try:
        files = read_manifest(checkpoint)
    except CheckpointError as error:
        return Inspection(checkpoint=checkpoint, problems=(str(error),))
    unlisted = {
        name: f"{MANIFEST} does not list {name}" for name in (RUN_STATE, INDEX) if name not in files
    }
    names = {*sorted(files)[read], *({RUN_STATE, INDEX} & files.keys())}
    damaged = problems_by_file(checkpoint, {name: files[name] for name in files if name in names})
    # Of many ranks, one asks for the sizes of all files.
    sized = {name: files[name] for name in names} if read.start else files
    damaged = {**unlisted, **size_problems(checkpoint, sized), **damaged}
    problems = list(damaged.values())
    state = model = expected = None
    try:
        if RUN_STATE not in damaged:
            state = RunState.read(checkpoint)
            problems += _name_problems(checkpoint, state)
            model = state.model_section()
            expected = expected_tensors(model, state.kinds)
        if INDEX not in damaged:
            index = CheckpointReader(checkpoint).read_metadata()
            wrong = _index_problems(index, expected, files)
            if not wrong:
                whole = names - damaged.keys()
                wrong = shortened(archive_problems(checkpoint, index, whole), MOST_TOLD)
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


def _strays(checkpoint: Path, files: Mapping[str, FileSeal]) -> tuple[str, ...]:
    try:
        names = {path.name for path in checkpoint.iterdir()}
    except OSError:  # a run that goes on has deleted it meanwhile
        return ()
    return tuple(sorted(names - set(files) - {MANIFEST}))


def _name_problems(checkpoint: Path, state: RunState) -> Iterator[str]:
    step = step_named(checkpoint.resolve().name)
    if step is not None and step != state.progress.step:
        yield (
            f"its name says step {step} and its {RUN_STATE} step {state.progress.step}; "
            "give it back its name"
        )


def _index_problems(
    index: Metadata, expected: Mapping[str, Shape] | None, files: Mapping[str, FileSeal]
) -> list[str]:
    try:
        return _checked_index(index, expected, files)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{INDEX} is not an index of tensors ({error})") from error


def _checked_index(
    index: Metadata, expected: Mapping[str, Shape] | None, files: Mapping[str, FileSeal]
) -> list[str]:
    tensors = {
        name: entry
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    problems = []
    if expected is not None:
        shapes = {name: tuple(entry.size) for name, entry in tensors.items()}
        problems = mismatches(expected, shapes)
    stored = index.storage_data if isinstance(index.storage_data, dict) else {}
    wrong = [
        f"{name}: {problem}"
        for name, entry in tensors.items()
        for problem in _tensor_problems(name, entry, stored, files)
    ]
    return problems + shortened(wrong or shared_bytes(index), MOST_TOLD)


def _tensor_problems(
    name: str,
    entry: TensorStorageMetadata,
    stored: Mapping[MetadataIndex, Any],
    files: Mapping[str, FileSeal],
) -> Iterator[str]:
    if entry.properties.dtype != torch.float32:
        yield f"it is {entry.properties.dtype}, and every tensor of a checkpoint is torch.float32"
    boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
    problem = tiling_problem(tuple(entry.size), boxes)
    if problem is not None:
        yield problem
    for box in boxes:
        place = stored.get(MetadataIndex(name, box.offsets))
        problem = place_problem(place, box, files)
        if problem is not None:
            yield problem

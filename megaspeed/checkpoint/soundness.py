"""Whether a checkpoint is what a run of its configuration saves: every byte, every element.

manifest.json  ->  every file: there, of its size, of its checksum
run_state.json ->  the model  ->  names and shapes of all tensors
.metadata      ->  each of them, float32, every element in exactly one place of one file
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
from megaspeed.checkpoint.tensors import expected_tensors, mismatches, shortened
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
    return _inspect(checkpoint, every_byte=True)


def glance(checkpoint: Path) -> Inspection:
    """What a checkpoint holds, in a moment: of the large files only the sizes are checked."""
    return _inspect(checkpoint, every_byte=False)


def _inspect(checkpoint: Path, *, every_byte: bool) -> Inspection:
    try:
        files = read_manifest(checkpoint)
    except CheckpointError as error:
        return Inspection(checkpoint=checkpoint, problems=(str(error),))
    unlisted = {
        name: f"{MANIFEST} does not list {name}" for name in (RUN_STATE, INDEX) if name not in files
    }
    small = {name: files[name] for name in (RUN_STATE, INDEX) if name in files}
    damaged = problems_by_file(checkpoint, files if every_byte else small)
    damaged = {**unlisted, **size_problems(checkpoint, files), **damaged}
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
            problems += _index_problems(index, expected, files)
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
    return problems + shortened(
        f"{name}: {problem}"
        for name, entry in tensors.items()
        for problem in _tensor_problems(name, entry, stored, files)
    )


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
        if place is None or place.relative_path not in files:
            yield f"no file of the checkpoint holds its {box}"
        elif place.offset + place.length > files[place.relative_path].size_bytes:
            yield f"its {box} is said to stand behind the end of {place.relative_path}"

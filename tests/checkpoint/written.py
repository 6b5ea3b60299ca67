"""Checkpoints of a tiny model, without a run: random tensors, written by torch as one process."""

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from megaspeed.checkpoint.folders import (
    INDEX,
    MANIFEST,
    CheckpointFolder,
    FileDigest,
    write_manifest,
)
from megaspeed.checkpoint.run_state import RUN_STATE, DataIdentity, Layout, Progress, RunState
from megaspeed.checkpoint.tensors import expected_tensors
from megaspeed.config.loading import parse_config
from tests.config.small import small
from tests.support.tiny import GPT2

MODEL = {**GPT2, "num_hidden_layers": 1}
CONFIG = parse_config(small(model=MODEL, data={"sequence_length": 16}))
LAYOUT = Layout(
    pp=2, dp=1, tp=2, zero_stage=1, schedule="1f1b", sequence_parallel=False, precision="bf16"
)


def run_state(step: int, **changes: Any) -> RunState:
    """Return the state of a run of ``CONFIG`` after ``step`` steps of 16 samples."""
    values: dict[str, Any] = {
        "progress": Progress(
            step=step, steps_taken=step - 1, samples=16 * step, tokens=256 * step, loss=4.25
        ),
        "data": DataIdentity(corpus="c0ffee", tokenizer="70ce", sequence_length=16, seed=5),
        "training_seed": 7,
        "layout": LAYOUT,
        "config": CONFIG.to_json(),
        "software": {"torch": torch.__version__},
    }
    return RunState(**{**values, **changes})


def write_checkpoint(folder: CheckpointFolder, step: int, **state: Any) -> Path:
    """Write a complete checkpoint. ``state`` replaces parts of its run state."""
    writing = folder.begin(step)
    generator = torch.Generator().manual_seed(step)
    saved = run_state(step, **state)
    tensors: dict[str, Any] = {
        name: torch.randn(shape, generator=generator)
        for name, shape in expected_tensors(saved.model_section(), saved.optimizer).items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # there is only one process
        dcp.save(tensors, checkpoint_id=writing, no_dist=True)
    (writing / RUN_STATE).write_bytes(saved.to_bytes())
    seal(writing)
    return folder.commit(writing)


def seal(checkpoint: Path) -> None:
    """Write the manifest for the files as they are."""
    files = {path.name: path for path in checkpoint.iterdir() if path.name != MANIFEST}
    write_manifest(checkpoint, {name: FileDigest.of_file(path) for name, path in files.items()})


def change_index(checkpoint: Path, change: Callable[[Metadata], object]) -> None:
    """Change the index and write the manifest again, as a save with a mistake would do."""
    file = checkpoint / INDEX
    index = pickle.loads(file.read_bytes())
    change(index)
    file.write_bytes(pickle.dumps(index))
    seal(checkpoint)

"""The complete model can be loaded from a checkpoint of any layout."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.folders import CheckpointFolder
from megaspeed.checkpoint.inspection import checkpoint_named
from megaspeed.checkpoint.reading import (
    load_model,
    read_pieces,
)
from megaspeed.checkpoint.run_state import RunState
from megaspeed.checkpoint.tensors import Piece, expected_shapes
from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.topology.launch import LaunchEnvironment
from tests.checkpoint.saved_runs import SavedRun, only_checkpoint, started
from tests.checkpoint.written import CONFIG, write_checkpoint
from tests.support.rank_pool import RankPool
from tests.support.tiny import LLAMA, tiny_corpus, tiny_run

TEXT = Path(__file__).parents[2] / "LICENSE"
TENSORS = "__0_0.distcp"


def train_and_save(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> dict[str, Tensor]:
    """Train a step and save it. Return the saved weights on rank 0."""
    with started(launch, run) as context:
        rank = SavedRun.start(run, corpus, context)
        rank.train_step()
        rank.checkpointing.save(rank.progress)
        (report,) = rank.checkpointing.close()
        assert report.error is None, report.error
        return rank.stretch(0).state.get("weights", {})


LAYOUTS: dict[str, dict[str, Any]] = {
    "gpt2 tied, split in two by pipeline and by tensor": {"pp": 2, "tp": 2},
    "llama untied, ZeRO-3 over two": {
        "dp": 2,
        "model": {**LLAMA, "tie_word_embeddings": False},
        "zero_optimization": {"stage": 3},
    },
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_the_parameters_are_the_master_weights_bit_for_bit(
    pool: RankPool, tmp_path: Path, layout: dict[str, Any]
) -> None:
    run = tiny_run(TEXT, **layout, training={"run_dir": str(tmp_path / "run")})
    corpus = tiny_corpus(run, tmp_path / "cache")
    saved = pool.run(run.grid.world_size, train_and_save, run, corpus)[0]
    checkpoint = only_checkpoint(tmp_path / "run")
    model = load_model(checkpoint)
    loaded = dict(model.named_parameters())
    assert RunState.read(checkpoint).model_section() == run.config.model
    assert loaded.keys() == saved.keys() == expected_shapes(run.config.model).keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """Return a folder with checkpoints 100 and 200 of a run."""
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    for step in (100, 200):
        write_checkpoint(folder, step)
    return folder


def test_it_computes_and_does_not_train(folder: CheckpointFolder) -> None:
    model = load_model(folder.path(100))
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert model.embedding is not None and model.head is not None
    assert model.head.output.weight is model.embedding.tokens.weight
    logits = model(torch.arange(8)[None])
    assert logits.shape == (1, 8, CONFIG.model.vocab_size) and logits.isfinite().all()


def test_the_newest_complete_one_is_taken_and_each_skipped_one_is_reported(
    folder: CheckpointFolder,
) -> None:
    messages: list[str] = []
    assert checkpoint_named(folder.root.parent, messages.append) == folder.path(200)
    assert checkpoint_named(folder.path(100), messages.append) == folder.path(100)
    assert messages == []
    content = bytearray((folder.path(200) / TENSORS).read_bytes())
    content[len(content) // 2] ^= 1
    (folder.path(200) / TENSORS).write_bytes(content)
    assert checkpoint_named(folder.root, messages.append) == folder.path(100)
    (problem,) = messages
    assert problem.startswith(f"skipped {folder.path(200)}: {TENSORS} has changed since")


def test_if_none_is_complete_every_reason_is_reported(
    folder: CheckpointFolder, tmp_path: Path
) -> None:
    for step in (100, 200):
        os.truncate(folder.path(step) / TENSORS, step)
    with pytest.raises(CheckpointError, match="has no complete checkpoint") as caught:
        checkpoint_named(folder.root)
    for step in (100, 200):
        assert f"{folder.path(step)}: {TENSORS} has {step} bytes" in str(caught.value)
    with pytest.raises(CheckpointError, match="must be a checkpoint, a folder of checkpoints or"):
        checkpoint_named(tmp_path)


def test_a_missing_tensor_or_file_is_named(folder: CheckpointFolder) -> None:
    checkpoint = folder.path(100)
    stranger = Piece("weights.stranger", (4,), (0,), torch.empty(4))
    with pytest.raises(CheckpointError, match=r"weights\.stranger is missing in the checkpoint"):
        read_pieces(checkpoint, [stranger])
    (checkpoint / TENSORS).unlink()
    with pytest.raises(CheckpointError, match=f"No such file or directory: .*{TENSORS}"):
        load_model(checkpoint)

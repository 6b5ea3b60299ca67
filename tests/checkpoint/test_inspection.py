"""A checkpoint is complete, or each reason why it is not is reported."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from megaspeed.checkpoint.folders import (
    INDEX,
    MANIFEST,
    CheckpointFolder,
    read_manifest,
    write_manifest,
)
from megaspeed.checkpoint.inspection import NO_FILE, inspect
from megaspeed.checkpoint.run_state import RUN_STATE, Layout
from megaspeed.topology.grid import Grid
from tests.checkpoint.written import CONFIG, change_index, run_state, seal, write_checkpoint
from tests.support.tiny import MUON

TENSORS = "__0_0.distcp"
UP = "exp_avg.blocks.0.mlp.up.weight"  # 128 x 32


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(CheckpointFolder(tmp_path_factory.mktemp("checkpoints")), 100)


@pytest.fixture
def checkpoint(written: Path, tmp_path: Path) -> Path:
    """Return a complete checkpoint, which a test may damage."""
    return shutil.copytree(written, tmp_path / written.name)


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 0x04
    file.write_bytes(content)


def only_problem(checkpoint: Path) -> str:
    (problem,) = inspect(checkpoint).problems
    return problem


def test_a_complete_checkpoint_has_no_problem(checkpoint: Path) -> None:
    found = inspect(checkpoint)
    assert (found.problems, found.state) == ((), run_state(100))
    assert set(found.files) == {TENSORS, INDEX, RUN_STATE}
    assert found.size_bytes == sum(
        path.stat().st_size for path in checkpoint.iterdir() if path.name != MANIFEST
    )
    assert inspect(checkpoint, NO_FILE) == found


def test_the_layout_of_a_checkpoint_without_the_newer_axes_is_a_grid() -> None:
    """Earlier versions wrote neither replicas, context ranks nor the expert axis."""
    old = {"pp": 2, "dp": 4, "tp": 2, "zero_stage": 1, "schedule": "1f1b"}
    old |= {"sequence_parallel": False, "precision": "fp32"}
    layout = Layout.model_validate(old)
    assert layout.grid == Grid(2, 4, 2) and layout.grid.ep is None
    assert str(layout) == "pp 2 x dp 4 x tp 2, ZeRO-1, fp32"
    new = Layout.model_validate({**old, "ep": 4, "expert_shard": 2})
    assert new.grid == Grid(2, 4, 2, ep=4, expert_shard=2)
    assert str(new) == "pp 2 x dp 4 x tp 2, ep 4, ZeRO-1, fp32"
    assert Layout.model_validate(new.model_dump()) == new
    with pytest.raises(ValueError, match="must be divisible by ep 3"):
        Layout.model_validate({**old, "ep": 3})


@pytest.mark.parametrize("name", [TENSORS, INDEX, RUN_STATE])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "does not exist"),
        (lambda file: os.truncate(file, file.stat().st_size - 1), "has "),
        (lambda file: os.truncate(file, 0), "has 0 bytes, but "),
        (lambda file: flip(file, file.stat().st_size // 2), "has changed since it was written"),
    ],
    ids=["missing", "cut", "empty", "flipped"],
)
def test_a_damaged_file_is_the_one_problem(
    checkpoint: Path, name: str, damage: Callable[[Path], None], message: str
) -> None:
    damage(checkpoint / name)
    assert only_problem(checkpoint).startswith(f"{name} {message}")


def test_at_a_glance_sizes_and_small_files_are_checked_and_large_ones_not_read(
    checkpoint: Path,
) -> None:
    flip(checkpoint / TENSORS, 100_000)
    assert inspect(checkpoint, NO_FILE).problems == ()
    flip(checkpoint / INDEX, 100)
    os.truncate(checkpoint / TENSORS, 100_000)
    problems = inspect(checkpoint, NO_FILE).problems
    assert [problem.split()[0] for problem in problems] == [TENSORS, INDEX]


def test_a_save_that_did_not_end_has_no_manifest(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink()
    assert only_problem(checkpoint).startswith("manifest.json is missing; it is written last")
    assert inspect(checkpoint / "nowhere").problems[0].startswith("manifest.json is missing")


@pytest.mark.parametrize("name", [INDEX, RUN_STATE])
def test_a_manifest_without_a_file_that_must_be_is_reported(checkpoint: Path, name: str) -> None:
    files = read_manifest(checkpoint)
    del files[name]
    write_manifest(checkpoint, files)
    assert only_problem(checkpoint) == f"manifest.json does not list {name}"


SMALL = {**CONFIG.to_json(), "model": {**CONFIG.to_json()["model"], "vocab_size": 7}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "run_state.json has no valid config.model: "),
        ({"model": {"preset": "gpt2", "hidden_size": "x"}}, "config.model: hidden_size: "),
        (SMALL, "embedding.tokens.weight is 301 x 32 in the checkpoint, but 7 x 32 in the model"),
    ],
)
def test_the_configuration_states_the_tensors(
    checkpoint: Path, config: dict[str, object], message: str
) -> None:
    (checkpoint / RUN_STATE).write_bytes(run_state(100, config=config).to_bytes())
    seal(checkpoint)
    assert message in only_problem(checkpoint)


# --- an index that was sealed with a mistake ------------------------------------------------------

Change = Callable[[Metadata], object]


def placed(place: Callable[[Any], object]) -> Change:
    """Change the place of UP."""

    def move(index: Metadata) -> None:
        (box,) = (box for box in index.storage_data if box.fqn == UP)
        index.storage_data[box] = place(index.storage_data[box])

    return move


def moved(**values: Any) -> Change:
    """Change some values of the place of UP."""
    return placed(lambda place: replace(place, **values))


def with_entry(change: Callable[[Any], object]) -> Change:
    """Change the index's entry of UP."""
    return lambda index: change(index.state_dict_metadata[UP])


def shorten(entry: TensorStorageMetadata) -> None:
    entry.chunks[0] = replace(entry.chunks[0], sizes=torch.Size((100, 32)))


SECOND = ChunkStorageMetadata(torch.Size((127, 0)), torch.Size((1, 32)))
BOX = "[0:128, 0:32]"
NOWHERE = f"{UP}: no file of the checkpoint contains its {BOX}"
OUTSIDE = f"{UP}: its {BOX}, which takes 16,384 bytes, has "
NO_INDEX = f"{INDEX} is not an index of tensors"

# (the change, the beginning of each problem)
MISTAKES: list[tuple[Change, list[str]]] = [
    (
        lambda index: index.state_dict_metadata.pop(UP),
        [f"{UP} (128 x 32) is missing in the checkpoint"],
    ),
    (with_entry(shorten), [f"{UP}: 896 of its 4,096 elements are in no file"]),
    (
        with_entry(lambda entry: entry.chunks.append(SECOND)),
        [
            f"{UP}: {BOX} and [127:128, 0:32] both hold some of its elements",
            f"{UP}: no file of the checkpoint contains its [127:128, 0:32]",
        ],
    ),
    (
        with_entry(lambda entry: setattr(entry.properties, "dtype", torch.bfloat16)),
        [f"{UP}: it is torch.bfloat16, but must be"],
    ),
    (with_entry(lambda entry: entry.chunks.append(3)), [NO_INDEX]),
    (placed(lambda _: 3), [NOWHERE]),
    (moved(relative_path="__9_0.distcp"), [NOWHERE]),
    (moved(relative_path=f"../{TENSORS}"), [NOWHERE]),
    (moved(offset="0"), [NO_INDEX]),
    (moved(offset=-1), [OUTSIDE]),
    (moved(length=10**9), [OUTSIDE]),
    (moved(length=0), [OUTSIDE]),
]


@pytest.mark.parametrize(("change", "expected"), MISTAKES)
def test_a_mistake_in_a_sealed_index_is_reported(
    checkpoint: Path, change: Change, expected: list[str]
) -> None:
    change_index(checkpoint, change)
    found = inspect(checkpoint).problems
    assert len(found) == len(expected)
    for text in expected:
        assert any(problem.startswith(text) for problem in found), found


def test_a_checkpoint_of_muon_has_momentum(tmp_path: Path) -> None:
    """An earlier version expected AdamW's moments of every matrix."""
    config = {**CONFIG.to_json(), "optimizer": MUON}
    checkpoint = write_checkpoint(CheckpointFolder(tmp_path), 5, config=config)
    assert inspect(checkpoint).problems == ()
    up = UP.replace("exp_avg", "momentum")
    change_index(checkpoint, lambda index: index.state_dict_metadata.pop(up))
    assert only_problem(checkpoint) == f"{up} (128 x 32) is missing in the checkpoint"


def test_a_checkpoint_that_states_no_optimizer_is_of_adamw(checkpoint: Path) -> None:
    for optimizer in ({"params": {"lr": 1e-3}}, {"type": "Adam"}, None):
        config = {**CONFIG.to_json(), "optimizer": optimizer}
        (checkpoint / RUN_STATE).write_bytes(run_state(100, config=config).to_bytes())
        seal(checkpoint)
        assert inspect(checkpoint).problems == ()


def test_a_damaged_index_is_never_unpickled(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(checkpoint / INDEX, 100)
    monkeypatch.setattr("megaspeed.checkpoint.reading._IndexUnpickler", None)
    assert only_problem(checkpoint).startswith(f"{INDEX} has changed")

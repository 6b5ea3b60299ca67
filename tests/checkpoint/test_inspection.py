"""A checkpoint is complete, or each reason why it is not is reported."""

import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megaspeed.checkpoint.folders import CheckpointFolder
from megaspeed.checkpoint.inspection import glance, inspect
from megaspeed.checkpoint.manifest import INDEX, MANIFEST, read_manifest, write_manifest
from megaspeed.checkpoint.run_state import RUN_STATE
from tests.checkpoint.written import CONFIG, change_index, run_state, seal, write_checkpoint

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
    assert (found.problems, found.strays, found.model) == ((), (), CONFIG.model)
    assert found.state == run_state(100)
    assert set(found.files) == {TENSORS, INDEX, RUN_STATE}
    assert found.size_bytes == sum(
        path.stat().st_size for path in checkpoint.iterdir() if path.name != MANIFEST
    )
    assert glance(checkpoint) == found


@pytest.mark.parametrize("name", [TENSORS, INDEX, RUN_STATE])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "is missing"),
        (lambda file: os.truncate(file, file.stat().st_size - 1), "is cut short: "),
        (lambda file: os.truncate(file, 0), "is cut short: 0 bytes of the "),
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
    assert glance(checkpoint).problems == ()
    flip(checkpoint / INDEX, 100)
    os.truncate(checkpoint / TENSORS, 100_000)
    assert [problem.split()[0] for problem in glance(checkpoint).problems] == [TENSORS, INDEX]


def test_a_save_that_did_not_end_has_no_manifest(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink()
    assert only_problem(checkpoint).startswith("manifest.json is missing; it is written last")
    assert inspect(checkpoint / "nowhere").problems[0].startswith("manifest.json is missing")


def test_a_file_that_is_not_in_the_manifest_is_a_note_and_no_problem(checkpoint: Path) -> None:
    (checkpoint / "notes.txt").write_text("good one")
    found = inspect(checkpoint)
    assert (found.problems, found.strays) == ((), ("notes.txt",))


@pytest.mark.parametrize("name", [INDEX, RUN_STATE])
def test_a_manifest_without_a_file_that_must_be_is_reported(checkpoint: Path, name: str) -> None:
    files = read_manifest(checkpoint)
    del files[name]
    write_manifest(checkpoint, files)
    assert only_problem(checkpoint) == f"manifest.json does not list {name}"


def test_a_renamed_step_is_reported_and_any_other_name_is_free(checkpoint: Path) -> None:
    renamed = checkpoint.rename(checkpoint.with_name("step-00000200"))
    assert only_problem(renamed).startswith(
        "its name has step 200, but its run_state.json has step"
    )
    assert inspect(renamed.rename(renamed.with_name("best"))).problems == ()


SMALL = {**CONFIG.to_json(), "model": {**CONFIG.to_json()["model"], "vocab_size": 7}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "run_state.json has no valid model: config.model: "),
        ({"model": {"preset": "gpt2", "hidden_size": "x"}}, "config.model.hidden_size: "),
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
DOWN, QKV = "weights.blocks.0.mlp.down.weight", "weights.blocks.0.attention.qkv.weight"
UP_WEIGHT = "weights.blocks.0.mlp.up.weight"  # has the same elements as DOWN, in another shape


def place_of(index: Metadata, name: str) -> MetadataIndex:
    """Return the key of a tensor's only box in the index."""
    (place,) = (place for place in index.storage_data if place.fqn == name)
    return place


def moved(name: str, **change: Callable[[Any], object]) -> Change:
    """Change some values of the place of a tensor."""

    def move(index: Metadata) -> None:
        place = place_of(index, name)
        before = index.storage_data[place]
        values = {key: new(getattr(before, key)) for key, new in change.items()}
        index.storage_data[place] = replace(before, **values)

    return move


def exchanged(name: str, other: str) -> Change:
    """Exchange the places of two tensors."""

    def exchange(index: Metadata) -> None:
        stored, (one, two) = index.storage_data, (place_of(index, name), place_of(index, other))
        stored[one], stored[two] = stored[two], stored[one]

    return exchange


def with_entry(change: Callable[[Any], object]) -> Change:
    """Change the index's entry of UP."""
    return lambda index: change(index.state_dict_metadata[UP])


def shorten(entry: TensorStorageMetadata) -> None:
    entry.chunks[0] = replace(entry.chunks[0], sizes=torch.Size((100, 32)))


SECOND = ChunkStorageMetadata(torch.Size((127, 0)), torch.Size((1, 32)))
NOWHERE = f"{UP}: no file of the checkpoint contains its [0:128, 0:32]"
OUTSIDE = f"{UP}: its [0:128, 0:32] is not inside __0_0.distcp, according to the index"
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
            f"{UP}: [0:128, 0:32] and [127:128, 0:32] both hold some of its elements",
            f"{UP}: no file of the checkpoint contains its [127:128, 0:32]",
        ],
    ),
    (
        with_entry(lambda entry: setattr(entry.properties, "dtype", torch.bfloat16)),
        [f"{UP}: it is torch.bfloat16, but must be"],
    ),
    (with_entry(lambda entry: entry.chunks.append(3)), [NO_INDEX]),
    (lambda index: index.storage_data.update({place_of(index, UP): 3}), [NOWHERE]),
    (moved(UP, relative_path=lambda path: "__9_0.distcp"), [NOWHERE]),
    (moved(UP, relative_path=lambda path: f"../{path}"), [NOWHERE]),
    (moved(UP, relative_path=lambda path: None), [NO_INDEX]),
    (moved(UP, transform_descriptors=lambda _: ["zstd"]), [NOWHERE]),
    (moved(UP, offset=float), [NOWHERE]),
    (moved(UP, offset=str), [NOWHERE]),
    (moved(UP, offset=lambda offset: -offset), [OUTSIDE]),
    (moved(UP, offset=lambda offset: offset + 64), [f"{UP}: its [0:128, 0:32] at byte "]),
    (moved(UP, offset=lambda offset: offset - 64), [f"{UP}: its [0:128, 0:32] at byte "]),
    (moved(UP, length=lambda length: 10**9), [OUTSIDE]),
    (moved(UP, length=lambda length: -length), [f"{UP}: its [0:128, 0:32] has -"]),
    (moved(UP, length=lambda length: 0), [f"{UP}: its [0:128, 0:32] has 0 bytes"]),
    (
        exchanged(UP_WEIGHT, DOWN),
        [f"{DOWN}: its [0:32, 0:128] at byte ", f"{UP_WEIGHT}: its [0:128, 0:32] at byte "],
    ),
    (exchanged(QKV, DOWN), [f"{DOWN}: its [0:32, 0:128] has "]),
]


@pytest.mark.parametrize(("change", "expected"), MISTAKES)
def test_a_mistake_in_a_sealed_index_is_reported(
    checkpoint: Path, change: Change, expected: list[str]
) -> None:
    change_index(checkpoint, change)
    found = sorted(inspect(checkpoint).problems)
    assert [
        problem.startswith(text) for problem, text in zip(found, sorted(expected), strict=True)
    ] == [True] * len(expected), found


# --- the archives ---------------------------------------------------------------------------------


class Trap:
    """A pickle may run any code. This one would create a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self._folder),)


def archive_of(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def cut_archive() -> bytes:
    """Return an archive of the right shape that has only the first 64 bytes of its elements."""
    cut = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(archive_of(torch.zeros(128, 32)))) as source,
        zipfile.ZipFile(cut, "w") as target,
    ):
        for record in source.namelist():
            content = source.read(record)
            target.writestr(record, content[:64] if record.endswith("/data/0") else content)
        target.writestr("archive/other", bytes(16_384))
    return cut.getvalue()


ARCHIVES: list[tuple[Callable[[Path], bytes], str]] = [
    (lambda _: archive_of(torch.zeros(128, 32, dtype=torch.int32)), "is not a float32 tensor"),
    (
        lambda _: archive_of(torch.zeros(32, 128).T),
        "is a tensor of [128, 32], but must be [128, 32], row by row",
    ),
    (lambda _: archive_of("text " * 4_000), "is not a float32 tensor"),
    (lambda _: cut_archive(), "has 64 bytes of elements, but must have 16,384"),
    (
        lambda trace: archive_of([Trap(trace), torch.zeros(128, 32)]),
        "is not an archive of a tensor",
    ),
]


@pytest.mark.parametrize(("make", "message"), ARCHIVES)
def test_bytes_that_are_not_the_tensor_of_the_index_are_reported(
    checkpoint: Path, tmp_path: Path, make: Callable[[Path], bytes], message: str
) -> None:
    """The bytes are at the end of the file, so all other places are right. None of
    them runs code.
    """
    trace = tmp_path / "unpickled"
    with (checkpoint / TENSORS).open("ab") as file:
        offset = file.tell()
        length = file.write(make(trace))
    change_index(checkpoint, moved(UP, offset=lambda _: offset, length=lambda _: length))
    assert message in only_problem(checkpoint)
    assert not trace.exists()


def test_a_damaged_index_is_never_unpickled(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / INDEX).write_bytes(pickle.dumps(Trap(tmp_path / "unpickled")))
    assert len(inspect(checkpoint).problems) == len(glance(checkpoint).problems) == 1
    assert not (tmp_path / "unpickled").exists()

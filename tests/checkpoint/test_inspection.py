"""A checkpoint is whole, or every reason why it is not is named."""

import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

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
    """A whole one, to break."""
    return shutil.copytree(written, tmp_path / written.name)


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 0x04
    file.write_bytes(content)


def entry_of_up(index: Metadata) -> TensorStorageMetadata:
    entry = index.state_dict_metadata[UP]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def only_problem(checkpoint: Path) -> str:
    (problem,) = inspect(checkpoint).problems
    return problem


def test_a_whole_checkpoint_has_no_problem_and_tells_what_it_holds(checkpoint: Path) -> None:
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


def test_a_damaged_index_is_never_unpickled(checkpoint: Path, tmp_path: Path) -> None:
    """A pickle may run anything; this one would write a file."""
    trace = tmp_path / "unpickled"

    class Trap:
        def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
            return os.mkdir, (str(trace),)

    (checkpoint / INDEX).write_bytes(pickle.dumps(Trap()))
    assert len(inspect(checkpoint).problems) == len(glance(checkpoint).problems) == 1
    assert not trace.exists()


def test_a_save_that_did_not_end_has_no_manifest(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink()
    assert only_problem(checkpoint).startswith("manifest.json is missing; it is written last")
    assert inspect(checkpoint / "nowhere").problems[0].startswith("manifest.json is missing")


def test_a_file_that_belongs_to_nobody_is_noted_and_no_problem(checkpoint: Path) -> None:
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


def test_tensors_of_another_model_than_the_configuration_are_reported(checkpoint: Path) -> None:
    config = CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update={"vocab_size": 7})})
    state = run_state(100, config=config.to_json())
    (checkpoint / RUN_STATE).write_bytes(state.to_bytes())
    seal(checkpoint)
    assert only_problem(checkpoint) == (
        "embedding.tokens.weight is 301 x 32 in the checkpoint, but 7 x 32 in the model"
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "run_state.json has no valid model: config.model: "),
        ({"model": {"preset": "gpt2", "hidden_size": "x"}}, "config.model.hidden_size: "),
    ],
)
def test_a_configuration_without_a_model_is_reported(
    checkpoint: Path, config: dict[str, object], message: str
) -> None:
    (checkpoint / RUN_STATE).write_bytes(run_state(100, config=config).to_bytes())
    seal(checkpoint)
    assert message in only_problem(checkpoint)


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"a": 1})])
def test_an_index_that_is_none_is_reported(checkpoint: Path, content: bytes) -> None:
    (checkpoint / INDEX).write_bytes(content)
    seal(checkpoint)
    assert ".metadata is not an index of tensors" in only_problem(checkpoint)


def test_a_tensor_that_is_missing_in_the_index_is_reported(checkpoint: Path) -> None:
    change_index(checkpoint, lambda index: index.state_dict_metadata.pop(UP))
    assert only_problem(checkpoint) == f"{UP} (128 x 32) is missing in the checkpoint"


def test_elements_that_no_rank_wrote_are_reported(checkpoint: Path) -> None:
    def shorten(index: Metadata) -> None:
        chunks = entry_of_up(index).chunks
        chunks[0] = replace(chunks[0], sizes=torch.Size((100, 32)))

    change_index(checkpoint, shorten)
    assert only_problem(checkpoint) == f"{UP}: 896 of its 4,096 elements are in no file"


def test_elements_that_two_ranks_wrote_and_pieces_without_a_place_are_reported(
    checkpoint: Path,
) -> None:
    def double(index: Metadata) -> None:
        piece = ChunkStorageMetadata(torch.Size((127, 0)), torch.Size((1, 32)))
        entry_of_up(index).chunks.append(piece)

    change_index(checkpoint, double)
    assert list(inspect(checkpoint).problems) == [
        f"{UP}: [0:128, 0:32] and [127:128, 0:32] both hold some of its elements",
        f"{UP}: no file of the checkpoint contains its [127:128, 0:32]",
    ]


def test_a_tensor_in_half_precision_is_reported(checkpoint: Path) -> None:
    def halve(index: Metadata) -> None:
        entry_of_up(index).properties.dtype = torch.bfloat16

    change_index(checkpoint, halve)
    assert "it is torch.bfloat16, but must be" in only_problem(checkpoint)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"relative_path": "__9_0.distcp"}, "no file of the checkpoint contains its [0:128, 0:32]"),
        (
            {"length": 10**9},
            "its [0:128, 0:32] is not inside __0_0.distcp, according to the index",
        ),
    ],
)
def test_a_place_that_is_in_no_file_is_reported(
    checkpoint: Path, change: dict[str, object], message: str
) -> None:
    def move(index: Metadata) -> None:
        place = MetadataIndex(UP, (0, 0))
        index.storage_data[place] = replace(index.storage_data[place], **change)

    change_index(checkpoint, move)
    assert only_problem(checkpoint) == f"{UP}: {message}"


DOWN, QKV = "weights.blocks.0.mlp.down.weight", "weights.blocks.0.attention.qkv.weight"
UP_WEIGHT = "weights.blocks.0.mlp.up.weight"  # of DOWN's elements, in another shape


def place_of(index: Metadata, name: str) -> MetadataIndex:
    """Where the only piece of a tensor stands in the index."""
    (place,) = (place for place in index.storage_data if place.fqn == name)
    return place


def moved(name: str, **change: Callable[[int], object]) -> Callable[[Metadata], None]:
    """The place of a tensor with some of its numbers changed."""

    def move(index: Metadata) -> None:
        place = place_of(index, name)
        before = index.storage_data[place]
        numbers = {key: new(getattr(before, key)) for key, new in change.items()}
        index.storage_data[place] = replace(before, **numbers)

    return move


def exchanged(name: str, other: str) -> Callable[[Metadata], None]:
    """Two tensors, each with the other's place."""

    def exchange(index: Metadata) -> None:
        stored, (one, two) = index.storage_data, (place_of(index, name), place_of(index, other))
        stored[one], stored[two] = stored[two], stored[one]

    return exchange


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (exchanged(UP_WEIGHT, DOWN), f"is a tensor of {[32, 128]}"),
        (exchanged(QKV, DOWN), "bytes in __0_0.distcp, according to the index"),
        (moved(UP, offset=lambda offset: -offset), "is not inside __0_0.distcp"),
        (moved(UP, offset=lambda offset: offset + 64), ""),
        (moved(UP, offset=lambda offset: offset - 64), ""),
        (moved(UP, offset=float), "no file of the checkpoint contains its [0:128, 0:32]"),
        (moved(UP, offset=str), "no file of the checkpoint contains its [0:128, 0:32]"),
        (moved(UP, length=lambda length: -length), "has -"),
        (moved(UP, length=lambda length: 0), "according to the index, but its"),
        (moved(UP, relative_path=lambda path: f"../{path}"), "no file of the checkpoint contains"),
        (moved(UP, relative_path=lambda path: None), "is not an index of tensors"),
        (moved(UP, transform_descriptors=lambda _: ["zstd"]), "no file of the checkpoint contains"),
        (lambda index: index.storage_data.update({place_of(index, UP): 3}), "no file of the check"),
        (lambda index: index.state_dict_metadata[UP].chunks.append(3), "is not an index of tens"),
    ],
)
def test_a_place_that_cannot_be_right_is_reported_though_it_was_sealed(
    checkpoint: Path, change: Callable[[Metadata], None], message: str
) -> None:
    change_index(checkpoint, change)
    found = inspect(checkpoint).problems
    assert len(found) in (1, 2) and message in found[0]


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (torch.zeros(128, 32, dtype=torch.int32), "is not a float32 tensor"),
        (torch.zeros(32, 128).T, "is a tensor of [128, 32], but must be [128, 32], row by row"),
        ("text " * 4_000, "is not a float32 tensor"),
    ],
)
def test_bytes_that_are_no_float32_tensor_are_reported(
    checkpoint: Path, saved: object, message: str
) -> None:
    """Behind the others, so that every place is right."""
    with (checkpoint / TENSORS).open("ab") as file:
        offset = file.tell()
        torch.save(saved, file)
        length = file.tell() - offset
    change_index(checkpoint, moved(UP, offset=lambda _: offset, length=lambda _: length))
    assert message in only_problem(checkpoint)


def test_an_archive_with_too_few_elements_is_reported(checkpoint: Path) -> None:
    whole, cut = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(128, 32), whole)
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(cut, "w") as target:
        for record in source.namelist():
            content = source.read(record)
            target.writestr(record, content[:64] if record.endswith("/data/0") else content)
        target.writestr("archive/other", bytes(16_384))
    with (checkpoint / TENSORS).open("ab") as file:
        offset = file.tell()
        length = file.write(cut.getvalue())
    change_index(checkpoint, moved(UP, offset=lambda _: offset, length=lambda _: length))
    assert "has 64 bytes of elements, but must have 16,384" in only_problem(checkpoint)


def test_a_pickle_in_an_archive_is_no_program(checkpoint: Path, tmp_path: Path) -> None:
    trace = tmp_path / "unpickled"

    class Trap:
        def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
            return os.mkdir, (str(trace),)

    with (checkpoint / TENSORS).open("ab") as file:
        offset = file.tell()
        torch.save([Trap(), torch.zeros(128, 32)], file)
        length = file.tell() - offset
    change_index(checkpoint, moved(UP, offset=lambda _: offset, length=lambda _: length))
    assert "is not an archive of a tensor" in only_problem(checkpoint)
    assert not trace.exists()

"""The manifest reveals any damage of any file."""

import os
from pathlib import Path

import pytest

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.folders import (
    MANIFEST,
    Checksum,
    FileDigest,
    file_problems,
    read_manifest,
    size_problems,
    write_manifest,
)
from megaspeed.files.json_values import write_sealed

CONTENT = bytes(range(256)) * 40_000  # more than two of the blocks that are read at a time


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write two files and their manifest."""
    (tmp_path / "large").write_bytes(CONTENT)
    (tmp_path / "small").write_bytes(b"abc")
    write_manifest(tmp_path, {"small": FileDigest.of(b"abc"), "large": FileDigest.of(CONTENT)})
    return tmp_path


def problems(folder: Path) -> list[str]:
    return list(file_problems(folder, read_manifest(folder)).values())


def test_the_checksum_is_xxh3_of_128_bits() -> None:
    """This is the published checksum of an empty input."""
    assert Checksum().hexdigest() == "99aa06d3014798d86001c324468d497f"


def test_a_checksum_does_not_depend_on_how_the_bytes_are_divided(folder: Path) -> None:
    pieces = Checksum()
    for start in range(0, len(CONTENT), 999_983):
        pieces.update(memoryview(CONTENT)[start : start + 999_983])
    whole = FileDigest.of(CONTENT)
    assert pieces.hexdigest() == whole.checksum
    assert FileDigest.of_file(folder / "large") == whole


def test_a_manifest_is_read_as_it_was_written(folder: Path) -> None:
    assert read_manifest(folder) == {
        "large": FileDigest.of(CONTENT),
        "small": FileDigest.of(b"abc"),
    }
    assert problems(folder) == []


def test_a_file_of_another_size_is_named_with_both_sizes(folder: Path) -> None:
    os.truncate(folder / "large", 1_234_567)
    (folder / "small").write_bytes(b"abcd")
    assert problems(folder) == [
        "large has 1,234,567 bytes, but 10,240,000 were written",
        "small has 4 bytes, but 3 were written",
    ]
    assert list(size_problems(folder, read_manifest(folder))) == ["large", "small"]


@pytest.mark.parametrize("position", [0, 5_000_000, len(CONTENT) - 1])
def test_one_flipped_bit_is_found_wherever_it_is(folder: Path, position: int) -> None:
    damaged = bytearray(CONTENT)
    damaged[position] ^= 0x10
    (folder / "large").write_bytes(damaged)
    (problem,) = problems(folder)
    assert problem.startswith("large has changed since it was written: checksum ")
    assert FileDigest.of(CONTENT).checksum in problem
    assert size_problems(folder, read_manifest(folder)) == {}


def test_every_broken_file_is_reported_at_once(folder: Path) -> None:
    (folder / "large").unlink()
    (folder / "small").write_bytes(b"abd")
    missing, changed = problems(folder)
    assert missing == "large does not exist" and changed.startswith("small has changed")


def test_a_pipe_or_a_folder_is_not_a_file_and_is_not_opened(folder: Path) -> None:
    for name in ("large", "small"):
        (folder / name).unlink()
    os.mkfifo(folder / "large")
    (folder / "small").mkdir()
    assert problems(folder) == ["large is a named pipe", "small is a folder"]


def test_without_a_manifest_the_save_did_not_end(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"manifest.json is missing.* save did not end"):
        read_manifest(folder)


def test_a_manifest_that_was_cut_or_changed_is_refused(folder: Path) -> None:
    whole = (folder / MANIFEST).read_bytes()
    for broken in (b"", whole[:-2], whole.replace(b'"size_bytes": 3', b'"size_bytes": 4')):
        assert broken != whole
        (folder / MANIFEST).write_bytes(broken)
        with pytest.raises(CheckpointError, match="is damaged: it was cut short"):
            read_manifest(folder)


def test_a_manifest_that_is_a_folder_is_reported(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).mkdir()
    with pytest.raises(CheckpointError, match=r"cannot be read \(it is a folder\)"):
        read_manifest(folder)


def test_a_manifest_of_a_later_format_names_the_mend(folder: Path) -> None:
    write_sealed(folder / MANIFEST, {"format": 2, "files": {}})
    with pytest.raises(CheckpointError, match="has format 2, but this version reads 1; use the"):
        read_manifest(folder)


@pytest.mark.parametrize(
    "files",
    [
        None,
        [],
        {"a": 3},
        {"a": {"size_bytes": 3}},
        {"a": {"size_bytes": "3", "checksum": "x"}},
        {"../a": {"size_bytes": 3, "checksum": "x"}},
        {"/etc/passwd": {"size_bytes": 3, "checksum": "x"}},
    ],
    ids=str,
)
def test_a_manifest_with_other_content_is_refused(folder: Path, files: object) -> None:
    write_sealed(folder / MANIFEST, {"format": 1, "files": files})
    with pytest.raises(CheckpointError, match="does not contain names, sizes and checksums"):
        read_manifest(folder)

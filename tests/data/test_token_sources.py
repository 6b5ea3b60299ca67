"""Files of 16-bit ids are read unchanged, and refused if they are damaged."""

import logging
from pathlib import Path

import pytest

from megaspeed.data.cache import Cache
from megaspeed.data.errors import DataError
from megaspeed.data.sources import paths_at
from megaspeed.data.token_file import TokenFile
from megaspeed.data.token_sources import token_paths
from tests.data.token_folders import open_all, write_nanogpt


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def open_one(path: Path | str, cache: Cache) -> TokenFile:
    (file,) = open_all(path, cache)
    return file


def refusal(path: Path | str, cache: Cache) -> str:
    with pytest.raises(DataError) as caught:
        open_all(path, cache)
    (problem,) = caught.value.problems
    return problem


def test_a_nanogpt_file_is_its_ids_and_what_one_pass_finds(tmp_path: Path, cache: Cache) -> None:
    file = open_one(write_nanogpt(tmp_path / "train.bin", [3, 50_256, 65_535, 4]), cache)
    assert file.map().tolist() == [3, 50_256, 65_535, 4]
    assert file.index.largest_id == 65_535
    assert (file.index.end_of_text, file.index.documents) == (None, None)
    assert file.index.tokenizer_fingerprint is None


def test_a_file_is_read_once_and_again_when_it_changed(
    tmp_path: Path, cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_nanogpt(tmp_path / "train.bin", [1, 2, 3])
    caplog.set_level(logging.INFO)
    first = open_one(path, cache)
    assert open_one(path, cache) == first
    assert sum("reading" in message for message in caplog.messages) == 1
    write_nanogpt(path, [1, 2, 3, 9])
    changed = open_one(path, cache)
    assert changed.index.largest_id == 9
    assert changed.index.corpus_fingerprint != first.index.corpus_fingerprint


def test_the_same_ids_elsewhere_have_the_same_fingerprint(tmp_path: Path, cache: Cache) -> None:
    (tmp_path / "there").mkdir()
    one = open_one(write_nanogpt(tmp_path / "train.bin", [1, 2, 3]), cache)
    other = open_one(write_nanogpt(tmp_path / "there" / "other.bin", [1, 2, 3]), cache)
    assert one.index == other.index


def test_several_files_of_a_glob_are_sorted_by_name(tmp_path: Path, cache: Cache) -> None:
    for name in ("b", "a", "c"):
        write_nanogpt(tmp_path / f"{name}.bin", [ord(name)])
    files = open_all(f"{tmp_path}/*.bin", cache)
    assert [file.path.name for file in files] == ["a.bin", "b.bin", "c.bin"]


def test_text_and_folders_of_text_are_not_tokens(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "state.json").write_text("{}")
    write_nanogpt(tmp_path / "train.bin", [1])
    assert not token_paths(paths_at(str(tmp_path / "text.txt")))
    assert not token_paths(paths_at(str(tmp_path)))
    assert not token_paths(paths_at(str(tmp_path / "missing.bin")))
    assert token_paths(paths_at(str(tmp_path / "t*")))  # text and tokens
    assert token_paths(paths_at(str(tmp_path / "*.bin")))


def test_a_nanogpt_file_with_half_an_id_names_its_size(tmp_path: Path, cache: Cache) -> None:
    path = write_nanogpt(tmp_path / "train.bin", [1, 2, 3])
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{path} has 5 bytes; it was truncated" in refusal(path, cache)
    path.write_bytes(b"")
    assert "has 0 bytes" in refusal(path, cache)


def test_a_file_truncated_after_it_was_opened_is_reported_and_not_read(
    tmp_path: Path, cache: Cache
) -> None:
    file = open_one(write_nanogpt(tmp_path / "train.bin", [1, 2, 3]), cache)
    write_nanogpt(tmp_path / "train.bin", [1, 2])
    with pytest.raises(DataError, match="had at least 6 bytes and has 4"):
        file.map()


def test_it_can_be_opened_under_the_caches_lock(tmp_path: Path, cache: Cache) -> None:
    path = write_nanogpt(tmp_path / "train.bin", [1, 2, 3])
    with cache.lock():
        open_one(path, cache)

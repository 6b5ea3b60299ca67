"""Special files are reported and never opened; hashes and states show changes of a file."""

import hashlib
import os
import re
from pathlib import Path

import pytest

from megaspeed.files.paths import (
    file_problem,
    folder_problem,
    path_problem,
    read_file,
    sha256_of,
    special_among,
    state_of,
)


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def link(path: Path, target: Path | str) -> Path:
    path.symlink_to(target)
    return path


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert file_problem(file) is None
    assert read_file(file, 5) == read_file(link(tmp_path / "link", file)) == b"12345"
    with pytest.raises(OSError, match="it has more than 4 bytes"):
        read_file(file, 4)


@pytest.mark.timeout(10)
def test_what_is_no_file_is_reported_and_not_opened(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path, "is a folder"),
        (pipe(tmp_path / "pipe"), "is a named pipe"),
        (link(tmp_path / "to a pipe", tmp_path / "pipe"), "is a named pipe"),
        (Path("/dev/zero"), "is a device"),
    ):
        assert file_problem(path) == message
        with pytest.raises(OSError, match=f"it {message}"):
            read_file(path)


def test_what_cannot_be_reached_is_reported_by_the_system(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "nothing", "does not exist"),
        (link(tmp_path / "dangling", "nowhere"), "is a broken link"),
        (link(tmp_path / "loop", "loop"), "cannot be reached (Too many levels of symbolic links)"),
        (tmp_path / ("n" * 300), "cannot be reached (File name too long)"),
        (tmp_path / "a\0b", "cannot be reached (embedded null byte)"),
    ):
        assert file_problem(path) == message


def test_a_folder_for_a_library_has_files_and_folders_only(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    assert list(special_among(tmp_path.iterdir())) == []
    pipe(tmp_path / "pipe")
    link(tmp_path / "dangling", "nowhere")
    assert list(special_among(sorted(tmp_path.iterdir()))) == [
        f"{tmp_path / 'dangling'} is a broken link, but must be a file",
        f"{tmp_path / 'pipe'} is a named pipe, but must be a file",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\0b", "NUL character"),
        ("n" * 256, "a name in it has 256 bytes, but must have at most 255"),
        ("ä" * 128, "a name in it has 256 bytes"),
        ("n/" * 2048, "it has 4,096 bytes, but must have at most 4,095"),
    ],
)
def test_a_path_that_nothing_can_have_is_reported_by_its_text(text: str, message: str) -> None:
    assert re.search(message, path_problem(text) or "")


@pytest.mark.parametrize("text", ["a", "n" * 255, "/" + "n/" * 2047, "~/**/*.txt", "ä" * 127])
def test_any_other_path_is_possible(text: str) -> None:
    assert path_problem(text) is None


def test_a_folder_that_cannot_be_made_is_reported_by_what_is_in_its_way(tmp_path: Path) -> None:
    assert folder_problem("run_dir", tmp_path / "new" / "run") is None
    for name, kind in (("pipe", "is a named pipe"), ("loop", "cannot be reached")):
        place = pipe(tmp_path / name) if name == "pipe" else link(tmp_path / name, name)
        message = folder_problem("run_dir", place / "run")
        assert message is not None and message.startswith(
            f"run_dir {place}/run cannot be a folder, because {place} {kind}"
        )
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "loop"}, "no file was created"


def test_a_rewritten_file_has_another_state(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("one")
    before = state_of(file)
    assert state_of(file) == before
    os.utime(file, ns=(0, before[2] + 1))
    assert state_of(file) != before


def test_a_hash_is_of_all_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content := bytes(range(100)))
    assert sha256_of(tmp_path / "a") == hashlib.sha256(content).hexdigest()

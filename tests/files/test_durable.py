"""A file is complete or absent."""

import resource
from pathlib import Path
from typing import BinaryIO

import pytest

from megaspeed.files.durable import flush_folder, write_file


def test_a_file_is_written_and_its_filler_answers(tmp_path: Path) -> None:
    assert write_file(tmp_path / "file", lambda stream: stream.write(b"four")) == 4
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"four")]


def test_a_write_that_fails_leaves_the_old_file_and_the_next_one_succeeds(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fill(stream: BinaryIO) -> None:
        stream.write(b"half of the n")
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        write_file(path, fill)
    assert path.read_bytes() == b"old"
    write_file(path, lambda stream: stream.write(b"new"))
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_too_large_for_the_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    path, limits = tmp_path / "file", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: '{path}'"):
            write_file(path, lambda stream: stream.write(bytes(1 << 21)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_who_has_the_old_file_open_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_file(path, lambda stream: stream.write(b"old"))
    with path.open("rb") as old:
        write_file(path, lambda stream: stream.write(b"new"))
        assert old.read() == b"old"


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "folder" / "file", tmp_path / "link"
    target.parent.mkdir()
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_file(link, lambda stream: stream.write(b"new"))
    assert link.is_symlink() and target.read_bytes() == b"new"
    assert [path.name for path in target.parent.iterdir()] == ["file"]


def test_only_a_folder_can_be_flushed_as_one(tmp_path: Path) -> None:
    flush_folder(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        flush_folder(tmp_path / "file")

"""A new folder is complete or absent."""

import subprocess
import sys
from pathlib import Path

import pytest

from megaspeed.files.durable import new_folder


def test_it_has_its_name_once_it_is_filled(tmp_path: Path) -> None:
    with new_folder(tmp_path / "deep" / "out") as writing:
        (writing / "file").write_text("content")
        assert not (tmp_path / "deep" / "out").exists()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]
    assert (tmp_path / "deep" / "out" / "file").read_text() == "content"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), new_folder(tmp_path / "out") as writing:
        (writing / "file").write_text("content")
        raise error
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from megaspeed.files.durable import new_folder

with new_folder(Path(sys.argv[1])) as writing:
    (writing / "half").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_named_and_stays(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "out")], check=False)
    left = tmp_path / "out.writing"
    message = f"was killed; .* remove {left}"
    with pytest.raises(FileExistsError, match=message), new_folder(tmp_path / "out"):
        raise AssertionError("the block does not run")
    assert (left / "half").exists() and not (tmp_path / "out").exists()


def test_of_two_that_fill_one_the_second_is_refused_and_the_first_is_whole(tmp_path: Path) -> None:
    with new_folder(tmp_path / "out") as writing:
        (writing / "first").touch()
        with pytest.raises(FileExistsError, match="another process"), new_folder(tmp_path / "out"):
            raise AssertionError("the block does not run")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["first"]


def test_what_is_there_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="exists already"), new_folder(tmp_path / "out"):
        raise AssertionError("the block does not run")
    (tmp_path / "out").rmdir()
    with pytest.raises(FileExistsError), new_folder(tmp_path / "out"):
        (tmp_path / "out").touch()  # another process creates it meanwhile
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

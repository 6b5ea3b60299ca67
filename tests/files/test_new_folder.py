"""A new folder is there whole, or not at all."""

from pathlib import Path

import pytest

from megaspeed.files.new_folder import new_folder


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


def test_what_a_killed_process_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "out.writing").mkdir()
    (tmp_path / "out.writing" / "half").touch()
    with new_folder(tmp_path / "out"):
        pass
    assert list((tmp_path / "out").iterdir()) == []


def test_what_is_there_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="is there already"), new_folder(tmp_path / "out"):
        raise AssertionError("the block does not run")
    (tmp_path / "out").rmdir()
    with pytest.raises(FileExistsError), new_folder(tmp_path / "out"):
        (tmp_path / "out").touch()  # meanwhile, by another
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

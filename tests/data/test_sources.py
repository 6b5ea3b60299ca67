"""Sources name files; what cannot be found or read is said, all of it at once."""

import random
from pathlib import Path

import pytest

from megaspeed.data import DataError
from megaspeed.data.sources import list_files


def names(*sources: str) -> list[str]:
    return [file.name for file in list_files(sources, "data.train")]


def touch(folder: Path, *files: str) -> None:
    for name in random.Random(0).sample(files, len(files)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def test_the_bundled_corpus_is_the_library_without_tests_and_packages() -> None:
    found = names("python-stdlib")
    assert found == sorted(found)
    assert {"argparse.py", "json/decoder.py", "asyncio/events.py"} <= set(found)
    parts = {part for name in found for part in name.split("/")}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    assert all(name.endswith(".py") for name in found)


def test_a_globs_files_are_in_the_order_of_their_relative_names(tmp_path: Path) -> None:
    touch(tmp_path, "b.txt", "a.txt", "sub/c.txt", "sub/deep/a.txt", "note.md")
    expected = ["a.txt", "b.txt", "sub/c.txt", "sub/deep/a.txt"]
    assert names(f"{tmp_path}/**/*.txt") == expected
    assert names(f"{tmp_path}/s*/*.txt") == ["sub/c.txt"]


def test_sources_keep_the_order_in_which_they_are_listed(tmp_path: Path) -> None:
    touch(tmp_path, "b.txt", "a.txt")
    assert names(f"{tmp_path}/b.txt", f"{tmp_path}/a.txt") == ["b.txt", "a.txt"]


def test_a_file_whose_name_looks_like_a_glob_is_a_file(tmp_path: Path) -> None:
    touch(tmp_path, "part[1].txt")
    assert names(f"{tmp_path}/part[1].txt") == ["part[1].txt"]


def test_relative_paths_start_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path, "texts/a.txt")
    monkeypatch.chdir(tmp_path)
    assert names("texts/*.txt") == names("texts/a.txt") == ["a.txt"]
    assert list_files(["texts/*.txt"], "data.train")[0].path == tmp_path / "texts/a.txt"


def test_every_source_that_cannot_be_used_is_named_with_its_mend(tmp_path: Path) -> None:
    touch(tmp_path, "a.txt", "b.jsonl", "sub/c.txt")
    with pytest.raises(DataError) as caught:
        names(
            f"{tmp_path}/missing.txt",
            f"{tmp_path}/*.md",
            f"{tmp_path}/sub",
            f"{tmp_path}/b.jsonl",
            f"{tmp_path}/a.txt",
            f"{tmp_path}/a*",
        )
    problems = caught.value.problems
    assert len(problems) == 5
    assert f"there is no file {tmp_path}/missing.txt" in problems[0]
    assert f"matches 0 under {tmp_path}" in problems[1]
    assert f'is a folder; write "{tmp_path}/sub/**/*.txt"' in problems[2]
    assert "is a .jsonl file" in problems[3]
    assert f"is matched by both '{tmp_path}/a.txt' and '{tmp_path}/a*'" in problems[4]
    assert str(caught.value).startswith("1. data.train: ")


def test_an_empty_list_of_sources_is_an_error() -> None:
    with pytest.raises(DataError, match=r"data\.train must list at least one source"):
        names()

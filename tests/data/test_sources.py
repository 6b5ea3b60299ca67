"""Sources name files. All files that cannot be found or read are reported at once."""

import os
import random
from pathlib import Path
from typing import Any

import pytest

from megaspeed.config.run import Source
from megaspeed.data.errors import DataError
from megaspeed.data.formats import JsonLines, PlainText, Table
from megaspeed.data.sources import SourceFile
from tests.support.text import list_files


def names(*sources: str | Source) -> list[str]:
    return [file.name for file in files(*sources)]


def files(*sources: str | Source) -> list[SourceFile]:
    given = [Source(path=source) if isinstance(source, str) else source for source in sources]
    return list_files(given, "data.train")


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
    assert files("texts/*.txt")[0].path == tmp_path / "texts/a.txt"


def test_every_source_that_cannot_be_used_is_named_with_its_mend(tmp_path: Path) -> None:
    touch(tmp_path, "a.txt", "b.csv", "sub/c.txt")
    with pytest.raises(DataError) as caught:
        names(
            f"{tmp_path}/missing.txt",
            f"{tmp_path}/*.md",
            f"{tmp_path}/sub",
            f"{tmp_path}/b.csv",
            f"{tmp_path}/a.txt",
            f"{tmp_path}/a*",
        )
    problems = caught.value.problems
    assert len(problems) == 5
    assert f"there is no file {tmp_path}/missing.txt" in problems[0]
    assert '"dataset"' not in problems[0]
    assert f"matches 0 under {tmp_path}" in problems[1]
    assert "is another folder; name the files in it" in problems[2]
    assert f'for example with "{tmp_path}/sub/**/*.txt"' in problems[2]
    assert "b.csv is a .csv file, which is not read; extract its text into" in problems[3]
    assert f"is matched by both '{tmp_path}/a.txt' and '{tmp_path}/a*'" in problems[4]
    assert str(caught.value).startswith("1. data.train: ")


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("a.json", "one object on each line is read if the file is named .jsonl"),
        ("a.csv.gz", "extract its text"),
        ("a.tar.gz", "unpack it, or pack each file alone"),
        ("a.ZIP", "unpack it, or pack each file alone"),
        ("a.arrow", "name the folder that datasets' save_to_disk wrote"),
        ("a.bin", "it may hold token ids, which are not text"),
    ],
)
def test_a_format_that_would_be_read_as_its_own_syntax_is_refused(
    tmp_path: Path, name: str, mend: str
) -> None:
    touch(tmp_path, name)
    with pytest.raises(DataError, match="which is not read") as caught:
        names(f"{tmp_path}/{name}")
    assert mend in str(caught.value)


def test_a_suffix_states_the_format_and_a_dot_in_a_folders_name_does_not(tmp_path: Path) -> None:
    touch(tmp_path, "v1.json/part.0001", "a.jsonl", "b.ndjson.zst", "c.parquet", "d.GZ", "e")
    (part, lines, archive, table, packed, plain) = (
        files(f"{tmp_path}/{name}")[0].format
        for name in ("v1.json/*", "a.jsonl", "b.ndjson.zst", "c.parquet", "d.GZ", "e")
    )
    assert part == packed == plain == PlainText()
    assert lines == archive == JsonLines("text")
    assert table == Table("text")


def test_a_dataset_is_one_file_named_by_everything_that_identifies_it() -> None:
    whole = Source(dataset="wiki")
    part = Source(dataset="wiki", configuration="en", revision="v1", split="test")
    assert names(whole, part) == ["wiki[train]", "wiki/en@v1[test]"]
    with pytest.raises(DataError, match="wiki is matched by both 'wiki' and 'wiki'"):
        names(whole, whole)


def test_an_empty_list_of_sources_is_an_error() -> None:
    with pytest.raises(DataError, match=r"data\.train must list at least one source"):
        names()


def problem_of(*sources: str) -> str:
    with pytest.raises(DataError) as caught:
        files(*sources)
    (problem,) = caught.value.problems
    return problem


def test_a_glob_lists_a_file_once_by_its_own_name_not_by_links(tmp_path: Path) -> None:
    touch(tmp_path, "b.txt", "c.txt", "sub/d.txt")
    (tmp_path / "a.txt").symlink_to("b.txt")
    (tmp_path / "sub/loop").symlink_to("..")
    (tmp_path / "again").symlink_to("sub")
    assert names(f"{tmp_path}/**/*.txt") == ["b.txt", "c.txt", "sub/d.txt"]
    assert names(f"{tmp_path}/again/*.txt") == ["d.txt"]


def test_a_link_to_a_file_of_another_source_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "a.txt")
    (tmp_path / "link.txt").symlink_to("a.txt")
    problem = problem_of(f"{tmp_path}/a*", f"{tmp_path}/link.txt")
    assert f"{tmp_path}/a.txt (the same file as {tmp_path}/link.txt, by a link)" in problem


def test_a_broken_link_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "a.txt")
    (tmp_path / "gone.txt").symlink_to("missing")
    problem = problem_of(f"{tmp_path}/*.txt")
    assert problem.startswith(f"data.train: {tmp_path}/gone.txt is a broken link;")


def test_folders_that_may_not_be_entered_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path, "a.txt", "closed/b.txt", "open/c.txt")
    real = os.stat

    def stat(path: str | Path, **options: Any) -> os.stat_result:
        if f"{tmp_path}/closed/" in os.fspath(path):
            raise PermissionError(13, "Permission denied", path)
        return real(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    assert names(f"{tmp_path}/*") == ["a.txt"]


def test_a_number_after_a_suffix_does_not_make_the_file_plain_text(tmp_path: Path) -> None:
    touch(
        tmp_path, "a.jsonl.1", "b.NDJSON.0012", "c.jsonl.2.gz", "d.parquet.1", "e.txt.1", "f.0001"
    )
    formats = [file.format for file in files(f"{tmp_path}/*")]
    assert formats == [*[JsonLines("text")] * 3, Table("text"), PlainText(), PlainText()]
    touch(tmp_path, "table.csv.1")
    assert "which is not read; extract its text" in problem_of(f"{tmp_path}/table*")


def test_a_folder_with_brackets_is_found_by_a_glob_that_escapes_them(tmp_path: Path) -> None:
    touch(tmp_path, "[v1]/a.txt")
    assert f'"{tmp_path}/[[]v1]/**/*.txt"' in problem_of(f"{tmp_path}/[v1]")
    assert names(f"{tmp_path}/[[]v1]/*.txt") == ["[v1]/a.txt"]
    assert f"matches 0 under {tmp_path}" in problem_of(f"{tmp_path}/[v2]/*.txt")

"""Sources name files. All files that cannot be found or read are reported at once."""

import glob
import os
import random
from pathlib import Path
from typing import Any

import pytest

from megaspeed.config.data import Source
from megaspeed.data import search
from megaspeed.data.errors import DataError
from megaspeed.data.search import paths_at
from megaspeed.data.sources import SourceFile
from megaspeed.data.tables import Table
from megaspeed.data.text_files import JsonLines, PlainText
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
        ("a.parquet.zst", "unpack it; a table is compressed within"),
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


@pytest.mark.parametrize(
    ("files", "pattern"),
    [([], "*.txt"), (["b.jsonl"], "*.jsonl"), (["a.csv", "b.parquet"], "*.parquet")],
)
def test_a_glob_that_matches_the_files_of_a_folder_is_suggested(
    tmp_path: Path, files: list[str], pattern: str
) -> None:
    for file in files:
        (tmp_path / file).write_text("")
    with pytest.raises(DataError) as caught:
        list_files([Source(path=str(tmp_path))], "data.train")
    assert str(caught.value).endswith(f'for example with "{tmp_path}/**/{pattern}"')


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


def test_links_to_files_that_are_listed_are_skipped_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder had 47 links, and each of them was a problem that ended the run."""
    touch(tmp_path, "b.txt", "c.txt", "links/d.txt")
    for number in range(46):
        (tmp_path / f"a{number:02}.txt").symlink_to("b.txt")
    (tmp_path / "links/c.txt").symlink_to("../c.txt")
    for order in (["*.txt", "links/*"], ["links/*", "*.txt"]):
        sources = [Source(path=f"{tmp_path}/{pattern}") for pattern in order]
        listed = list_files(sources, "data.train", report=True)
        assert {file.path.relative_to(tmp_path).as_posix() for file in listed} == {
            "b.txt",
            "c.txt",
            "links/d.txt",
        }
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["data.train: skipped links to files already listed: 47"] * 2


def test_a_link_that_is_named_itself_and_a_source_of_links_alone_are_refused(
    tmp_path: Path,
) -> None:
    touch(tmp_path, "a.txt")
    (tmp_path / "link.txt").symlink_to("a.txt")
    for named in ("link.txt", "link*"):
        problem = problem_of(f"{tmp_path}/a*", f"{tmp_path}/{named}")
        assert f"{tmp_path}/link.txt (the same file as {tmp_path}/a.txt, by a link)" in problem or (
            f"{tmp_path}/a.txt (the same file as {tmp_path}/link.txt, by a link)" in problem
        )


def test_broken_links_are_one_problem(tmp_path: Path) -> None:
    touch(tmp_path, "a.txt")
    for number in range(3):
        (tmp_path / f"gone{number}.txt").symlink_to("missing")
    assert problem_of(f"{tmp_path}/*.txt") == (
        f"data.train: a link must lead to a file, but of '{tmp_path}/*.txt', 3 are broken, "
        f"the first {tmp_path}/gone0.txt; restore their files, remove the links, or exclude them "
        f'with "!{tmp_path}/gone0.txt"'
    )
    assert names(f"{tmp_path}/*.txt", "!gone?.txt") == ["a.txt"]


@pytest.mark.timeout(30)
def test_a_glob_enters_each_folder_once(tmp_path: Path) -> None:
    """With ten links that lead back up, the tree had 10^40 folders."""
    touch(tmp_path, "root/a.txt", "root/sub/deep/b.txt", "outside.txt", "other/.hidden/d.txt")
    touch(tmp_path, "other/c.txt")
    for number in range(10):
        (tmp_path / f"root/up{number}").symlink_to("..")
        (tmp_path / f"root/sub/back{number}").symlink_to("..")
    (tmp_path / "root/other").symlink_to("../other")
    (tmp_path / "root/again").symlink_to("sub")
    expected = ["a.txt", "other/c.txt", "sub/deep/b.txt"]
    assert names(f"{tmp_path}/root/**/*.txt") == names(f"{tmp_path}/root/**") == expected
    assert names(f"{tmp_path}/root/**/again/deep/*.txt") == ["again/deep/b.txt"]
    assert names(f"{tmp_path}/root/**/.hidden/*") == ["other/.hidden/d.txt"]


def test_globs_match_as_in_pythons_glob(tmp_path: Path) -> None:
    touch(tmp_path, "a/b/c.txt", "a/.h/d.txt", "a/b/.e", "f.txt", "a/x/b/g.md", "b/b/b/i.txt")
    for pattern in ("**/*.txt", "*/*", "**/b/**/*", "**/.*", "**", "a/**/b/*", "[!a]*", "**/**/*"):
        path = f"{tmp_path}/{pattern}"
        found = {Path(match) for match in glob.glob(path, recursive=True)} - {tmp_path}
        assert set(paths_at(path)) == found, pattern


def test_a_search_that_takes_long_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    touch(tmp_path, "a.txt", "b.txt", "sub/c.txt", "sub/sub/d.txt")
    monkeypatch.setattr(search, "_REPORTED_AFTER_SECONDS", -1.0)
    list_files([Source(path=f"{tmp_path}/**/*.txt")], "data.train", report=True)
    assert capsys.readouterr().err == f"looking for files below {tmp_path}: 2 found so far\n"


def test_an_exclusion_removes_files_from_the_sources_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path, "README.md", "a.txt", "drafts/b.txt", "old/README.md", "old/drafts/c.txt")
    monkeypatch.chdir(tmp_path)
    everything = ["README.md", "a.txt", "drafts/b.txt", "old/README.md", "old/drafts/c.txt"]
    assert names("**") == everything
    assert names("**", "!README*") == ["a.txt", "drafts/b.txt", "old/drafts/c.txt"]  # anywhere
    assert names("**", "!drafts/") == ["README.md", "a.txt", "old/README.md"]
    assert names("**", "!./drafts") == [each for each in everything if each != "drafts/b.txt"]
    assert names("**/*.txt", f"!{tmp_path}/**/drafts/*") == ["a.txt"]
    assert names("**/*.txt", "!drafts", "old/drafts/c.txt") == ["a.txt", "c.txt"]
    touch(tmp_path, "!a[1].txt", "a[1].txt")
    assert names("./!a*") == ["!a[1].txt"]
    assert names("a*.txt", "!a[1].txt") == ["a.txt"]


def test_an_exclusion_that_removes_nothing_or_everything_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "a.txt", "b.txt")
    assert problem_of(f"{tmp_path}/*", "!c.txt") == (
        "data.train: an exclusion must remove a file of the sources before it, but '!c.txt' "
        "removes none of 2; correct it, move it after its sources, or omit it"
    )
    assert "'!a.txt' removes none of 0" in problem_of("!a.txt", f"{tmp_path}/*")
    assert problem_of(f"{tmp_path}/b.txt", f"{tmp_path}/a*", "!a.*") == (
        f"data.train: a source must keep a file, but '!a.*' excludes all 1 of '{tmp_path}/a*'; "
        "narrow the exclusion, or omit the source"
    )


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


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("pages.jsonl.1", "rename it so that its name ends in .jsonl"),
        ("pages.NDJSON.0012", "rename it so that its name ends in .ndjson"),
        ("pages.jsonl.2.gz", "rename it so that its name ends in .jsonl.gz"),
        ("notes.txt.gz.3", "rename it so that its name ends in .gz"),
        ("table.parquet.1", "rename it so that its name ends in .parquet"),
        ("table.csv.1", "extract its text into .txt or .jsonl files"),
    ],
)
def test_a_number_after_a_suffix_does_not_make_the_file_plain_text(
    tmp_path: Path, name: str, mend: str
) -> None:
    touch(tmp_path, name)
    assert problem_of(f"{tmp_path}/{name}").endswith(f"which is not read; {mend}")


def test_a_number_after_another_suffix_is_part_of_the_name(tmp_path: Path) -> None:
    touch(tmp_path, "part.0001", "log.txt.1", "v1.2", "1", "a.jsonl.old")
    assert len(names(f"{tmp_path}/*")) == 5


def test_a_folder_with_brackets_is_found_by_a_glob_that_escapes_them(tmp_path: Path) -> None:
    touch(tmp_path, "[v1]/a.txt")
    right = f"{tmp_path}/[[]v1]/*.txt"
    assert problem_of(f"{tmp_path}/[v1]/*.txt").endswith(
        'for a bracket that is part of a name, write "[[]"'
    )
    assert f'"{tmp_path}/[[]v1]/**/*.txt"' in problem_of(f"{tmp_path}/[v1]")
    assert names(right) == ["[v1]/a.txt"]
    assert f"matches 0 under {tmp_path}" in problem_of(f"{tmp_path}/[v2]/*.txt")

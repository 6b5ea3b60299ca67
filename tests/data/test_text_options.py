"""Options that name text are refused if they cannot be intended."""

import argparse
from pathlib import Path

import pytest

from megaspeed.cli.text_options import add_text_options, text_files
from megaspeed.data.errors import DataError
from megaspeed.data.sources import SourceFile
from tests.data.written_formats import FORMATS


def files_of(*arguments: str) -> list[SourceFile]:
    parser = argparse.ArgumentParser()
    add_text_options(parser)
    return text_files(parser.parse_args(arguments))


def problems(*arguments: str) -> tuple[str, ...]:
    with pytest.raises(DataError) as caught:
        files_of(*arguments)
    return caught.value.problems


@pytest.mark.parametrize("option", ["--configuration en", "--revision v1", "--streaming"])
def test_an_option_of_datasets_needs_a_dataset(option: str) -> None:
    (reported,) = problems("python-stdlib", *option.split())
    assert "need --dataset" in reported


def test_token_ids_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "tokens-00000.bin").touch()
    (named,), (matched,) = problems(str(tmp_path)), problems(f"{tmp_path}/*")
    assert "is another folder" in named
    assert "it may hold token ids, which are not text" in matched


def test_a_file_named_twice_is_refused_with_a_message_for_every_command(
    tmp_path: Path,
) -> None:
    (file := tmp_path / "a.txt").touch()
    assert problems(str(file), str(file)) == (
        f"INPUT: a file may be listed only once, but {file} is matched by both '{file}' and "
        f"'{file}'; narrow one of the two, or remove it",
    )


@pytest.mark.parametrize("kind", ["txt", "txt.gz", "jsonl", "jsonl.zst", "parquet"])
def test_a_file_is_read_whatever_bytes_its_name_has(tmp_path: Path, kind: str) -> None:
    """Old corpora have names in Latin-1, and a shell passes them unchanged."""
    written = Path(str(FORMATS[kind](tmp_path, ["old text"]).path))
    path = written.with_name("caf\udce9" + "".join(written.suffixes))
    written.rename(path)
    (file,) = files_of(str(path))
    assert [piece.text for piece in file.pieces()] == ["old text"]


@pytest.mark.parametrize(
    "arguments",
    [
        [""],
        ["--dataset", ""],
        ["--dataset", "d", "--split", ""],
        ["--dataset", "d", "--configuration", "caf\udce9"],
        ["a.txt", "--text-field", "caf\udce9"],
    ],
)
def test_an_invalid_name_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        files_of(*arguments)
    assert stop.value.code == 2
    reported = capsys.readouterr().err
    assert "the name is empty" in reported or "it must be UTF-8" in reported

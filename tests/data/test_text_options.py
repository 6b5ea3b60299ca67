"""What the options of a command say of text is refused where it cannot be meant."""

import argparse
from pathlib import Path

import pytest

from megaspeed.cli.text_options import add_text_options, text_files
from megaspeed.data import DataError


def problems(*arguments: str) -> tuple[str, ...]:
    parser = argparse.ArgumentParser()
    add_text_options(parser)
    with pytest.raises(DataError) as caught:
        text_files(parser.parse_args(arguments))
    return caught.value.problems


def test_what_is_said_of_datasets_needs_one() -> None:
    assert problems("python-stdlib", "--streaming", "--revision", "v1") == (
        "what is said of datasets needs --dataset, and there is --revision and --streaming "
        "without it; leave them out, or name the --dataset",
    )


def test_token_ids_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "tokens-00000.bin").touch()
    assert problems(str(tmp_path)) == (
        f"INPUT is text, and '{tmp_path}' names {tmp_path}, which is of token ids; name the text "
        "that they were made from, and only that",
    )


def test_a_glob_of_text_that_matches_token_ids_too_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "tokens-00000.bin").touch()
    (tmp_path / "a.txt").write_text("text")
    (told,) = problems(f"{tmp_path}/*")
    assert f"'{tmp_path}/*' names {tmp_path}/tokens, which is of token ids" in told

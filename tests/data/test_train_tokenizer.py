"""`megaspeed train-tokenizer` writes a folder that tokenizing, training and transformers read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megaspeed.cli import main
from megaspeed.data.documents import read_documents
from megaspeed.data.sources import SourceFile
from megaspeed.data.tokenizer import load_tokenizer, train_tokenizer
from megaspeed.files.new_folder import new_folder
from tests.data.words import documents

TEXT = "<|endoftext|>\n".join(documents(20_000))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def train(text: Path, output: Path, vocab_size: int = 400) -> int:
    options = ["--vocab-size", str(vocab_size), "--output", str(output)]
    return main(["train-tokenizer", str(text), *options])


def test_transformers_gives_the_same_ids(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tokenizer"
    assert train(text, folder) == 0
    assert f"{folder}: 400 entries, end of text 0" in capsys.readouterr()[0]
    ours, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    sample = "some words, and Grüße 漢\n"
    assert theirs(sample, add_special_tokens=False).input_ids == ours.encode([sample])[0]
    assert theirs.eos_token_id == ours.end_of_text == 0
    assert theirs.decode(ours.encode([sample])[0]) == sample


def test_it_is_the_tokenizer_that_training_would_make(text: Path, tmp_path: Path) -> None:
    assert train(text, tmp_path / "tokenizer") == 0
    made = train_tokenizer(read_documents([SourceFile(text.name, text)]), 400)
    assert load_tokenizer(str(tmp_path / "tokenizer")).fingerprint == made.fingerprint


def test_a_folder_in_use_is_refused(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(text, tmp_path) == 2
    assert f"{tmp_path} is there already; name a folder that is not" in capsys.readouterr()[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


@pytest.mark.parametrize("place", ["text.txt", "text.txt/tokenizer"])
def test_a_place_that_cannot_be_a_folder_is_told_before_training(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    assert train(text, tmp_path / place) == 2
    assert capsys.readouterr().err == (
        f"--output {tmp_path / place} cannot be a folder, because {text} is a file; name another "
        "folder\n"
    )


def test_a_folder_that_another_process_fills_is_refused_before_training(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with new_folder(tmp_path / "tokenizer") as writing:
        assert train(text, tmp_path / "tokenizer") == 2
        told = capsys.readouterr().err
        assert "another process is filling it" in told and "training on" not in told
        assert [path.name for path in writing.iterdir()] == [".unfinished"]


def test_the_figures_are_written_as_json(text: Path, tmp_path: Path) -> None:
    folder, figures = tmp_path / "tokenizer", tmp_path / "figures.json"
    options = ["--vocab-size", "400", "--output", str(folder), "--json", str(figures)]
    assert main(["train-tokenizer", str(text), *options]) == 0
    assert json.loads(figures.read_text()) == {
        "output": str(folder),
        "documents": TEXT.count("<|endoftext|>") + 1,
        "vocab_size": 400,
        "end_of_text": 0,
        "tokenizer_fingerprint": load_tokenizer(str(folder)).fingerprint,
    }


HUGE = """
import resource, sys
from megaspeed.cli import main

resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
sys.exit(main(sys.argv[1:]))
"""


def test_a_vocabulary_larger_than_any_text_takes_no_memory_for_what_the_text_does_not_fill(
    text: Path, tmp_path: Path
) -> None:
    assert train(text, tmp_path / "large", vocab_size=100_000) == 0
    options = ["--vocab-size", str(10**9), "--output", str(tmp_path / "huge")]
    command = [sys.executable, "-c", HUGE, "train-tokenizer", str(text), *options]
    assert subprocess.run(command, check=False).returncode == 0
    made = [load_tokenizer(str(tmp_path / name)) for name in ("large", "huge")]
    assert made[0].fingerprint == made[1].fingerprint and made[0].vocab_size < 100_000


def test_a_vocabulary_without_room_for_the_bytes_is_refused(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(text, tmp_path / "tokenizer", vocab_size=256) == 2
    assert "--vocab-size is 256" in capsys.readouterr()[1]
    assert not (tmp_path / "tokenizer").exists()

"""Files that are missing are told beside keys that are wrong, not after them."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from megaspeed.data import selection
from megaspeed.data.documents import read_documents
from megaspeed.data.selection import find_problems_in_file
from megaspeed.data.sources import SourceFile
from megaspeed.data.tokenizer import train_tokenizer

MISSING = "/no/such/place/text.txt"
SHAPE = {"preset": "gpt2-nano"}


def problems(folder: Path, *overrides: str, **sections: Any) -> list[str]:
    file = folder / "run.json"
    values = {"model": SHAPE, "data": {"sequence_length": 16}, "training": {"steps": 1}}
    file.write_text(json.dumps({**values, **sections}))
    return find_problems_in_file(file, overrides)


def test_the_default_corpus_is_no_problem(tmp_path: Path) -> None:
    assert problems(tmp_path) == []


@pytest.mark.parametrize(
    "wrong_elsewhere",
    [{}, {"model": {"preset": "gpt3"}}, {"model": 5}, {"training": {"stepps": 1}}, {"zzz": 1}],
    ids=str,
)
def test_missing_text_is_found_whatever_else_is_wrong(
    tmp_path: Path, wrong_elsewhere: dict[str, Any]
) -> None:
    data = {"sequence_length": 16, "train": [MISSING]}
    (problem,) = problems(tmp_path, data=data, **wrong_elsewhere)
    assert problem.startswith("data.train: ") and MISSING in problem


def test_overrides_are_looked_at(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, f'data.validation=["{MISSING}"]')
    assert problem.startswith("data.validation: ")


@pytest.mark.parametrize("data", [{"sequence_length": "16", "train": [MISSING]}, 7, None], ids=str)
def test_a_data_section_that_cannot_be_understood_is_left_to_the_check_of_the_keys(
    tmp_path: Path, data: Any
) -> None:
    assert problems(tmp_path, data=data) == []


def test_a_file_that_is_no_json_is_left_to_the_check_of_the_keys(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text('{"data": ')
    assert find_problems_in_file(file) == []


def test_a_vocabulary_that_no_tokenizer_can_be_trained_for_is_told_with_the_others(
    tmp_path: Path,
) -> None:
    data = {"sequence_length": 16, "train": [MISSING]}
    text, vocabulary = problems(tmp_path, "model.vocab_size=256", data=data)
    assert text.startswith("data.train: ")
    assert "at least 257 entries" in vocabulary and "model.vocab_size is 256" in vocabulary
    assert problems(tmp_path, "model.vocab_size=257") == []


def test_a_tokenizer_is_compared_with_the_model_of_from_hf(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    text = read_documents([SourceFile("a.txt", tmp_path / "a.txt")])
    train_tokenizer(text, 257).save(tmp_path / "tokenizer")
    shape = {"model_type": "gpt2", "vocab_size": 99, "n_embd": 8, "n_layer": 1, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "n_positions": 16}))
    data = {"sequence_length": 16, "tokenizer": str(tmp_path / "tokenizer")}
    (problem,) = problems(tmp_path, model={"from_hf": str(tmp_path)}, data=data)
    assert "has 257 entries while model.vocab_size is 99" in problem
    assert problems(tmp_path, model={"from_hf": "/no/such/folder"}, data=data) == []


@pytest.mark.parametrize("pattern", ["**", "**/*.nothing"])
def test_a_glob_that_would_never_end_is_given_up_with_a_word(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    pattern: str,
) -> None:
    """Each of ten links leads back up, so the tree has 10^40 folders for a glob."""
    for number in range(10):
        (tmp_path / f"up{number}").symlink_to(tmp_path)
    monkeypatch.setattr(selection, "_LONGEST_SECONDS", 0.2)
    start = time.monotonic()
    assert problems(tmp_path, f'data.train=["{tmp_path}/{pattern}"]') == []
    assert time.monotonic() - start < 5
    (message,) = caplog.messages
    assert message.startswith("data: the files were examined for 0.2 s, and not completely")

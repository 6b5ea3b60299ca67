"""Problems with the data of a configuration are found even if other sections have mistakes."""

import errno
import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from megaspeed import checked_run
from megaspeed.checked_run import find_data_problems
from megaspeed.config.document import read_document
from megaspeed.config.loading import check_document
from megaspeed.data.documents import read_documents
from megaspeed.data.sources import SourceFile
from megaspeed.data.tokenizer import train_tokenizer

MISSING = "/no/such/place/text.txt"
SHAPE = {"preset": "gpt2-nano"}


def problems_in_file(folder: Path, *overrides: str, **sections: Any) -> list[str]:
    file = folder / "run.json"
    values = {"model": SHAPE, "data": {"sequence_length": 16}, "training": {"steps": 1}}
    file.write_text(json.dumps({**values, **sections}))
    return find_data_problems(check_document(read_document(file, overrides)).correct)


def test_the_default_corpus_is_no_problem(tmp_path: Path) -> None:
    assert problems_in_file(tmp_path) == []


@pytest.mark.parametrize(
    "wrong_elsewhere",
    [{}, {"model": {"preset": "gpt3"}}, {"model": 5}, {"training": {"stepps": 1}}, {"zzz": 1}],
    ids=str,
)
def test_missing_text_is_found_even_if_other_keys_are_wrong(
    tmp_path: Path, wrong_elsewhere: dict[str, Any]
) -> None:
    data = {"sequence_length": 16, "train": [MISSING]}
    (problem,) = problems_in_file(tmp_path, data=data, **wrong_elsewhere)
    assert problem.startswith("data.train: ") and MISSING in problem


def test_data_that_this_user_may_not_read_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search runs in a thread. An error ended only this thread, and no problem was reported."""

    def find_problems(*_: Any) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", "ids.bin")

    monkeypatch.setattr(checked_run, "find_problems", find_problems)
    (problem,) = problems_in_file(tmp_path)
    assert problem.startswith("data: ids.bin cannot be read: Permission denied")


def test_overrides_are_checked(tmp_path: Path) -> None:
    (problem,) = problems_in_file(tmp_path, f'data.validation=["{MISSING}"]')
    assert problem.startswith("data.validation: ")


@pytest.mark.parametrize("data", [{"sequence_length": "16", "train": [MISSING]}, 7, None], ids=str)
def test_an_invalid_data_section_is_left_to_the_check_of_the_keys(
    tmp_path: Path, data: Any
) -> None:
    assert problems_in_file(tmp_path, data=data) == []


def test_a_file_that_is_not_json_is_left_to_the_check_of_the_keys(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text('{"data": ')
    assert find_data_problems(check_document(read_document(file)).correct) == []


def test_a_vocabulary_too_small_for_any_tokenizer_is_reported_with_the_others(
    tmp_path: Path,
) -> None:
    data = {"sequence_length": 16, "train": [MISSING]}
    text, vocabulary = problems_in_file(tmp_path, "model.vocab_size=256", data=data)
    assert text.startswith("data.train: ")
    assert "at least 257 entries" in vocabulary and "model.vocab_size is 256" in vocabulary
    assert problems_in_file(tmp_path, "model.vocab_size=257") == []


def test_a_tokenizer_is_compared_with_the_model_of_from_hf(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    text = read_documents([SourceFile("a.txt", tmp_path / "a.txt")])
    train_tokenizer(text, 257).save(tmp_path / "tokenizer")
    shape = {"model_type": "gpt2", "vocab_size": 99, "n_embd": 8, "n_layer": 1, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "n_positions": 16}))
    data = {"sequence_length": 16, "tokenizer": str(tmp_path / "tokenizer")}
    (problem,) = problems_in_file(tmp_path, model={"from_hf": str(tmp_path)}, data=data)
    assert "has 257 entries while model.vocab_size is 99" in problem
    assert problems_in_file(tmp_path, model={"from_hf": "/no/such/folder"}, data=data) == []


def test_a_prompt_that_is_too_long_is_found_without_the_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    train_tokenizer(read_documents([SourceFile("a.txt", tmp_path / "a.txt")]), 257).save(tmp_path)
    data = {"sequence_length": 16, "tokenizer": str(tmp_path)}
    sampled = {"steps": 1, "sample_prompts": ["abc", "abc"], "sample_tokens": 13}
    (first, second) = problems_in_file(tmp_path, data=data, training=sampled)
    assert first.startswith("training.sample_prompts[0] has 4 tokens")
    assert second.startswith("training.sample_prompts[1] has 4 tokens")
    data["tokenizer"] = "/no/such/folder"
    (problem,) = problems_in_file(tmp_path, data=data, training=sampled)
    assert problem.startswith("data.tokenizer is a path")


def test_a_glob_that_takes_long_is_stopped_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tree = sysconfig.get_path("stdlib")
    monkeypatch.setattr(checked_run, "_LONGEST_SECONDS", 1e-4)
    assert problems_in_file(tmp_path, f'data.train=["{tree}/**/*.nothing"]') == []
    (message,) = caplog.messages
    assert message.startswith("data: after 0.0001 s, some files are not examined yet")

"""The files and the tokenizer that a configuration names, and all problems with them at once."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from megaspeed.config.run import DataConfig
from megaspeed.data.documents import read_documents
from megaspeed.data.errors import DataError
from megaspeed.data.selection import Selection, find_problems, select_files
from megaspeed.data.sources import SourceFile
from megaspeed.data.tokenizer import TextTokenizer, train_tokenizer
from tests.data.token_folders import write_nanogpt, write_token_folder
from tests.data.written_formats import json_lines, saved_splits, write_table


def config(*train: object, **fields: Any) -> DataConfig:
    return DataConfig.model_validate({"train": train, "sequence_length": 8, **fields})


def selected(*train: object, **fields: Any) -> Selection:
    return select_files(config(*train, **fields))


def problems(*train: object, vocab_size: int = 512, **fields: Any) -> tuple[str, ...]:
    return tuple(find_problems(config(*train, **fields), vocab_size))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text("<|endoftext|>".join(f"words of document {i} " * 9 for i in range(20)))
    return path


def tokenizer_of(text: Path, vocab_size: int) -> TextTokenizer:
    return train_tokenizer(read_documents([SourceFile(text.name, text)]), vocab_size)


@pytest.fixture
def tokens(tmp_path: Path, text: Path) -> Path:
    return write_token_folder(tmp_path / "tokens", text, tokenizer_of(text, 280))


@pytest.fixture
def other_tokens(tmp_path: Path, text: Path) -> Path:
    return write_token_folder(tmp_path / "other", text, tokenizer_of(text, 270))


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    return write_nanogpt(tmp_path / "train.bin", list(range(100)))


def test_without_weights_all_sources_are_one_share(
    tmp_path: Path, text: Path, tokens: Path
) -> None:
    (tmp_path / "b.jsonl").write_bytes(json_lines(["b"]))
    (share,) = selected(str(text), str(tokens), f"{tmp_path}/*.jsonl").train
    assert [file.name for file in share.files] == ["a.txt", "b.jsonl"]
    assert share.tokens == (tokens,)
    assert (share.weight, share.name) == (1.0, f"{text}, {tokens}, {tmp_path}/*.jsonl")


def test_with_weights_every_source_is_a_share(text: Path, tokens: Path) -> None:
    given = [{"path": str(text), "weight": 3}, {"path": str(tokens), "weight": 0.5}]
    first, second = selected(*given).train
    assert ([file.path for file in first.files], first.tokens) == ([text], ())
    assert (second.files, second.tokens) == ((), (tokens,))
    assert [(share.weight, share.name) for share in (first, second)] == [
        (3.0, str(text)),
        (0.5, str(tokens)),
    ]


def test_the_tokenizer_of_token_folders_is_the_corpus_own(text: Path, tokens: Path) -> None:
    assert selected(str(text)).tokenizer is None
    assert selected(str(tokens)).tokenizer == str(tokens)
    assert selected(str(text), validation=[str(tokens)]).tokenizer == str(tokens)
    assert selected(str(text), str(tokens), tokenizer=str(tokens)).tokenizer == str(tokens)


def test_token_folders_of_two_tokenizers_are_refused(tokens: Path, other_tokens: Path) -> None:
    (reported,) = problems(str(tokens), str(other_tokens))
    assert reported.startswith(
        "all tokens must be made with one tokenizer: the fingerprint of the one"
    )
    assert (
        f" in {tokens} is " in reported
        and f"the tokens in {other_tokens} were made with " in reported
    )
    assert "in data.tokenizer, or make them again with the other" in reported


def test_a_token_folder_whose_tokenizer_was_replaced_is_refused(
    tokens: Path, other_tokens: Path
) -> None:
    shutil.copy(other_tokens / "tokenizer.json", tokens)
    (reported,) = problems(str(tokens))
    assert f" in {tokens} is " in reported and f"the tokens in {tokens} were made with " in reported


def test_a_named_tokenizer_must_be_that_of_the_token_folders(
    tokens: Path, other_tokens: Path
) -> None:
    assert problems(str(tokens), tokenizer=str(tokens)) == ()
    (reported,) = problems(str(tokens), tokenizer=str(other_tokens))
    assert (
        f" in {other_tokens} is " in reported
        and f"the tokens in {tokens} were made with " in reported
    )
    assert "name the tokenizer of these tokens in data.tokenizer" in reported


def test_foreign_tokens_need_a_tokenizer_only_beside_text(
    text: Path, tokens: Path, foreign: Path
) -> None:
    assert selected(str(foreign)).tokenizer is None
    assert problems(str(foreign)) == ()
    (reported,) = problems(str(text), str(foreign))
    assert f'is "train" and {foreign} does not state the tokenizer of its ids' in reported
    assert reported.endswith("name that tokenizer in data.tokenizer")
    assert problems(str(text), str(foreign), tokenizer=str(tokens)) == ()


def test_the_tokenizer_of_a_token_folder_must_fit_the_model(tokens: Path) -> None:
    (reported,) = problems(str(tokens), vocab_size=200)
    assert f"'{tokens}' has 280 entries while model.vocab_size is 200" in reported


def test_an_unfinished_tokenization_is_reported_by_the_check(tokens: Path) -> None:
    (tokens / "index.json").unlink()
    (reported,) = problems(str(tokens))
    assert f"{tokens} has no index.json: its tokenization did not finish" in reported


def test_tokens_that_are_trained_on_are_not_validated_on(tmp_path: Path, tokens: Path) -> None:
    (tmp_path / "link").symlink_to(tokens)
    for same in (tokens, tmp_path / "link"):
        (reported,) = problems(str(tokens), validation=[str(same)])
        assert "must not be trained on, but 1 of 1 files of data.validation are also in" in reported
    (reported,) = problems(str(tokens), str(tmp_path / "link"))
    assert f"tokens may be listed only once, but {tokens} is matched 2 times" in reported


def test_two_splits_of_a_saved_dataset_are_two_texts(tmp_path: Path) -> None:
    saved_splits(tmp_path / "splits", ["a", "b"])
    path = str(tmp_path / "splits")
    assert problems({"path": path}, validation=[{"path": path, "split": "test"}]) == ()
    (reported,) = problems({"path": path}, validation=[{"path": path}])
    assert "must not be trained on" in reported
    (reported,) = problems({"path": path, "split": "tset"})
    assert reported.startswith("data.train: a dataset's split must be one of its own, but ")


def test_a_wrong_field_shows_in_the_first_record_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(["a"], field="content"))
    write_table(tmp_path / "b.parquet", ["b"], column="content")
    found = problems(f"{tmp_path}/a.jsonl", f"{tmp_path}/b.parquet")
    assert [reported.split(": ")[0] for reported in found] == [
        f"{tmp_path}/a.jsonl, line 1 (byte 0)",
        f"{tmp_path}/b.parquet, its columns",
    ]
    assert all("name the right one as text_field" in reported for reported in found)
    sources = [
        {"path": f"{tmp_path}/{name}", "text_field": "content"} for name in ("*.jsonl", "*.p*")
    ]
    assert problems(*sources) == ()


def test_a_file_of_another_field_is_another_text(tmp_path: Path) -> None:
    """The states of the files are equal, so the key of the cache needs the format, too."""
    (tmp_path / "a.jsonl").write_bytes(json_lines(["a"]))
    one, other = (
        selected({"path": f"{tmp_path}/a.jsonl", "text_field": field}) for field in ("text", "id")
    )
    assert one.states == other.states
    assert one.train != other.train


def test_problems_of_sources_and_tokenizer_are_reported_together(tmp_path: Path) -> None:
    found = problems(f"{tmp_path}/none.jsonl", tokenizer=f"{tmp_path}/no-tokenizer")
    assert [reported.split()[0] for reported in found] == ["data.train:", "data.tokenizer"]
    with pytest.raises(DataError):
        selected(f"{tmp_path}/none.jsonl")


def test_a_token_folder_without_its_tokenizer_names_the_missing_file(tokens: Path) -> None:
    (tokens / "tokenizer.json").unlink()
    (problem,) = problems(str(tokens))
    assert f"{tokens}/tokenizer.json is missing; copy it again, or name the tokenizer" in problem

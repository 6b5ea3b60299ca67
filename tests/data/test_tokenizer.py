"""A tokenizer is trained to the requested size, deterministically, or read from disk."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoTokenizer

from megaspeed.cli import main
from megaspeed.config.run import Source
from megaspeed.data import tokenizer as tokenizer_module
from megaspeed.data.documents import Document, read_documents
from megaspeed.data.errors import DataError
from megaspeed.data.sources import SourceFile
from megaspeed.data.tokenizer import (
    END_OF_TEXT,
    TextTokenizer,
    check_vocabulary,
    load_tokenizer,
    tokenizer_files,
    train_tokenizer,
)
from megaspeed.files.durable import new_folder
from tests.data import words
from tests.support.text import list_files

LIBRARY = Source(path=f"{sysconfig.get_path('stdlib')}/json/*.py")


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return read_documents(list_files([LIBRARY], "data.train"))


@pytest.fixture(scope="module")
def trained(documents: list[Document]) -> TextTokenizer:
    return train_tokenizer(documents, 600)


def test_a_trained_vocabulary_has_the_size_of_the_models(trained: TextTokenizer) -> None:
    assert trained.vocab_size == trained.tokenizer.get_vocab_size() == 600
    assert trained.tokenizer.token_to_id(END_OF_TEXT) == trained.end_of_text


def test_a_corpus_too_small_for_the_vocabulary_gives_a_smaller_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abab")
    small = train_tokenizer(read_documents([SourceFile("a.txt", tmp_path / "a.txt")]), 50_000)
    assert 257 < small.vocab_size < 270


def test_training_is_deterministic_and_does_not_see_the_order_of_documents(
    documents: list[Document], trained: TextTokenizer
) -> None:
    assert train_tokenizer(documents[::-1], 600).to_json() == trained.to_json()


def test_any_text_comes_back_from_its_ids(trained: TextTokenizer) -> None:
    texts = ["", " two  spaces\r\n\ttab", "Grüße 漢字 🙂 \u0000", f"a {END_OF_TEXT} in the text"]
    for text, ids in zip(texts, trained.encode(texts), strict=True):
        assert trained.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_text_that_spells_the_end_of_text_token_does_not_become_one(trained: TextTokenizer) -> None:
    (ids,) = trained.encode([f"before{END_OF_TEXT}after"])
    assert trained.end_of_text not in ids


def test_a_vocabulary_without_room_for_the_bytes_is_refused(documents: list[Document]) -> None:
    with pytest.raises(DataError, match=r"at least 257 entries.*model\.vocab_size is 256"):
        train_tokenizer(documents, 256)


def test_a_tokenizer_larger_than_the_model_names_both_sizes() -> None:
    check_vocabulary(600, "my/tokenizer", 600)
    with pytest.raises(DataError, match=r"'my/tokenizer' has 601 entries.*vocab_size is 600.*601"):
        check_vocabulary(601, "my/tokenizer", 600)


@pytest.mark.parametrize("stated", [{}, {"eos_token": "ing", "model_max_length": 8}])
def test_a_saved_folder_is_the_same_tokenizer_for_us_and_for_transformers(
    tmp_path: Path, trained: TextTokenizer, stated: dict[str, object]
) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "tokenizer.json").write_bytes(trained.to_json())
    (tmp_path / "given" / "tokenizer_config.json").write_text(json.dumps(stated))
    given = load_tokenizer(str(tmp_path / "given"))
    given.save(tmp_path / "saved")
    again = load_tokenizer(str(tmp_path / "saved"))
    assert again.to_json() == given.to_json() and again.config == given.config
    assert again.end_of_text == given.end_of_text
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert theirs.eos_token_id == given.end_of_text
    assert theirs.model_max_length == stated.get("model_max_length", theirs.model_max_length)
    texts = ["def loads(s):\n    return 1", " two  spaces, Grüße 漢 🙂", "ing"]
    assert theirs(texts, verbose=False)["input_ids"] == given.encode(texts)
    for text in texts:
        assert theirs.decode(theirs(text, verbose=False)["input_ids"]) == text


def test_an_end_of_text_token_from_another_file_is_named_when_it_is_saved(
    tmp_path: Path, trained: TextTokenizer
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(trained.to_json())
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "ing"}}')
    given = load_tokenizer(str(tmp_path))
    given.save(tmp_path / "saved")
    assert given.end_of_text == trained.tokenizer.token_to_id("ing")
    assert load_tokenizer(str(tmp_path / "saved")).end_of_text == given.end_of_text


def test_a_tokenizer_sees_a_sample_of_a_large_corpus_whatever_files_it_lies_in(
    tmp_path: Path, documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sample depends on the content of documents, not on the files that they are in."""
    monkeypatch.setattr(tokenizer_module, "TRAINING_SAMPLE_BYTES", 30_000)
    together = tmp_path / "all.txt"
    texts = [document.file.path.read_text() for document in documents]
    together.write_text("<|endoftext|>".join(reversed(texts)))
    in_one = read_documents([SourceFile("all.txt", together)])
    assert sum(document.size_bytes for document in documents) > 40_000
    sampled = train_tokenizer(documents, 400)
    assert train_tokenizer(in_one, 400).to_json() == sampled.to_json()
    monkeypatch.undo()
    assert train_tokenizer(documents, 400).to_json() != sampled.to_json()


def test_a_file_and_its_folder_are_the_same_tokenizer(
    tmp_path: Path, trained: TextTokenizer
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(trained.to_json())
    for source in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(str(source))
        assert loaded.fingerprint == trained.fingerprint
        assert loaded.end_of_text == trained.end_of_text


def test_limits_stored_in_a_tokenizer_file_do_not_cut_documents(
    tmp_path: Path, trained: TextTokenizer
) -> None:
    limited = json.loads(trained.to_json())
    limited["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(limited))
    text = "a document of more than four tokens"
    assert load_tokenizer(str(tmp_path)).encode([text]) == trained.encode([text])


def test_the_dropout_that_a_tokenizer_was_trained_with_does_not_change_its_ids(
    tmp_path: Path, trained: TextTokenizer
) -> None:
    """Otherwise the ids of a text would differ each time, under one fingerprint."""
    dropping = json.loads(trained.to_json())
    dropping["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(dropping))
    loaded = load_tokenizer(str(tmp_path))
    text = "a document of more than a few merges, each of which might be left out by chance"
    assert all(loaded.encode([text]) == trained.encode([text]) for _ in range(5))
    assert loaded.fingerprint == trained.fingerprint


@pytest.mark.parametrize("eos", ["ing", {"content": "ing", "special": True}])
def test_the_configured_end_of_text_token_is_preferred(
    tmp_path: Path, trained: TextTokenizer, eos: object
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(trained.to_json())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert load_tokenizer(str(tmp_path)).end_of_text == trained.tokenizer.token_to_id("ing")
    assert tokenizer_files(str(tmp_path)) == sorted(tmp_path.iterdir())
    assert tokenizer_files(str(tmp_path / "tokenizer.json")) == sorted(tmp_path.iterdir())


def test_a_configured_end_of_text_token_that_does_not_exist_is_not_replaced(
    tmp_path: Path, trained: TextTokenizer
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(trained.to_json())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(DataError, match=r"has none of <end>; name its eos_token"):
        load_tokenizer(str(tmp_path))


def test_a_file_that_is_not_a_tokenizer_is_refused_with_its_mend(
    tmp_path: Path, trained: TextTokenizer
) -> None:
    with pytest.raises(DataError, match=r"there is no .*/missing; correct the path"):
        load_tokenizer(str(tmp_path / "missing"))
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(DataError, match=r"must be a tokenizer\.json or a folder with one.*save_"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"cannot be read as one.*save_pretrained"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text(Tokenizer(BPE()).to_str())
    with pytest.raises(DataError, match=r"must have entries, but .* has none; download it again"):
        load_tokenizer(str(tmp_path))
    nameless = trained.to_json().replace(END_OF_TEXT.encode(), b"<|nothing|>")
    (tmp_path / "tokenizer.json").write_bytes(nameless)
    with pytest.raises(DataError, match=r"must end with a token of its own.*eos_token"):
        load_tokenizer(str(tmp_path))


TEXT = "<|endoftext|>\n".join(words.documents(20_000))


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
    assert f"{tmp_path} exists already; name a folder that does not exist" in capsys.readouterr()[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


@pytest.mark.parametrize("place", ["text.txt", "text.txt/tokenizer"])
def test_a_path_that_cannot_be_a_folder_is_reported_before_training(
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
        reported = capsys.readouterr().err
        assert "another process is filling it" in reported and "training on" not in reported
        assert list(writing.iterdir()) == []


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


def test_the_command_refuses_a_vocabulary_without_room_for_the_bytes(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(text, tmp_path / "tokenizer", vocab_size=256) == 2
    assert "--vocab-size is 256" in capsys.readouterr()[1]
    assert not (tmp_path / "tokenizer").exists()

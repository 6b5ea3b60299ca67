"""A token folder has the ids of a plain loop, for every format and size of batches."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from tokenizers import Tokenizer

from megaspeed.cli import main
from megaspeed.config.run import Source
from megaspeed.data import tokenizer as tokenizer_module
from megaspeed.data.cache import Cache
from megaspeed.data.documents import corpus_fingerprint, read_documents, read_pieces
from megaspeed.data.errors import DataError
from megaspeed.data.sources import SourceFile
from megaspeed.data.token_file import TokenFile
from megaspeed.data.token_sources import (
    TokenFolderIndex,
    open_token_folder,
    read_index,
    token_paths,
)
from megaspeed.data.tokenize import TokenizationProgress, tokenize
from megaspeed.data.tokenizer import TextTokenizer, encode
from tests.data.watching import Record, contents
from tests.data.words import WORDS, documents
from tests.data.written_formats import FORMATS
from tests.support.text import list_files

TEXTS = list(documents(40_000))


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "BATCH_CHARACTERS", 2000)


@pytest.fixture
def files(tmp_path: Path) -> list[SourceFile]:
    text = tmp_path / "text"
    text.mkdir()
    for number, document in enumerate(TEXTS):
        (text / f"{number:03}.txt").write_text(document, encoding="utf-8")
    return list_files([Source(path=f"{text}/*.txt")], "INPUT")


def tokenized(
    files: list[SourceFile], tokenizer: TextTokenizer, folder: Path, **how: Any
) -> TokenFolderIndex:
    return tokenize(files, tokenizer, folder, Record(), **how)


def opened(folder: Path) -> tuple[TokenFile, ...]:
    return open_token_folder(folder, Cache(folder.parent / "cache"))


def test_the_ids_are_those_of_a_plain_loop_over_the_tokenizer(
    tmp_path: Path, tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command reads one file of every format."""
    kinds = ("txt", "txt.gz", "jsonl", "jsonl.gz", "jsonl.zst", "parquet", "saved")
    sources = [FORMATS[kind](tmp_path, TEXTS) for kind in kinds]
    options = ["--tokenizer", str(tokenizer_folder), "--output", str(tmp_path / "out")]
    figures = tmp_path / "figures.json"
    assert main(["tokenize", *map(str, sources), *options, "--json", str(figures)]) == 0

    plain = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    end = plain.token_to_id("<|endoftext|>")
    assert end is not None
    ids: list[int] = []
    for text in TEXTS * len(sources):
        ids += [*plain.encode(text).ids, end]
    (file,) = opened(tmp_path / "out")
    assert file.map().tolist() == ids
    index = read_index(tmp_path / "out")
    assert (index.tokens, index.documents) == (len(ids), len(TEXTS) * len(sources))
    assert (index.end_of_text, index.largest_id) == (end, max(ids))
    assert (
        f"{index.documents:,} documents, {len(ids):,} tokens in 1 shards" in capsys.readouterr()[0]
    )
    written = json.loads(figures.read_text())
    assert (written["tokens"], written["skipped"]) == (len(ids), 0)
    assert set(contents(tmp_path / "out")) == {
        "index.json",
        "tokens-00000.bin",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_batches_of_any_size_write_the_same_bytes(
    tmp_path: Path,
    files: list[SourceFile],
    tokenizer: TextTokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = tokenized(files, tokenizer, tmp_path / "1", shard_tokens=1000)
    monkeypatch.setattr(tokenizer_module, "BATCH_CHARACTERS", 30_000)
    tokenized(files, tokenizer, tmp_path / "3", shard_tokens=1000)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")
    assert len(alone.shards) > 2
    for file in opened(tmp_path / "1"):
        assert file.map()[-1] == tokenizer.end_of_text


def test_the_folder_is_the_corpus_that_training_on_the_text_makes(
    tmp_path: Path, files: list[SourceFile], tokenizer: TextTokenizer
) -> None:
    """Same ids and same fingerprint, so sample i is the same."""
    tokenized(files, tokenizer, tmp_path / "out")
    corpus = read_documents(files)
    (file,) = opened(tmp_path / "out")
    directly = [packed.ids for packed in encode(read_pieces(corpus), tokenizer)]
    np.testing.assert_array_equal(file.map(), np.concatenate(directly))
    assert file.index.corpus_fingerprint == corpus_fingerprint(corpus)
    assert file.index.tokenizer_fingerprint == tokenizer.fingerprint


def test_a_finished_folder_is_not_replaced(
    tmp_path: Path, files: list[SourceFile], tokenizer: TextTokenizer
) -> None:
    out = tmp_path / "out"
    tokenized(files, tokenizer, out, shard_tokens=1000)
    before = contents(out)
    with pytest.raises(DataError, match=r"out is finished .*, or remove it"):
        tokenized(files, tokenizer, out)
    assert contents(out) == before


def test_a_folder_with_other_things_in_it_is_left_alone(
    tmp_path: Path, files: list[SourceFile], tokenizer_folder: Path, tokenizer: TextTokenizer
) -> None:
    before = contents(tokenizer_folder)
    with pytest.raises(DataError, match=r"new or empty folder.*the first tokenizer\.json"):
        tokenized(files, tokenizer, tokenizer_folder)
    assert contents(tokenizer_folder) == before


def test_two_processes_do_not_write_to_one_folder(
    tmp_path: Path, files: list[SourceFile], tokenizer: TextTokenizer
) -> None:
    with FileLock(tmp_path / ".lock"), pytest.raises(DataError, match="no other process writes to"):
        tokenized(files, tokenizer, tmp_path)


@pytest.mark.parametrize("name", ["a.txt", "a.txt/out"])
def test_a_path_that_cannot_be_a_folder_is_reported(
    tmp_path: Path, files: list[SourceFile], tokenizer: TextTokenizer, name: str
) -> None:
    (tmp_path / "a.txt").write_text("kept")
    with pytest.raises(DataError, match=r"cannot be locked .*; name another"):
        tokenized(files, tokenizer, tmp_path / name)
    assert (tmp_path / "a.txt").read_text() == "kept"


def test_empty_text_is_not_a_corpus(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(DataError, match=r"1 files, starting with .*empty\.txt, have 0 bytes"):
        tokenized([SourceFile("empty.txt", empty)], tokenizer, tmp_path / "out")


def test_a_folder_without_a_complete_shard_states_how_to_continue(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    (tmp_path / "bad.jsonl").write_text("no JSON")
    out = tmp_path / "out"
    with pytest.raises(DataError, match="cannot be read"):
        tokenized(list_files([Source(path=f"{tmp_path}/*.jsonl")], "INPUT"), tokenizer, out)
    assert not list(out.glob("tokens-*")) and token_paths([out])
    with pytest.raises(DataError, match="its tokenization did not finish; run the same"):
        opened(out)


def test_input_that_changes_during_the_work_is_refused(
    tmp_path: Path, files: list[SourceFile], tokenizer: TextTokenizer
) -> None:
    class Append(Record):
        def __call__(self, progress: TokenizationProgress) -> None:
            with files[-1].path.open("a") as stream:
                stream.write("more")

    with pytest.raises(DataError, match=r"must not change while it is read, but .* did"):
        tokenize(files, tokenizer, tmp_path / "out", Append())
    assert not (tmp_path / "out" / "index.json").exists()


def write_documents(path: Path, *sizes: int) -> list[SourceFile]:
    """Documents with these numbers of tokens, including the end-of-text token."""
    texts = [" ".join(WORDS[0] for _ in range(size - 1)) for size in sizes]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return list_files([Source(path=str(path))], "INPUT")


@pytest.mark.parametrize("batch_characters", [30, 100_000])
def test_a_shard_ends_with_the_document_that_fills_it(
    tmp_path: Path,
    tokenizer: TextTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    batch_characters: int,
) -> None:
    """Shards of 10 tokens, however the ids arrive. No document is cut; the last shard is short."""
    monkeypatch.setattr(tokenizer_module, "BATCH_CHARACTERS", batch_characters)
    files = write_documents(tmp_path / "a.jsonl", 4, 5, 2, 10, 36, 3)
    one_word = len(tokenizer.encode([WORDS[0]])[0]), len(tokenizer.encode([f" {WORDS[0]}"])[0])
    assert one_word == (1, 1)
    index = tokenized(files, tokenizer, tmp_path / "out", shard_tokens=10)
    assert [shard.tokens for shard in index.shards] == [11, 10, 36, 3]
    assert [shard.documents for shard in index.shards] == [3, 1, 1, 1]
    assert (index.tokens, index.documents) == (60, 6)
    for shard in index.shards:
        content = (tmp_path / "out" / shard.file).read_bytes()
        assert len(content) == 2 * shard.tokens
        assert shard.checksum == hashlib.sha256(content).hexdigest()


def test_no_shard_is_left_empty(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    files = write_documents(tmp_path / "a.jsonl", 10, 10)
    index = tokenized(files, tokenizer, tmp_path / "out", shard_tokens=10)
    assert [shard.file for shard in index.shards] == ["tokens-00000.bin", "tokens-00001.bin"]
    assert len(list((tmp_path / "out").glob("tokens-*"))) == 2

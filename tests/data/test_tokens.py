"""A token file holds every document and its end, and knows its largest id."""

from pathlib import Path

import numpy as np
import pytest

from megaspeed.data.cache import Cache
from megaspeed.data.documents import Document, corpus_fingerprint, read_documents
from megaspeed.data.encode import packed_ids, write_tokens
from megaspeed.data.errors import DataError
from megaspeed.data.pieces import PIECE_BYTES
from megaspeed.data.sources import SourceFile
from megaspeed.data.token_file import TokenFile
from megaspeed.data.tokenizer import TextTokenizer, train_tokenizer
from tests.data.numbered_corpus import write_numbered_tokens

TEXTS = ["first document, with words", "second\n", "third: Grüße 漢"]


@pytest.fixture
def documents(tmp_path: Path) -> list[Document]:
    for name, text in enumerate(TEXTS):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    files = [SourceFile(f"{name}.txt", tmp_path / f"{name}.txt") for name in range(len(TEXTS))]
    return read_documents(files)


@pytest.fixture
def tokenizer(documents: list[Document]) -> TextTokenizer:
    return train_tokenizer(documents, 280)


def test_documents_are_packed_with_an_end_of_text_token_after_each(
    tmp_path: Path, documents: list[Document], tokenizer: TextTokenizer
) -> None:
    cache = Cache(tmp_path / "cache")
    with cache.lock():
        file = write_tokens(cache, cache.root / "tokens" / "a.bin", documents, tokenizer)
    ids = file.map()
    first, second, third = tokenizer.encode(TEXTS)
    end = tokenizer.end_of_text
    assert ids.tolist() == [*first, end, *second, end, *third, end]
    assert ids.dtype == np.uint16
    assert file.index.tokens == len(ids)
    assert file.index.documents == 3
    assert file.index.largest_id == ids.max()
    assert file.index.vocab_size == tokenizer.vocab_size
    assert file.index.tokenizer_fingerprint == tokenizer.fingerprint
    assert file.index.corpus_fingerprint == corpus_fingerprint(documents)
    assert TokenFile.open(cache, file.path) == file


def test_a_document_of_many_pieces_ends_once(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    path = tmp_path / "long.txt"
    path.write_text("words and words " * (5 * PIECE_BYTES // 32))
    documents = read_documents([SourceFile("long.txt", path)])
    ids = np.concatenate(list(packed_ids(documents, tokenizer)))
    assert np.flatnonzero(ids == tokenizer.end_of_text).tolist() == [len(ids) - 1]
    assert tokenizer.tokenizer.decode(ids.tolist()[:-1]) == path.read_text()


def test_ids_above_65535_take_four_bytes(
    tmp_path: Path, documents: list[Document], tokenizer: TextTokenizer
) -> None:
    tokenizer.tokenizer.add_tokens([f"<unused {i}>" for i in range(70_000)])
    tokenizer.tokenizer.add_tokens(["words"])
    cache = Cache(tmp_path / "cache")
    wide = TextTokenizer(tokenizer.tokenizer, tokenizer.end_of_text)
    with cache.lock():
        file = write_tokens(cache, cache.root / "tokens" / "a.bin", documents, wide)
    largest = tokenizer.tokenizer.token_to_id("words")
    assert largest is not None and largest > 65_535
    assert file.map().dtype == np.uint32
    assert file.index.largest_id == largest
    assert largest in file.map().tolist()


def test_an_id_beyond_the_vocabulary_names_the_file_and_the_offset(tmp_path: Path) -> None:
    file = write_numbered_tokens(tmp_path, tokens=1000, name="numbers")  # the id at p is p
    file.check_vocabulary(1000)
    with pytest.raises(DataError) as caught:
        file.check_vocabulary(700)
    (problem,) = caught.value.problems
    assert f"{file.path} has id 700 at token 700 (byte 2800)" in problem
    assert "below model.vocab_size (700)" in problem
    assert "at least 1000" in problem

"""Pieces become ids in order, with one end for each document. The index describes the file."""

from pathlib import Path

import numpy as np
import pytest

from megaspeed.data.documents import read_documents, read_pieces
from megaspeed.data.pieces import PIECE_BYTES, Piece
from megaspeed.data.sources import SourceFile
from megaspeed.data.tokenizer import TextTokenizer, encode, train_tokenizer
from tests.data.numbered_corpus import write_numbered_tokens

TEXTS = ["first document, with words", "second\n", "third: Grüße 漢"]


def write_texts(folder: Path) -> list[SourceFile]:
    files = [SourceFile(f"{n}.txt", folder / f"{n}.txt") for n in range(len(TEXTS))]
    for file, text in zip(files, TEXTS, strict=True):
        file.path.write_text(text, encoding="utf-8")
    return files


@pytest.fixture
def tokenizer(tmp_path: Path) -> TextTokenizer:
    return train_tokenizer(read_documents(write_texts(tmp_path)), 280)


def test_a_document_of_many_pieces_ends_once(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    path = tmp_path / "long.txt"
    path.write_text("words and words " * (5 * PIECE_BYTES // 32))
    pieces = read_pieces(read_documents([SourceFile("long.txt", path)]))
    ids = np.concatenate([packed.ids for packed in encode(pieces, tokenizer)])
    assert np.flatnonzero(ids == tokenizer.end_of_text).tolist() == [len(ids) - 1]
    assert tokenizer.tokenizer.decode(ids.tolist()[:-1]) == path.read_text()


def test_ids_above_65535_take_four_bytes(tokenizer: TextTokenizer) -> None:
    tokenizer.tokenizer.add_tokens([f"<unused {i}>" for i in range(70_000)])
    tokenizer.tokenizer.add_tokens(["words"])
    wide = TextTokenizer(tokenizer.tokenizer, tokenizer.end_of_text)
    (packed,) = encode([Piece(text, ends_document=True) for text in TEXTS], wide)
    largest = tokenizer.tokenizer.token_to_id("words")
    assert largest is not None and largest > 65_535
    assert packed.ids.dtype == np.uint32
    assert largest in packed.ids.tolist()


def test_an_id_beyond_the_vocabulary_names_the_file_and_the_offset(tmp_path: Path) -> None:
    file = write_numbered_tokens(tmp_path, tokens=1000, name="numbers")  # the id at p is p
    assert file.large_id(1000) is None
    problem = file.large_id(700)
    assert problem is not None
    assert f"{file.path} has id 700 at token 700 (byte 2800)" in problem
    assert "below model.vocab_size (700)" in problem
    assert "at least 1000" in problem

"""Files are divided into documents, and documents into pieces, without a change of the text."""

import hashlib
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from megaspeed.data.documents import (
    Document,
    corpus_fingerprint,
    read_documents,
    read_pieces,
)
from megaspeed.data.errors import DataError
from megaspeed.data.pieces import PIECE_BYTES
from megaspeed.data.sources import SourceFile


def documents_of(folder: Path, **contents: bytes) -> list[Document]:
    files = []
    for name, content in contents.items():
        path = folder / f"{name}.txt"
        path.write_bytes(content)
        files.append(SourceFile(path.name, path))
    return read_documents(files)


def texts_of(documents: list[Document]) -> list[str]:
    texts, text = [], ""
    for piece in read_pieces(documents):
        text += piece.text
        if piece.ends_document:
            texts.append(text)
            text = ""
    assert text == ""
    return texts


def test_a_file_is_one_document_and_its_hash_is_of_its_bytes(tmp_path: Path) -> None:
    documents = documents_of(tmp_path, a="Grüße\n".encode(), b=b"two")
    assert texts_of(documents) == ["Grüße\n", "two"]
    assert documents[0].content == hashlib.sha256("Grüße\n".encode()).hexdigest()


def test_the_separator_cuts_a_file_into_documents(tmp_path: Path) -> None:
    documents = documents_of(
        tmp_path,
        unix=b"one\n<|endoftext|>\ntwo\n<|endoftext|>",
        windows=b"three\r\n<|endoftext|>\r\nfour",
        inline=b"five<|endoftext|>six<|endoftext|><|endoftext|>seven",
    )
    expected = ["one\n", "two\n", "three\r\n", "four", "five", "six", "seven"]
    assert texts_of(documents) == expected


def test_empty_files_have_no_documents_and_only_empty_files_are_an_error(tmp_path: Path) -> None:
    assert texts_of(documents_of(tmp_path, empty=b"", text=b"text")) == ["text"]
    with pytest.raises(DataError, match=r"2 files.*0 bytes.*name files with text"):
        documents_of(tmp_path, empty=b"", separators=b"<|endoftext|>\n<|endoftext|>")


@pytest.mark.parametrize("before", [0, 5, PIECE_BYTES + 100, 3 * PIECE_BYTES])
def test_bytes_that_are_not_utf8_are_named_by_file_and_offset(tmp_path: Path, before: int) -> None:
    text = (b"some words " * (before // 11 + 1))[:before]
    with pytest.raises(DataError) as caught:
        documents_of(tmp_path, good=b"fine", bad=text + b"\xff tail", worse=b"ab\xc3")
    assert len(caught.value.problems) == 2
    law = "text must be UTF-8, but this byte is"
    assert f"{tmp_path / 'bad.txt'}, byte {before:,}: {law} 0xff" in caught.value.problems[0]
    assert f"{tmp_path / 'worse.txt'}, byte 2: {law} 0xc3" in caught.value.problems[1]
    assert "iconv" in caught.value.problems[0]


@pytest.mark.parametrize("shift", range(0, 48, 5))
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_pieces_are_small_and_their_cuts_do_not_change_the_tokens(
    tmp_path: Path, line_end: str, shift: int
) -> None:
    line = f"    def größe(self):  return self.width * 12345{line_end}{line_end}"
    # The shift lets the limit of a piece fall on words, on single spaces, on indentation.
    text = "x" * shift + line * (5 * PIECE_BYTES // (2 * len(line)))
    (document,) = documents_of(tmp_path, long=text.encode())
    pieces = [piece.text for piece in read_pieces([document])]
    assert len(pieces) == 3
    assert all(len(piece.encode()) <= PIECE_BYTES for piece in pieces)
    assert "".join(pieces) == text
    split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    for before, after in pairwise(pieces):
        tail, head = before[-500:], after[:500]
        words = [word for word, _ in split(tail + head)]
        assert [word for part in (tail, head) for word, _ in split(part)] == words


def test_text_without_spaces_is_cut_between_characters(tmp_path: Path) -> None:
    text = "漢" * (PIECE_BYTES // 2)
    documents = documents_of(tmp_path, han=text.encode())
    assert texts_of(documents) == [text]


def test_the_fingerprint_is_of_names_and_contents_not_of_places_or_times(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    first = corpus_fingerprint(documents_of(here, a=b"one", b=b"two"))
    assert corpus_fingerprint(documents_of(there, a=b"one", b=b"two")) == first
    assert corpus_fingerprint(documents_of(there, a=b"one", b=b"twp")) != first
    assert corpus_fingerprint(documents_of(there, a=b"one", c=b"two")) != first
    assert corpus_fingerprint(documents_of(there, b=b"two", a=b"one")) != first

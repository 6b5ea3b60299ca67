"""Every format gives the same documents, in small pieces."""

import gzip
from pathlib import Path

import pytest

from megaspeed.config.run import Source
from megaspeed.data.documents import corpus_fingerprint, read_documents, read_pieces
from megaspeed.data.pieces import PIECE_BYTES
from megaspeed.data.sources import SourceFile
from tests.data.written_formats import (
    FORMATS,
    json_lines,
    own_datasets_cache,
    texts_in,
    write_table,
    written,
)
from tests.support.text import list_files

__all__ = ["own_datasets_cache"]

TEXTS = ["Grüße, 漢字 🙂", "two\nlines\n", " spaces ", 'quotes " and \\', "e", "f " * 9, "g"]

every_format = pytest.mark.parametrize("kind", FORMATS)
pytestmark = pytest.mark.usefixtures("own_datasets_cache")


@every_format
def test_every_format_gives_the_texts_in_order(tmp_path: Path, kind: str) -> None:
    file = written(kind, tmp_path, TEXTS)
    assert texts_in(file.pieces()) == TEXTS


@every_format
def test_empty_documents_are_ignored(tmp_path: Path, kind: str) -> None:
    file = written(kind, tmp_path, ["", "a", "", "", "b", ""])
    assert texts_in(file.pieces()) == ["a", "b"]


@every_format
def test_a_long_document_comes_in_pieces_of_at_most_a_mebibyte(tmp_path: Path, kind: str) -> None:
    long = "größe zählt " * (5 * PIECE_BYTES // 28)
    file = written(kind, tmp_path, ["before", long, "after"])
    pieces = list(file.pieces())
    assert len(pieces) == 5
    assert all(len(piece.text.encode()) <= PIECE_BYTES for piece in pieces)
    assert [piece.ends_document for piece in pieces] == [True, False, False, True, True]
    assert "".join(piece.text for piece in pieces[1:4]) == long
    # Cut in front of a space, which a byte-level BPE joins to the word after it.
    assert all(piece.text.startswith(" ") for piece in pieces[2:4])


@every_format
def test_documents_are_found_by_their_hashes_and_read_again(tmp_path: Path, kind: str) -> None:
    documents = read_documents([written(kind, tmp_path, TEXTS)])
    some = [documents[1], documents[2], documents[5]]
    texts = texts_in(read_pieces(some))
    assert texts == [TEXTS[1], TEXTS[2], TEXTS[5]]


def test_equal_texts_have_equal_hashes_in_every_format(tmp_path: Path) -> None:
    contents = set()
    for number, kind in enumerate(FORMATS):
        folder = tmp_path / str(number)
        folder.mkdir()
        documents = read_documents([written(kind, folder, TEXTS)])
        contents.add(tuple(document.content for document in documents))
    assert len(contents) == 1


def test_an_archive_of_plain_text_is_the_plain_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n<|endoftext|>\r\ntwo")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress((tmp_path / "a.txt").read_bytes()))
    sources = [Source(path=str(tmp_path / name)) for name in ("a.txt", "a.txt.gz")]
    plain, archive = list_files(sources, "data.train")
    assert texts_in(plain.pieces()) == texts_in(archive.pieces())
    renamed = SourceFile(plain.name, archive.path, archive.format)
    assert corpus_fingerprint(read_documents([plain])) == corpus_fingerprint(
        read_documents([renamed])
    )


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("zeros", [1, 5, 512, 70_000])
def test_zeros_after_an_archive_are_padding(tmp_path: Path, zeros: int, members: int) -> None:
    """Tapes and tools that write complete blocks append zeros. The program gzip ignores them."""
    text = "some words " * 20_000
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()) * members + bytes(zeros))
    (file,) = list_files([Source(path=str(tmp_path / "a.txt.gz"))], "data.train")
    assert texts_in(file.pieces()) == [text * members]


def test_json_lines_may_have_blank_lines_a_byte_order_mark_and_no_last_line_end(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"n": [1], "text": "b\\u00e9"}')
    (file,) = list_files([Source(path=str(path))], "data.train")
    assert texts_in(file.pieces()) == ["a", "bé"]
    path.write_bytes(b"\xef\xbb\xbf")
    assert texts_in(file.pieces()) == []


def test_the_field_of_the_text_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines(["a", "b"], field="content"))
    write_table(tmp_path / "b.parquet", ["c", "d"], column="content")
    sources = [
        Source(path=str(tmp_path / name), text_field="content") for name in ("a.jsonl", "b.parquet")
    ]
    lines, table = list_files(sources, "data.train")
    assert texts_in(lines.pieces()) == ["a", "b"]
    assert texts_in(table.pieces()) == ["c", "d"]


def test_a_split_of_a_saved_dataset_can_be_named(tmp_path: Path) -> None:
    FORMATS["saved splits"](tmp_path, TEXTS)
    path = str(tmp_path / "splits")
    sources = [Source(path=path), Source(path=path, split="test")]
    train, test = list_files(sources, "data.train")
    assert (len(texts_in(train.pieces())), len(texts_in(test.pieces()))) == (7, 1)


@every_format
def test_the_bytes_read_so_far_are_reported_for_progress(tmp_path: Path, kind: str) -> None:
    file = written(kind, tmp_path, TEXTS)
    read_bytes = [piece.read_bytes for piece in file.pieces()]
    assert read_bytes == sorted(read_bytes)
    if not kind.startswith("named"):
        assert 0 < read_bytes[-1] <= file.state()[1]


@pytest.mark.parametrize("kind", ["named", "named, streaming"])
def test_a_named_dataset_has_another_state_once_a_file_of_it_changed(
    tmp_path: Path, kind: str
) -> None:
    """If the state stayed the same, a run would use the tokens of the earlier content."""
    file = written(kind, tmp_path, TEXTS)
    before = file.state()
    assert before == file.state()
    (tmp_path / "named" / "train.jsonl").write_bytes(json_lines(TEXTS[:-1]))
    assert file.state() != before


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    texts = ["one", "\ufefftwo"]  # within the file it is a character as any other
    content = "<|endoftext|>".join(texts).encode()
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + content)
    assert texts_in(SourceFile("a.txt", path).pieces()) == texts
    path.write_bytes(b"\xef\xbb\xbf")
    assert list(SourceFile("a.txt", path).pieces()) == []

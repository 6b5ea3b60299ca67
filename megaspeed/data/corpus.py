"""Files to documents: byte ranges of UTF-8 text, each with the hash of its content.

    one file  = one document, or several where `<|endoftext|>` stands between them
    document  = (file, start byte, stop byte, sha256 of the bytes)
    piece     = at most 1 MiB of a document, so that memory stays flat however large a file is

The text itself is never held: documents are read through a memory map whenever they are needed.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from megaspeed.data.errors import DataError
from megaspeed.data.sources import SourceFile

DOCUMENT_SEPARATOR = b"<|endoftext|>"
PIECE_BYTES = 1 << 20
# How far back from a piece's limit a good place to cut is looked for.
_CUT_WINDOW_BYTES = 1 << 16
_WHITESPACE = frozenset(b" \t\n\r\v\f")


@dataclass(frozen=True, slots=True)
class Document:
    """Bytes `start` to `stop` of a file; `content` is the sha256 of these bytes in hexadecimal."""

    file: SourceFile
    start: int
    stop: int
    content: str

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a document's text, in order; `ends_document` marks its last one."""

    text: str
    ends_document: bool


class _NotUtf8(Exception):
    def __init__(self, offset: int, byte: int, reason: str) -> None:
        self.offset, self.byte, self.reason = offset, byte, reason


def read_documents(files: Sequence[SourceFile]) -> list[Document]:
    """Every document with at least one byte, in the order of the files.

    Raises:
        DataError: a file is not UTF-8 (file and byte offset, all such files at once), or no file
            has any text.
    """
    documents: list[Document] = []
    problems: list[str] = []
    for file in files:
        try:
            documents.extend(_documents_of(file))
        except _NotUtf8 as error:
            problems.append(
                f"text must be UTF-8, and byte {error.offset} of {file.path} is "
                f"0x{error.byte:02x} ({error.reason}); "
                "convert the file, for example with iconv -t UTF-8"
            )
    if problems:
        raise DataError(*problems)
    if not documents:
        raise DataError(
            f"a corpus must have text, and its {len(files)} files, starting with "
            f"{files[0].path}, have 0 bytes of it; name files with text"
        )
    return documents


def read_pieces(documents: Iterable[Document]) -> Iterator[Piece]:
    """The text of the documents, in order; neighbours in one file share one memory map.

    Raises:
        DataError: a document is not any more what it was when its content was hashed.
    """
    for file, group in groupby(documents, key=lambda document: document.file):
        try:
            mapped = _mapped(file.path)
        except (OSError, ValueError) as error:  # gone, or empty now
            raise _changed(file) from error
        with mapped as data:
            for document in group:
                yield from _pieces_of(document, data)


def _pieces_of(document: Document, data: mmap.mmap) -> Iterator[Piece]:
    if document.stop > len(data):
        raise _changed(document.file)
    digest = hashlib.sha256()
    for start, stop in _piece_ranges(data, document.start, document.stop):
        piece = data[start:stop]
        digest.update(piece)
        ends_document = stop == document.stop
        if ends_document and digest.hexdigest() != document.content:
            raise _changed(document.file)
        # Text that was UTF-8 when it was hashed, or has changed and is about to be refused.
        yield Piece(piece.decode("utf-8", errors="replace"), ends_document)


def _changed(file: SourceFile) -> DataError:
    return DataError(
        f"a corpus must not change while it is read, and {file.path} did; "
        "start again once it is complete"
    )


def corpus_fingerprint(documents: Iterable[Document]) -> str:
    """sha256 over (relative name, size, content hash) of every document, in order."""
    digest = hashlib.sha256()
    for document in documents:
        entry = [document.file.name, document.size_bytes, document.content]
        digest.update(json.dumps(entry).encode("utf-8") + b"\n")
    return digest.hexdigest()


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as stream:  # the map stays when the file is closed
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


def _documents_of(file: SourceFile) -> Iterator[Document]:
    if file.path.stat().st_size == 0:  # an empty file cannot be mapped
        return
    with _mapped(file.path) as data:
        for start, stop in _document_ranges(data):
            yield Document(file, start, stop, _checked_hash(data, start, stop))


def _document_ranges(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Byte ranges between separators; a separator takes the end of its own line with it."""
    start = 0
    while start < len(data):
        separator = data.find(DOCUMENT_SEPARATOR, start)
        stop = len(data) if separator < 0 else separator
        if stop > start:
            yield start, stop
        if separator < 0:
            return
        start = separator + len(DOCUMENT_SEPARATOR)
        if data[start : start + 2] == b"\r\n":
            start += 2
        elif data[start : start + 1] == b"\n":
            start += 1


def _checked_hash(data: mmap.mmap, start: int, stop: int) -> str:
    """The hash of the bytes, once they are known to be UTF-8 (else _NotUtf8)."""
    digest = hashlib.sha256()
    for piece_start, piece_stop in _piece_ranges(data, start, stop):
        piece = data[piece_start:piece_stop]
        digest.update(piece)
        try:
            piece.decode("utf-8")
        except UnicodeDecodeError as error:
            # The offset a person looks for is the one in the file, not in the piece.
            offset = piece_start + error.start
            raise _NotUtf8(offset, data[offset], error.reason) from None
    return digest.hexdigest()


def _piece_ranges(data: mmap.mmap, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The range from `start` to `stop`, cut into pieces."""
    while stop - start > PIECE_BYTES:
        cut = _cut_at_most(data, start + PIECE_BYTES)
        yield start, cut
        start = cut
    yield start, stop


def _cut_at_most(data: mmap.mmap, limit: int) -> int:
    """The last place at or before `limit` where cutting leaves the tokens as they are.

    A byte-level BPE never merges across the space in "X Y" (X and Y not white), because its
    pre-tokenizer takes that space as the beginning of the word Y. Text without any such space in
    64 KiB is cut between two characters, which may split one token there.
    """
    window = limit - _CUT_WINDOW_BYTES
    space = data.rfind(b" ", window, limit)
    while space > window:
        if data[space - 1] not in _WHITESPACE and data[space + 1] not in _WHITESPACE:
            return space
        space = data.rfind(b" ", window, space)
    for cut in range(limit, limit - 4, -1):
        if data[cut] & 0b1100_0000 != 0b1000_0000:  # not in the middle of a UTF-8 character
            return cut
    return limit

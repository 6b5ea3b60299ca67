"""Files to documents: what each file holds, known by its hash, and read again when it is needed.

    file      --streamed once-->  document 0, document 1, ...     (sizes and hashes; no text)
    document  --its file again--> piece . piece . piece(ends document)

The text itself is never held. A document that is not what it was when it was hashed is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from megaspeed.data.errors import DataError
from megaspeed.data.text.pieces import BadRecord, Piece
from megaspeed.data.text.sources import SourceFile


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a file.

    Attributes:
        file: where it is.
        number: of the document in its file, counted from 0; those without text do not count.
        size_bytes: of its text in UTF-8.
        content: sha256 of its text in UTF-8, in hexadecimal.
    """

    file: SourceFile
    number: int
    size_bytes: int
    content: str


class _Bad(Exception):
    def __init__(self, record: BadRecord) -> None:
        self.record = record


def read_documents(files: Sequence[SourceFile], otherwise: str = "") -> list[Document]:
    """Every document with at least one byte, in the order of the files.

    Args:
        files: where they are.
        otherwise: what can be done about a bad record other than to mend it, for the message.

    Raises:
        DataError: records that are no text (the first of each file, all files at once), or no
            file has any text.
    """
    documents: list[Document] = []
    problems: list[str] = []
    for file in files:
        try:
            documents.extend(_documents_of(file))
        except _Bad as bad:
            problems.append(f"{bad.record}{otherwise}")
        except DataError as error:
            problems.extend(error.problems)
    if problems:
        raise DataError(*problems)
    if not documents:
        raise DataError(
            f"a corpus must have text, and its {len(files)} files, starting with "
            f"{files[0].path}, have 0 bytes of it; name files with text"
        )
    return documents


def read_pieces(documents: Iterable[Document]) -> Iterator[Piece]:
    """The text of the documents, in their order; each run of one file's reads that file once.

    Args:
        documents: some of those that `read_documents` gave, each file's in the order of their
            numbers.

    Raises:
        DataError: a document is not any more what it was when its content was hashed.
    """
    for file, group in groupby(documents, key=lambda document: document.file):
        try:
            yield from _chosen_pieces(file, group)
        except (OSError, _Bad) as error:  # gone, or damaged now
            raise _changed(file) from error


def corpus_fingerprint(documents: Iterable[Document]) -> str:
    """sha256 over (relative name, size, content hash) of every document, in order."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document_line(document.file.name, document.size_bytes, document.content))
    return digest.hexdigest()


def document_line(file_name: str, size_bytes: int, content: str) -> bytes:
    """What a corpus fingerprint holds of one document."""
    return json.dumps([file_name, size_bytes, content]).encode("utf-8") + b"\n"


def _documents_of(file: SourceFile) -> Iterator[Document]:
    number, size_bytes, digest = 0, 0, hashlib.sha256()
    for piece in file.pieces(on_bad=_give_up):
        encoded = piece.text.encode("utf-8")
        size_bytes += len(encoded)
        digest.update(encoded)
        if piece.ends_document:
            yield Document(file, number, size_bytes, digest.hexdigest())
            number, size_bytes, digest = number + 1, 0, hashlib.sha256()


def _give_up(record: BadRecord) -> None:
    raise _Bad(record)


def _chosen_pieces(file: SourceFile, documents: Iterator[Document]) -> Iterator[Piece]:
    """The pieces of these documents, of all that the file holds."""
    wanted = next(documents, None)
    number, digest = 0, hashlib.sha256()
    for piece in file.pieces(on_bad=_give_up):
        if wanted is None:
            return
        assert number <= wanted.number, "documents are not in the order of their numbers"
        if number == wanted.number:
            digest.update(piece.text.encode("utf-8"))
            if piece.ends_document:
                if digest.hexdigest() != wanted.content:
                    raise _changed(file)
                wanted, digest = next(documents, None), hashlib.sha256()
            yield piece
        number += piece.ends_document
    if wanted is not None:
        raise _changed(file)


def _changed(file: SourceFile) -> DataError:
    return DataError(
        f"a corpus must not change while it is read, and {file.path} did; "
        "start again once it is complete"
    )

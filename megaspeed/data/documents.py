"""Read files as documents, first to hash them and then to encode them.

    file      --read once-->   document 0, document 1, ...     (sizes and hashes; no text)
    document  --read again-->  piece . piece . piece(ends document)

No text is kept in memory. A document that changed after it was hashed is refused.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path

from megaspeed.data.errors import DataError, for_each
from megaspeed.data.pieces import OnBad, Piece, TextFormat, refuse
from megaspeed.data.sources import SourceFile
from megaspeed.files.paths import FileState


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a file."""

    file: SourceFile  # the file that contains it
    number: int  # its number in the file, from 0. Documents without text are not counted.
    size_bytes: int  # size of its text in UTF-8
    content: str  # sha256 of its text in UTF-8, in hexadecimal


def hashed(file: SourceFile, on_bad: OnBad = refuse) -> Iterator[tuple[Piece, Document | None]]:
    """Yield every piece of a file, and with the last piece of a document, the document."""
    number, size_bytes, digest = 0, 0, hashlib.sha256()
    for piece in file.pieces(on_bad):
        content = piece.text.encode("utf-8")
        size_bytes += len(content)
        digest.update(content)
        document = None
        if piece.ends_document:
            document = Document(file, number, size_bytes, digest.hexdigest())
            number, size_bytes, digest = number + 1, 0, hashlib.sha256()
        yield piece, document


def read_documents(files: Sequence[SourceFile]) -> list[Document]:
    """Return every document with at least one byte, in the order of the files.

    Raises DataError for bad records (the first of each file, all files at once), or without text.
    """
    by_file = for_each(files, lambda file: [found for _, found in hashed(file) if found])
    documents = list(chain(*by_file))
    if not documents:
        raise no_text(files)
    return documents


def no_text(files: Sequence[SourceFile]) -> DataError:
    """Return the error of a corpus without a single document."""
    return DataError(
        f"a corpus must have text, but its {len(files)} files, starting with {files[0].path}, "
        "have 0 bytes of it; name files with text"
    )


def read_pieces(documents: Iterable[Document]) -> Iterator[Piece]:
    """Yield the text of some documents. A file is read once for consecutive documents of it."""
    return chain.from_iterable(file.pieces() for file in chosen_files(documents))


def chosen_files(documents: Iterable[Document]) -> list[SourceFile]:
    """Return the files of some documents, reduced to these documents.

    Args:
        documents: from ``read_documents``, those of each file in the order of their numbers.
    """
    by_file = groupby(documents, key=lambda document: document.file)
    return [
        replace(file, format=ChosenDocuments(file.format, tuple(each.number for each in group)))
        for file, group in by_file
    ]


@dataclass(frozen=True, slots=True)
class ChosenDocuments(TextFormat):
    """Some of the documents of a file."""

    format: TextFormat  # how the file is read
    numbers: tuple[int, ...]  # of the documents in the file, increasing, at least one

    def pieces(self, path: Path, on_bad: OnBad) -> Iterator[Piece]:
        wanted, number = set(self.numbers), 0
        for piece in self.format.pieces(path, on_bad):
            if number in wanted:
                yield piece
            number += piece.ends_document
            if number > self.numbers[-1]:
                return

    def state(self, path: Path) -> FileState:
        return self.format.state(path)


def described_files(documents: Iterable[Document]) -> str:
    """Name the first file of some documents, and count the others."""
    files = list(dict.fromkeys(str(document.file.path) for document in documents))
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1:,} other files"


def corpus_fingerprint(documents: Iterable[Document]) -> str:
    """sha256 over (relative name, size, content hash) of every document, in order."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document_line(document))
    return digest.hexdigest()


def document_line(document: Document) -> bytes:
    """Return the part of a corpus fingerprint for one document."""
    facts = json.dumps([document.file.name, document.size_bytes, document.content])
    return facts.encode("utf-8") + b"\n"


def changed_while_read(what: str) -> DataError:
    """Return the error of a file that changed between two reads."""
    return DataError(
        f"a corpus must not change while it is read, but {what} did; start again once it is "
        "complete"
    )

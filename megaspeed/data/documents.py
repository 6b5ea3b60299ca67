"""Reads files as documents, and selects the documents that are held out for validation.

    file      --read once-->   document 0, document 1, ...     (sizes and hashes; no text)
    document  --read again-->  piece . piece . piece(ends document)

No text is kept in memory. A document that changed after it was hashed is refused.

**The split.** The hash of a document's text decides, so equal documents are always on the same
side, and the order of files does not matter.

    by tokens       complete documents; if they are less than 9/10 of the fraction, also the end of
                    the longest document. If all documents have copies, only complete documents;
                    more than twice the fraction is refused
    by documents    the rule of version 0.1: complete documents; if none is short enough, the
                    shortest one
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from megaspeed.data.errors import DataError
from megaspeed.data.pieces import BadRecord, Piece
from megaspeed.data.sources import SourceFile

_SHORT_OF = 0.1
_MOST_TIMES = 2


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a file.

    Attributes:
        file: the file that contains it.
        number: its number in the file, from 0. Documents without text are not counted.
        size_bytes: size of its text in UTF-8.
        content: sha256 of its text in UTF-8, in hexadecimal.
    """

    file: SourceFile
    number: int
    size_bytes: int
    content: str


Groups = list[list[Document]]
"""Documents, by the component of the mixture that they belong to."""


@dataclass(frozen=True)
class Cut:
    """A document whose end is held out.

    Attributes:
        document: its number among the training documents of its group.
        fraction: the fraction of the document that is held out, in (0, 1).
    """

    document: int
    fraction: float


class _Bad(Exception):
    def __init__(self, record: BadRecord) -> None:
        self.record = record


def _give_up(record: BadRecord) -> None:
    raise _Bad(record)


class DocumentHash:
    """Computes size and hash of a document from its pieces."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self.size_bytes = 0

    def update(self, piece: Piece) -> None:
        content = piece.text.encode("utf-8")
        self._digest.update(content)
        self.size_bytes += len(content)

    @property
    def content(self) -> str:
        """sha256 in hexadecimal."""
        return self._digest.hexdigest()


def read_documents(files: Sequence[SourceFile], otherwise: str = "") -> list[Document]:
    """Every document with at least one byte, in the order of the files.

    Args:
        files: the files to read.
        otherwise: text that is appended to the message about a bad record.

    Raises:
        DataError: bad records (the first of each file, all files at once), or there is no text.
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
        raise no_text(files)
    return documents


def no_text(files: Sequence[SourceFile]) -> DataError:
    """The error of a corpus without a single document."""
    return DataError(
        f"a corpus must have text, and its {len(files)} files, starting with {files[0].path}, "
        "have 0 bytes of it; name files with text"
    )


def read_pieces(documents: Iterable[Document]) -> Iterator[Piece]:
    """The text of some documents. Consecutive documents of one file read that file once.

    Args:
        documents: from `read_documents`, those of each file in the order of their numbers.

    Raises:
        DataError: a document changed after it was hashed.
    """
    for file, group in groupby(documents, key=lambda document: document.file):
        try:
            yield from _chosen_pieces(file, group)
        except (OSError, _Bad) as error:  # removed, or damaged now
            raise changed_while_read(str(file.path)) from error


def corpus_fingerprint(documents: Iterable[Document]) -> str:
    """sha256 over (relative name, size, content hash) of every document, in order."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document_line(document.file.name, document.size_bytes, document.content))
    return digest.hexdigest()


def document_line(file_name: str, size_bytes: int, content: str) -> bytes:
    """The part of a corpus fingerprint for one document."""
    return json.dumps([file_name, size_bytes, content]).encode("utf-8") + b"\n"


def changed_while_read(what: str) -> DataError:
    """The error of a file that changed between two reads."""
    return DataError(
        f"a corpus must not change while it is read, and {what} did; start again once it is "
        "complete"
    )


def _documents_of(file: SourceFile) -> Iterator[Document]:
    number, document = 0, DocumentHash()
    for piece in file.pieces(_give_up):
        document.update(piece)
        if piece.ends_document:
            yield Document(file, number, document.size_bytes, document.content)
            number, document = number + 1, DocumentHash()


def _chosen_pieces(file: SourceFile, documents: Iterator[Document]) -> Iterator[Piece]:
    """The pieces of these documents of the file."""
    wanted = next(documents, None)
    number, document = 0, DocumentHash()
    for piece in file.pieces(_give_up):
        if wanted is None:
            return
        assert number <= wanted.number, "documents are not in the order of their numbers"
        if number == wanted.number:
            document.update(piece)
            if piece.ends_document:
                if document.content != wanted.content:
                    raise changed_while_read(str(file.path))
                wanted, document = next(documents, None), DocumentHash()
            yield piece
        number += piece.ends_document
    if wanted is not None:
        raise changed_while_read(str(file.path))


def split_by_tokens(
    groups: Sequence[Sequence[Document]], fraction: float, seed: int
) -> tuple[Groups, Groups, list[Cut | None]]:
    """(training documents, validation documents, cut) of each group.

    In every group with documents, `fraction` of the bytes is held out. A document is cut only if no
    other document has the same text.

    Raises:
        DataError: the documents of a group cannot be cut, and it has fewer than two distinct ones,
            or more than twice the fraction would be held out.
    """
    nothing_cut: list[Cut | None] = [None for _ in groups]
    if fraction == 0:
        return *_sides(groups, set()), nothing_cut
    held_out = {
        content for group in groups for content in _held_out(_bytes_of(group), fraction, seed)
    }
    copies = Counter(document.content for group in groups for document in group)
    cuts = [_cut(group, held_out, copies, fraction) for group in groups]
    uncut = [
        group
        for group, cut in zip(groups, cuts, strict=True)
        if group and cut is None and not any(document.content in held_out for document in group)
    ]
    if not uncut:
        return *_sides(groups, held_out), cuts
    training, validation = split_groups(groups, fraction, seed)
    problems = [
        _too_much(group, share, fraction, uncut[0])
        for group, held in zip(groups, validation, strict=True)
        if (share := _bytes(held) / max(_bytes(group), 1)) > _MOST_TIMES * fraction
    ]
    if problems:
        raise DataError(*problems)
    return training, validation, nothing_cut


def split_groups(
    groups: Sequence[Sequence[Document]], fraction: float, seed: int
) -> tuple[Groups, Groups]:
    """(training documents, validation documents) of each group, complete documents only.

    Distinct contents are sorted by sha256(seed, content hash). In this order, each one that fits
    into `fraction` of all bytes is held out. If none fits, the smallest one is. Each group is split
    separately. Documents that one group holds out are removed from the training documents of all
    groups, so a group may lose more than its fraction.

    Raises:
        DataError: fewer than two distinct documents in some of the groups.
    """
    if fraction == 0:
        return _sides(groups, set())
    problems = [_too_few(group) for group in groups if group and len(_bytes_of(group)) < 2]
    if problems:
        raise DataError(*problems)
    held_out: set[str] = set()
    for bytes_of in map(_bytes_of, filter(None, groups)):
        shortest = min(bytes_of, key=lambda content: (bytes_of[content], content))
        held_out |= _held_out(bytes_of, fraction, seed) or {shortest}
    return _sides(groups, held_out)


def _cut(
    group: Sequence[Document], held_out: set[str], copies: Counter[str], fraction: float
) -> Cut | None:
    """The end of the longest document without copies, if complete documents are not enough."""
    wanted = fraction * _bytes(group)
    training = [document for document in group if document.content not in held_out]
    missing = wanted - (_bytes(group) - _bytes(training))
    single = [number for number, doc in enumerate(training) if copies[doc.content] == 1]
    if missing <= _SHORT_OF * wanted or not single:
        return None
    longest = max(single, key=lambda n: (training[n].size_bytes, training[n].content))
    return Cut(longest, min(missing / training[longest].size_bytes, 1 - _SHORT_OF))


def _held_out(bytes_of: dict[str, int], fraction: float, seed: int) -> set[str]:
    """The content hashes of the documents that are held out, to fit into the fraction."""
    room_bytes = fraction * sum(bytes_of.values())
    ranked = sorted(
        bytes_of, key=lambda content: hashlib.sha256(f"{seed}:{content}".encode()).digest()
    )
    held_out: set[str] = set()
    for content in ranked[:-1]:  # the last one stays, so that training is never empty
        if bytes_of[content] <= room_bytes:
            held_out.add(content)
            room_bytes -= bytes_of[content]
    return held_out


def _sides(groups: Sequence[Sequence[Document]], held_out: set[str]) -> tuple[Groups, Groups]:
    training = [[doc for doc in group if doc.content not in held_out] for group in groups]
    validation = [[doc for doc in group if doc.content in held_out] for group in groups]
    return training, validation


def _bytes(documents: Sequence[Document]) -> int:
    return sum(document.size_bytes for document in documents)


def _bytes_of(documents: Sequence[Document]) -> dict[str, int]:
    """Content hash -> bytes of all documents with this content."""
    bytes_of: Counter[str] = Counter()
    for document in documents:
        bytes_of[document.content] += document.size_bytes
    return bytes_of


def _too_much(
    group: Sequence[Document], share: float, fraction: float, uncut: Sequence[Document]
) -> str:
    return (
        f"at most {_MOST_TIMES} x data.validation_fraction {fraction:g} may be held out, and it "
        f"would be {share:.1%} of {_place(group)}: no document of {_place(uncut)} can be cut, "
        f"because all have copies ({len(uncut):,} documents, {len(_bytes_of(uncut)):,} distinct); "
        "remove the copies, give data.validation sources of its own, or set data.hold_out_by to "
        '"documents" to hold out so much'
    )


def _place(group: Sequence[Document]) -> str:
    files = list(dict.fromkeys(str(document.file.path) for document in group))
    return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1:,} other files"


def _too_few(documents: Sequence[Document]) -> str:
    return (
        "training and validation each need at least one complete document, and the corpus has "
        f"{len(_bytes_of(documents))} distinct document ({documents[0].file.path}, "
        f"{documents[0].size_bytes} bytes); put <|endoftext|> between its parts, name more "
        "files, give data.validation sources of its own, or set data.validation_fraction to 0"
    )

"""The validation split: whole documents, chosen by the hash of what they say.

Documents with equal content always go to the same side, so nothing that is validated on was
trained on, and the order in which files are listed does not matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from megaspeed.data.errors import DataError
from megaspeed.data.text.documents import Document


def split_documents(
    documents: Sequence[Document], fraction: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """(training documents, validation documents), each in the order of `documents`.

    Distinct contents are ranked by sha256(seed, content hash) and taken for validation in this
    order as long as they fit into `fraction` of all bytes, at least the smallest one. A fraction
    of 0 keeps every document for training.

    Raises:
        DataError: fewer than two distinct documents, so that one side would be empty.
    """
    (training,), (validation,) = split_groups([documents], fraction, seed)
    return training, validation


def split_groups(
    groups: Sequence[Sequence[Document]], fraction: float, seed: int
) -> tuple[list[list[Document]], list[list[Document]]]:
    """(training documents, validation documents) of each group.

    `fraction` of every group that has documents is held out by itself, so that each is validated
    on; what one group holds out, no other trains on. So a group whose documents are in others too
    may lose more than its fraction, up to all of them.

    Raises:
        DataError: fewer than two distinct documents in some of the groups.
    """
    if fraction == 0:
        return [list(group) for group in groups], [[] for _ in groups]
    problems = [_too_few(group) for group in groups if group and len(_bytes_of(group)) < 2]
    if problems:
        raise DataError(*problems)
    held_out = {
        content
        for group in groups
        if group
        for content in _held_out(_bytes_of(group), fraction, seed)
    }
    training = [[doc for doc in group if doc.content not in held_out] for group in groups]
    validation = [[doc for doc in group if doc.content in held_out] for group in groups]
    return training, validation


def _bytes_of(documents: Sequence[Document]) -> dict[str, int]:
    """Content hash -> bytes of all documents with this content."""
    bytes_of: dict[str, int] = {}
    for document in documents:
        bytes_of[document.content] = bytes_of.get(document.content, 0) + document.size_bytes
    return bytes_of


def _too_few(documents: Sequence[Document]) -> str:
    return (
        "training and validation each need at least one whole document, and the corpus has "
        f"{len(_bytes_of(documents))} distinct document ({documents[0].file.path}, "
        f"{documents[0].size_bytes} bytes); put <|endoftext|> between its parts, name more "
        "files, give data.validation sources of its own, or set data.validation_fraction to 0"
    )


def _held_out(bytes_of: dict[str, int], fraction: float, seed: int) -> set[str]:
    """The contents held out for validation; `bytes_of` is content hash -> bytes."""
    room_bytes = fraction * sum(bytes_of.values())
    ranked = sorted(bytes_of, key=lambda content: _rank(seed, content))
    held_out: set[str] = set()
    for content in ranked[:-1]:  # the last one stays, so that training is never empty
        if bytes_of[content] <= room_bytes:
            held_out.add(content)
            room_bytes -= bytes_of[content]
    return held_out or {min(ranked, key=lambda content: (bytes_of[content], content))}


def _rank(seed: int, content: str) -> bytes:
    return hashlib.sha256(f"{seed}:{content}".encode()).digest()

"""The validation split: whole documents, chosen by the hash of what they say.

Documents with equal content always go to the same side, so nothing that is validated on was
trained on, and the order in which files are listed does not matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from megaspeed.data.corpus import Document
from megaspeed.data.errors import DataError


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
    if fraction == 0:
        return list(documents), []
    bytes_of: dict[str, int] = {}
    for document in documents:
        bytes_of[document.content] = bytes_of.get(document.content, 0) + document.size_bytes
    if len(bytes_of) < 2:
        raise DataError(
            "training and validation each need at least one whole document, and the corpus has "
            f"{len(bytes_of)} distinct document ({documents[0].file.path}, "
            f"{documents[0].size_bytes} bytes); put <|endoftext|> between its parts, name more "
            "files, give data.validation sources of its own, or set data.validation_fraction to 0"
        )
    held_out = _held_out(bytes_of, fraction, seed)
    training = [document for document in documents if document.content not in held_out]
    validation = [document for document in documents if document.content in held_out]
    return training, validation


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

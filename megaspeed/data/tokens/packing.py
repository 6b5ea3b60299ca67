"""Texts to ids end to end, with an end-of-text token behind each document.

    pieces   "The sun"  " rose." |  "It rained." |
    ids      464 4252   8278 13    1026 33697 13
    packed   464 4252 8278 13 END 1026 33697 13 END
                                 ^                 ^  document_ends 5, 9

Every piece is encoded by itself, so the ids do not depend on which pieces are packed together. They
are those of the whole document wherever it is cut before a space that begins a word; `cutting` says
what holds elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megaspeed.data.text.pieces import Piece
from megaspeed.data.tokenizer.text_tokenizer import TextTokenizer

IdType = Literal["<u2", "<u4"]
"""Of the ids in a file that we write: little-endian, 2 or 4 bytes."""


@dataclass(frozen=True)
class Packed:
    """The ids of some pieces.

    Attributes:
        ids: shape (tokens,), end-of-text tokens included.
        document_ends: shape (documents that end here,), how many ids lie before the end of each.
    """

    ids: NDArray[np.unsignedinteger]
    document_ends: NDArray[np.int64]


def id_type(vocab_size: int) -> IdType:
    """The smallest type that holds every id below ``vocab_size``."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def pack(
    pieces: Sequence[Piece], tokenizer: TextTokenizer, *, within_document: bool = False
) -> Packed:
    """The ids of the pieces, in order.

    Args:
        pieces: neighbours.
        tokenizer: encodes them.
        within_document: whether the first piece goes on with a document that began before.
    """
    packed: list[int] = []
    document_ends: list[int] = []
    encoded = _encoded(pieces, tokenizer, within_document)
    for piece, ids in zip(pieces, encoded, strict=True):
        packed.extend(ids)
        if piece.ends_document:
            packed.append(tokenizer.end_of_text)
            document_ends.append(len(packed))
    return Packed(
        np.asarray(packed, dtype=id_type(tokenizer.vocab_size)),
        np.asarray(document_ends, dtype=np.int64),
    )


def _encoded(
    pieces: Sequence[Piece], tokenizer: TextTokenizer, within_document: bool
) -> list[list[int]]:
    """The ids of each piece."""
    goes_on = [within_document, *(not piece.ends_document for piece in pieces)][: len(pieces)]
    texts: dict[bool, list[str]] = {False: [], True: []}
    for piece, is_continued in zip(pieces, goes_on, strict=True):
        texts[is_continued].append(piece.text)
    begun = iter(tokenizer.encode(texts[False]))
    continued = iter(tokenizer.encode_continued(texts[True]))
    return [next(continued if is_continued else begun) for is_continued in goes_on]

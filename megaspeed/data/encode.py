"""Encode pieces of documents as token ids, with an end-of-text token after each document.

    pieces   "The sun"  " rose." |  "It rained." |
    ids      464 4252   8278 13    1026 33697 13
    packed   464 4252   8278 13 END 1026 33697 13 END
                                 ^                 ^  document_ends 5, 9

Every piece is encoded separately, so the ids do not depend on the batches or on the number of
threads. Memory is bounded by one batch, however long the input is.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megaspeed.data.pieces import Piece
from megaspeed.data.token_file import id_type
from megaspeed.data.tokenizer import TextTokenizer

BATCH_CHARACTERS = 1 << 20
"""Characters that the threads encode together. They take about 100 MB of memory."""


@dataclass(frozen=True)
class Packed:
    """The ids of some pieces.

    Attributes:
        ids: shape (tokens,), including end-of-text tokens.
        document_ends: shape (documents that end here,). For each, the number of ids up to its end.
    """

    ids: NDArray[np.unsignedinteger]
    document_ends: NDArray[np.int64]


def pack(pieces: Sequence[Piece], tokenizer: TextTokenizer, is_continued: bool = False) -> Packed:
    """Return the ids of consecutive pieces. ``is_continued``: the first continues a document."""
    continued = [is_continued, *(not piece.ends_document for piece in pieces)][: len(pieces)]
    texts: dict[bool, list[str]] = {False: [], True: []}
    for piece, continues in zip(pieces, continued, strict=True):
        texts[continues].append(piece.text)
    encoded = {
        False: iter(tokenizer.encode(texts[False])),
        True: iter(tokenizer.encode_continued(texts[True])),
    }
    ids: list[int] = []
    document_ends: list[int] = []
    for piece, continues in zip(pieces, continued, strict=True):
        ids.extend(next(encoded[continues]))
        if piece.ends_document:
            ids.append(tokenizer.end_of_text)
            document_ends.append(len(ids))
    return Packed(
        np.asarray(ids, dtype=id_type(tokenizer.vocab_size)),
        np.asarray(document_ends, dtype=np.int64),
    )


def encode(pieces: Iterable[Piece], tokenizer: TextTokenizer) -> Iterator[Packed]:
    """Yield the ids of all pieces, in the order of the text. Uses all threads."""
    batch: list[Piece] = []
    characters, is_continued = 0, False
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH_CHARACTERS:
            yield pack(batch, tokenizer, is_continued)
            batch, characters, is_continued = [], 0, not piece.ends_document
    if batch:
        yield pack(batch, tokenizer, is_continued)

"""Documents to one token file in the cache: encoded in batches, written in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from megaspeed.data.cache import Cache, Facts
from megaspeed.data.text.documents import Document, corpus_fingerprint, read_pieces
from megaspeed.data.text.pieces import Piece
from megaspeed.data.tokenizer.text_tokenizer import TextTokenizer
from megaspeed.data.tokens.packing import id_type, pack
from megaspeed.data.tokens.token_file import TokenFile, TokenIndex

# Text encoded in one call: enough for all threads, little enough to keep memory flat.
_ENCODED_AT_ONCE_CHARACTERS = 4 << 20


def write_tokens(
    cache: Cache, path: Path, documents: list[Document], tokenizer: TextTokenizer
) -> TokenFile:
    """Tokenizes the documents into `path`. Only under the cache's lock."""

    def fill(stream: BinaryIO) -> Facts:
        tokens, largest_id = 0, tokenizer.end_of_text
        for ids in packed_ids(documents, tokenizer):
            stream.write(ids.tobytes())
            tokens += len(ids)
            largest_id = max(largest_id, int(ids.max(initial=0)))
        return asdict(
            TokenIndex(
                tokens=tokens,
                documents=len(documents),
                dtype=id_type(tokenizer.vocab_size),
                largest_id=largest_id,
                vocab_size=tokenizer.vocab_size,
                end_of_text=tokenizer.end_of_text,
                tokenizer_fingerprint=tokenizer.fingerprint,
                corpus_fingerprint=corpus_fingerprint(documents),
            )
        )

    cache.write(path, fill)
    file = TokenFile.open(cache, path)
    assert file is not None, path
    return file


def packed_ids(
    documents: Iterable[Document], tokenizer: TextTokenizer
) -> Iterator[NDArray[np.unsignedinteger]]:
    """The ids of all documents with an end-of-text token after each, in stretches of any length."""
    pieces: list[Piece] = []
    characters = 0
    within_document = False
    for piece in read_pieces(documents):
        pieces.append(piece)
        characters += len(piece.text)
        if characters >= _ENCODED_AT_ONCE_CHARACTERS:
            yield pack(pieces, tokenizer, within_document=within_document).ids
            pieces, characters, within_document = [], 0, not piece.ends_document
    if pieces:
        yield pack(pieces, tokenizer, within_document=within_document).ids

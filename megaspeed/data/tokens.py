"""The token file: all documents end to end, as integers on disk, mapped into memory.

    document 0 . end-of-text . document 1 . end-of-text . ...

`<key>.bin` holds the ids alone, little-endian, 2 bytes each for vocabularies up to 65,536 and 4
beyond; its index says how to read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from megaspeed.data.cache import Cache, Facts
from megaspeed.data.corpus import Document, corpus_fingerprint, read_pieces
from megaspeed.data.errors import DataError
from megaspeed.data.tokenizer import TextTokenizer

# Text encoded in one call: enough for all threads, little enough to keep memory flat.
_ENCODED_AT_ONCE_CHARACTERS = 4 << 20
_SCANNED_AT_ONCE_TOKENS = 1 << 24


@dataclass(frozen=True)
class TokenIndex:
    """What is known of a token file without reading it.

    Attributes:
        tokens: ids in the file, end-of-text tokens included.
        documents: documents, each followed by one end-of-text token.
        dtype: of the ids in the file, little-endian.
        largest_id: the largest id that occurs.
        vocab_size: the tokenizer's, one more than the largest id it can give.
        end_of_text: the id after each document.
        tokenizer_fingerprint: sha256 of the tokenizer as JSON.
        corpus_fingerprint: sha256 over the documents' names, sizes and contents.
    """

    tokens: int
    documents: int
    dtype: Literal["<u2", "<u4"]
    largest_id: int
    vocab_size: int
    end_of_text: int
    tokenizer_fingerprint: str
    corpus_fingerprint: str


@dataclass(frozen=True)
class TokenFile:
    """A token file on disk. Small: it can be sent to other processes, which map it themselves."""

    path: Path
    index: TokenIndex

    @classmethod
    def open(cls, cache: Cache, path: Path) -> TokenFile | None:
        """The token file at `path` if it is whole, else None."""
        facts = cache.read(path)
        names = {field.name for field in fields(TokenIndex)}
        if facts is None or not names <= facts.keys():
            return None
        return cls(path, TokenIndex(**{name: facts[name] for name in names}))

    def map(self) -> NDArray[np.unsignedinteger]:
        """The ids, shape (tokens,), read from the disk as they are used."""
        return np.memmap(self.path, dtype=self.index.dtype, mode="r", shape=(self.index.tokens,))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises DataError (file and offset) if an id is not below the model's `vocab_size`."""
        if self.index.largest_id < vocab_size:
            return
        offset, token_id = self._first_beyond(vocab_size)
        raise DataError(
            f"every token id must be below model.vocab_size ({vocab_size}), and {self.path} has "
            f"id {token_id} at token {offset} (byte {offset * self.map().itemsize}); its largest "
            f"id is {self.index.largest_id}: set model.vocab_size to at least "
            f"{self.index.largest_id + 1} or use another tokenizer"
        )

    def _first_beyond(self, vocab_size: int) -> tuple[int, int]:
        ids = self.map()
        for start in range(0, len(ids), _SCANNED_AT_ONCE_TOKENS):
            beyond = np.flatnonzero(ids[start : start + _SCANNED_AT_ONCE_TOKENS] >= vocab_size)
            if len(beyond):
                offset = start + int(beyond[0])
                return offset, int(ids[offset])
        raise AssertionError(f"{self.path}: no id is as large as its index says")


def write_tokens(
    cache: Cache, path: Path, documents: list[Document], tokenizer: TextTokenizer
) -> TokenFile:
    """Tokenizes the documents into `path`. Only under the cache's lock."""
    dtype: Literal["<u2", "<u4"] = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"

    def fill(stream: BinaryIO) -> Facts:
        tokens, largest_id = 0, tokenizer.end_of_text
        for ids in packed_ids(documents, tokenizer):
            stream.write(ids.astype(dtype).tobytes())
            tokens += len(ids)
            largest_id = max(largest_id, int(ids.max(initial=0)))
        return asdict(
            TokenIndex(
                tokens=tokens,
                documents=len(documents),
                dtype=dtype,
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
) -> Iterator[NDArray[np.int64]]:
    """The ids of all documents with an end-of-text token after each, in stretches of any length."""
    texts: list[str] = []
    ends: list[bool] = []
    characters = 0
    for piece in read_pieces(documents):
        texts.append(piece.text)
        ends.append(piece.ends_document)
        characters += len(piece.text)
        if characters >= _ENCODED_AT_ONCE_CHARACTERS:
            yield _pack(texts, ends, tokenizer)
            texts, ends, characters = [], [], 0
    if texts:
        yield _pack(texts, ends, tokenizer)


def _pack(texts: list[str], ends: list[bool], tokenizer: TextTokenizer) -> NDArray[np.int64]:
    packed: list[int] = []
    for ids, ends_document in zip(tokenizer.encode(texts), ends, strict=True):
        packed.extend(ids)
        if ends_document:
            packed.append(tokenizer.end_of_text)
    return np.asarray(packed, dtype=np.int64)

"""A file of token ids: integers, mapped into memory.

    document 0 . end-of-text . document 1 . end-of-text . ...

The file contains only the ids. The index states their type, and facts for which all ids would have
to be read.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from megaspeed.data.errors import DataError

IdType = Literal["<u2", "<u4"]
"""How an id is written, in numpy's notation: little-endian, unsigned, 2 or 4 bytes."""

_BLOCK_TOKENS = 1 << 22


def id_type(vocab_size: int) -> IdType:
    """Return the smallest type that holds every id below ``vocab_size``."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def in_blocks(ids: NDArray[np.integer]) -> Iterator[tuple[int, NDArray[np.integer]]]:
    """Yield (number of earlier ids, some ids), so that little of a mapped file is in memory."""
    for start in range(0, len(ids), _BLOCK_TOKENS):
        yield start, np.asarray(ids[start : start + _BLOCK_TOKENS])


def document_ends(ids: NDArray[np.integer], end_of_text: int | None) -> NDArray[np.int64]:
    """Return the number of ids up to the end of each document."""
    ends = [start + 1 + np.flatnonzero(block == end_of_text) for start, block in in_blocks(ids)]
    return np.concatenate([np.empty(0, np.int64), *ends])


@dataclass(frozen=True)
class TokenIndex:
    """What is known about a token file; None if its format does not state it."""

    tokens: int  # number of ids in the file, including end-of-text tokens
    # Number of documents. An end-of-text token, if there is one, follows each.
    documents: int | None
    dtype: IdType  # the type of the ids in the file
    largest_id: int  # an upper bound of the ids in the file
    end_of_text: int | None  # the id that ends every document and occurs nowhere else
    tokenizer_fingerprint: str | None  # sha256 of the tokenizer as JSON
    # sha256 over the documents' names, sizes and contents; over the ids if megaspeed did not make
    # the file from text.
    corpus_fingerprint: str


@dataclass(frozen=True)
class TokenFile:
    """A token file on disk, or a part of one. It is small and can be pickled."""

    path: Path
    index: TokenIndex  # what is known about the file, or about the part
    first_token: int = 0  # the index of the part's first token in the file

    @property
    def is_missing(self) -> bool:
        """Whether ``map`` waits until the file exists."""
        return False

    def map(self) -> NDArray[np.integer]:
        """Return the ids, shape (tokens,), read from the disk as they are used.

        Raises DataError if the file is shorter than its index states.
        """
        dtype, tokens = np.dtype(self.index.dtype), self.index.tokens
        offset = self.first_token * dtype.itemsize
        stop, size = offset + tokens * dtype.itemsize, self.path.stat().st_size
        if size < stop:
            raise DataError(
                f"a token file must not change after it was opened, but {self.path} had at "
                f"least {stop} bytes and has {size}; write it again and restart"
            )
        return np.memmap(self.path, dtype=dtype, mode="r", offset=offset, shape=(tokens,))

    def stretch(self, first_token: int, tokens: int) -> Self:
        """Return a part of the file, with its own fingerprint."""
        assert first_token >= 0 and first_token + tokens <= self.index.tokens
        named = f"{self.index.corpus_fingerprint}:{first_token}:{tokens}"
        index = replace(
            self.index,
            tokens=tokens,
            documents=None,
            corpus_fingerprint=hashlib.sha256(named.encode()).hexdigest(),
        )
        return replace(self, index=index, first_token=self.first_token + first_token)

    def large_id(self, vocab_size: int) -> str | None:
        """Return a problem if an id is not below the model's ``vocab_size``, with its place."""
        if self.index.largest_id < vocab_size:
            return None
        for start, block in in_blocks(self.map()):
            too_large = np.flatnonzero(block >= vocab_size)
            if len(too_large):
                token = self.first_token + start + int(too_large[0])
                return (
                    f"every token id must be below model.vocab_size ({vocab_size}), but "
                    f"{self.path} has id {int(block[too_large[0]])} at token {token} (byte "
                    f"{token * block.itemsize}); its largest id is {self.index.largest_id}: set "
                    f"model.vocab_size to at least {self.index.largest_id + 1} or use another "
                    "tokenizer"
                )
        return None  # the too large id is in another part of the file, or in another shard

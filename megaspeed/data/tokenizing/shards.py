"""Ids to shards: files of about so many tokens, each of which ends with a document.

tokens-00000.bin    |----|--|-----------|---|      closed by the document that fills it
tokens-00001.bin    |-------|--|------             open; cut back to here when work goes on
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from megaspeed.data.errors import DataError
from megaspeed.data.tokens.packing import IdType, Packed
from megaspeed.data.tokens.token_folder import SHARDS, Shard

_READ_AT_ONCE_BYTES = 1 << 20


@dataclass(frozen=True)
class Shards:
    """What is written.

    Attributes:
        closed: the shards that are complete.
        open_tokens, open_documents: in the one that is not.
    """

    closed: tuple[Shard, ...] = ()
    open_tokens: int = 0
    open_documents: int = 0

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.closed) + self.open_tokens

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.closed) + self.open_documents


class ShardWriter:
    """Appends ids, and begins a new shard where one is full.

    Attributes:
        written: what has been appended; on the disk only after `flush`.
    """

    def __init__(self, folder: Path, dtype: IdType, shard_tokens: int, written: Shards) -> None:
        """
        Args:
            folder: where the shards are.
            dtype: of the ids.
            shard_tokens: how many fill a shard.
            written: where to go on; whatever else is in the folder's shards is removed.

        Raises:
            DataError: a shard is shorter than `written` says.
        """
        self._folder, self._dtype, self._shard_tokens = folder, np.dtype(dtype), shard_tokens
        self._stream: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self.written = written
        self._cut_back()

    def write(self, packed: Packed) -> None:
        """Appends ids that go on where the last ones ended."""
        ends = packed.document_ends
        start = documents = 0
        while True:
            room = self._shard_tokens - self.written.open_tokens
            fills_it = int(np.searchsorted(ends, start + room))
            if fills_it == len(ends):
                break
            self._append(packed.ids[start : ends[fills_it]], fills_it + 1 - documents)
            self._close_shard()
            start, documents = int(ends[fills_it]), fills_it + 1
        self._append(packed.ids[start:], len(ends) - documents)

    def flush(self) -> None:
        """Brings everything that is written to the disk."""
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())

    def finish(self) -> Shards:
        """Completes the last shard."""
        if self.written.open_tokens:
            self._close_shard()
        return self.written

    def close(self) -> None:
        """Closes the open file, and leaves the shard as it is."""
        if self._stream is not None:
            self._stream.close()

    def _append(self, ids: NDArray[np.unsignedinteger], documents: int) -> None:
        if not len(ids):
            return
        if self._stream is None:
            self._stream = self._path(len(self.written.closed)).open("wb")
            self._digest = hashlib.sha256()
        content = ids.astype(self._dtype, copy=False).tobytes()
        self._stream.write(content)
        self._digest.update(content)
        self.written = replace(
            self.written,
            open_tokens=self.written.open_tokens + len(ids),
            open_documents=self.written.open_documents + documents,
        )

    def _close_shard(self) -> None:
        assert self._stream is not None
        self.flush()
        self._stream.close()
        self._stream = None
        whole = self.written
        shard = Shard(
            self._path(len(whole.closed)).name,
            whole.open_tokens,
            whole.open_documents,
            self._digest.hexdigest(),
        )
        self.written = Shards((*whole.closed, shard))

    def _cut_back(self) -> None:
        """The shards hold what is written and no more."""
        written = self.written
        kept = {shard.file: shard.tokens for shard in written.closed}
        if written.open_tokens:
            kept[self._path(len(kept)).name] = written.open_tokens
        for path in self._folder.glob(SHARDS):
            if path.name not in kept:
                path.unlink()
        for name, tokens in kept.items():
            _check_length(self._folder / name, tokens * self._dtype.itemsize)
        if written.open_tokens:
            self._reopen(self._path(len(written.closed)))

    def _reopen(self, path: Path) -> None:
        stream = path.open("r+b")
        stream.truncate(self.written.open_tokens * self._dtype.itemsize)
        while content := stream.read(_READ_AT_ONCE_BYTES):
            self._digest.update(content)
        self._stream = stream

    def _path(self, number: int) -> Path:
        return self._folder / f"tokens-{number:05}.bin"


def _check_length(path: Path, expected_bytes: int) -> None:
    size = path.stat().st_size if path.exists() else 0
    if size < expected_bytes:
        raise DataError(
            f"tokenizing goes on from what is on the disk, and {path} has {size} bytes where its "
            f"journal says {expected_bytes}; begin anew with --fresh"
        )

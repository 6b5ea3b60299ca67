"""Ids to shards: files of about so many tokens, each of which ends with a document.

tokens-00000.bin    |----|--|-----------|---|      closed by the document that fills it
tokens-00001.bin    |-------|--|------             open; cut back to here when work goes on
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megaspeed.data.tokenizing.growing_file import GrowingFile, check_length
from megaspeed.data.tokens.packing import IdType, Packed
from megaspeed.data.tokens.token_folder import SHARDS, Shard


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
        self.written = written
        self._open = self._cut_back()

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
        self._open.flush()

    def finish(self) -> Shards:
        """Completes the last shard."""
        if self.written.open_tokens:
            self._close_shard()
        return self.written

    def close(self) -> None:
        """Closes the open file, and leaves the shard as it is."""
        self._open.close()

    def _append(self, ids: NDArray[np.unsignedinteger], documents: int) -> None:
        if not len(ids):
            return
        self._open.append(ids.astype(self._dtype, copy=False).tobytes())
        self.written = replace(
            self.written,
            open_tokens=self.written.open_tokens + len(ids),
            open_documents=self.written.open_documents + documents,
        )

    def _close_shard(self) -> None:
        self._open.flush()
        self._open.close()
        whole = self.written
        shard = Shard(
            self._path(len(whole.closed)).name,
            whole.open_tokens,
            whole.open_documents,
            self._open.hexdigest(),
        )
        self.written = Shards((*whole.closed, shard))
        self._open = GrowingFile(self._path(len(self.written.closed)), 0)

    def _cut_back(self) -> GrowingFile:
        """The shards hold what is written and no more; the one that is open."""
        closed, item_bytes = self.written.closed, self._dtype.itemsize
        open_path = self._path(len(closed))
        kept = {shard.file: shard.tokens for shard in closed}
        for path in self._folder.glob(SHARDS):
            if path.name not in kept and path != open_path:
                path.unlink()
        for name, tokens in kept.items():
            check_length(self._folder / name, tokens * item_bytes)
        return GrowingFile(open_path, self.written.open_tokens * item_bytes)

    def _path(self, number: int) -> Path:
        return self._folder / f"tokens-{number:05}.bin"

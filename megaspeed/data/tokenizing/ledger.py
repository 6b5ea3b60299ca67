"""A file of lines that only grows, and is cut back to a known length when work goes on."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

from megaspeed.data.errors import DataError

_READ_AT_ONCE_BYTES = 1 << 20


class Ledger:
    """Lines in the order in which they came. Where there are none there is no file.

    Attributes:
        size_bytes: of all lines; on the disk only after `flush`.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        """Goes on behind the first `size_bytes` of the file; what else it holds is removed.

        Raises:
            DataError: the file is shorter than that.
        """
        self._path, self.size_bytes = path, size_bytes
        self._digest = hashlib.sha256()
        self._stream: BinaryIO | None = None
        if size_bytes == 0:
            path.unlink(missing_ok=True)
        else:
            self._cut_back()

    def append(self, line: bytes) -> None:
        """Adds a line, its end included."""
        if self._stream is None:
            self._stream = self._path.open("wb")
        self._stream.write(line)
        self._digest.update(line)
        self.size_bytes += len(line)

    def flush(self) -> None:
        """Brings every line to the disk."""
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())

    def hexdigest(self) -> str:
        """sha256 of all lines."""
        return self._digest.hexdigest()

    def close(self) -> None:
        """Closes the file."""
        if self._stream is not None:
            self._stream.close()

    def _cut_back(self) -> None:
        found = self._path.stat().st_size if self._path.exists() else 0
        if found < self.size_bytes:
            raise DataError(
                f"tokenizing goes on from what is on the disk, and {self._path} has {found} bytes "
                f"where its journal says {self.size_bytes}; begin anew with --fresh"
            )
        self._stream = self._path.open("r+b")
        self._stream.truncate(self.size_bytes)
        while content := self._stream.read(_READ_AT_ONCE_BYTES):
            self._digest.update(content)

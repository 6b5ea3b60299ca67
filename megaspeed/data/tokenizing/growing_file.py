"""A file that only grows, and is cut back to a known length when work goes on.

known length  |---------------|
on the disk   |---------------+----|      what a kill left behind it is cut off,
hash          |===============>           what stays is hashed again, and then it grows
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from megaspeed.data.errors import DataError

_READ_AT_ONCE_BYTES = 1 << 20


class GrowingFile:
    """Bytes in the order in which they came. Where there are none there is no file.

    Every OSError names the file.

    Attributes:
        size_bytes: of all; on the disk only after `flush`.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        """Goes on behind the first `size_bytes` of the file; what else it holds is removed.

        Raises:
            DataError: the file is shorter than that.
        """
        self._path, self.size_bytes = path, size_bytes
        self._digest = hashlib.sha256()
        self._stream: BinaryIO | None = None
        with self._named():
            if size_bytes == 0:
                path.unlink(missing_ok=True)
            else:
                self._cut_back()

    def append(self, content: bytes) -> None:
        """Adds to the end."""
        with self._named():
            if self._stream is None:
                self._stream = self._path.open("wb")
            self._stream.write(content)
        self._digest.update(content)
        self.size_bytes += len(content)

    def flush(self) -> None:
        """Brings every byte to the disk."""
        if self._stream is not None:
            with self._named():
                self._stream.flush()
                os.fsync(self._stream.fileno())

    def hexdigest(self) -> str:
        """sha256 of all bytes."""
        return self._digest.hexdigest()

    def close(self) -> None:
        """Closes the file."""
        if self._stream is not None:
            with self._named():
                self._stream.close()

    def _cut_back(self) -> None:
        check_length(self._path, self.size_bytes)
        self._stream = self._path.open("r+b")
        self._stream.truncate(self.size_bytes)
        while content := self._stream.read(_READ_AT_ONCE_BYTES):
            self._digest.update(content)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """A full disk is told of without a name."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error


def check_length(path: Path, expected_bytes: int) -> None:
    """Raises DataError where the file is shorter than a journal says."""
    size_bytes = path.stat().st_size if path.exists() else 0
    if size_bytes < expected_bytes:
        raise DataError(
            f"tokenizing goes on from what is on the disk, and {path} has {size_bytes} bytes where "
            f"its journal says {expected_bytes}; begin anew with --fresh"
        )

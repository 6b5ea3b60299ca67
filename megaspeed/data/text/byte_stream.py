"""The bytes of a file as they are read: the file's own, or those of its `.gz` or `.zst` archive.

An archive is uncompressed as it is read, its checksums are checked, and a cut or damaged one is a
bad record that says how far it could be read.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megaspeed.data.text.pieces import BadRecord, OnBad
from megaspeed.data.text.records import BRING_AGAIN

ARCHIVES = {".gz": "gzip", ".zst": "zstd"}
"""Suffix -> name of the compression."""

_READ_AT_ONCE_BYTES = 1 << 16


class ByteStream:
    """Bytes in order, of one file. A context manager.

    Attributes:
        position: bytes that are behind, uncompressed; those that were passed over too.
    """

    def __init__(self, path: Path, on_bad: OnBad, after: int = 0) -> None:
        """
        Args:
            path: the file.
            on_bad: told where the file cannot be read to its end; the stream ends there.
            after: bytes to pass over, uncompressed.

        Raises:
            OSError: the file cannot be opened.
        """
        self._path, self._on_bad, self._after = path, on_bad, after
        self._disk, self._bytes = _open(path)
        self._is_broken = False
        self._lines = 0
        self.position = 0
        if self._disk is None:
            self.position = self._bytes.seek(after)
        while rest := min(after - self.position, _READ_AT_ONCE_BYTES):
            if not self.read(rest):
                break

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bytes.close()

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer only at the end, none behind it."""
        taken = bytearray()
        # A little at a time: what one call has read before it meets the damage is lost with it.
        while room := min(size - len(taken), _READ_AT_ONCE_BYTES):
            chunk = self._next(partial(self._bytes.read1, room))
            if not chunk:
                break
            taken += chunk
        return bytes(taken)

    def line(self) -> bytes:
        """The next line with its end; empty behind the last one."""
        line = self._next(self._bytes.readline)
        self._lines += 1
        return line

    def line_number(self) -> int:
        """Of the line that was read last, counted from 1 at the beginning of the file."""
        return self._lines_passed_over + self._lines

    @property
    def disk_bytes(self) -> int:
        """How much of the file on disk is behind."""
        return self.position if self._disk is None else int(self._disk.tell())

    @property
    def doubt(self) -> str:
        """Put behind what is wrong with the bytes: an archive may be why. Empty for a plain file.

        Few archives have a checksum before their end.
        """
        return "" if self._disk is None else f" (the {self._kind} may be damaged)"

    @property
    def _kind(self) -> str:
        return "file" if self._disk is None else f"{ARCHIVES[self._path.suffix.lower()]} archive"

    @cached_property
    def _lines_passed_over(self) -> int:
        """Counted only when a number is asked for, because it takes reading them."""
        lines = 0
        with ByteStream(self._path, self._on_bad) as passed_over:
            while rest := min(self._after - passed_over.position, _READ_AT_ONCE_BYTES):
                lines += passed_over.read(rest).count(b"\n")
        return lines

    def _next(self, read: Callable[[], bytes]) -> bytes:
        if self._is_broken:
            return b""
        try:
            data = read()
        except OSError as error:
            self._is_broken = True
            self._on_bad(self._broken(error))
            return b""
        if not data and self._disk is not None and self._disk.tell() == 0:
            self._is_broken = True
            self._on_bad(self._broken("even of no text it has a header"))
        self.position += len(data)
        return data

    def _broken(self, why: OSError | str) -> BadRecord:
        size = self._path.stat().st_size
        return BadRecord(
            self._path,
            f"byte {self.disk_bytes:,} of {size:,} on disk",
            f"the {self._kind} is damaged or cut short and cannot be read on ({why}); "
            f"{self.position:,} bytes of text could be read",
            BRING_AGAIN,
        )


def _open(path: Path) -> tuple[Any, io.BufferedReader]:
    """(the compressed file, None where it is none; the bytes of the text)."""
    compression = ARCHIVES.get(path.suffix.lower())
    if compression is None:
        return None, io.BufferedReader(path.open("rb", buffering=0), _READ_AT_ONCE_BYTES)
    import pyarrow  # slow to import, and rarely needed

    disk = pyarrow.OSFile(str(path), "rb")
    return disk, io.BufferedReader(
        pyarrow.CompressedInputStream(disk, compression), _READ_AT_ONCE_BYTES
    )

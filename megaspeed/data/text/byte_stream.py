"""The bytes of a file as they are read: the file's own, or those of its `.gz` or `.zst` archive.

An archive is uncompressed as it is read, and its checksums are checked. A cut or damaged one can be
read up to the block that meets the damage:

    blocks   |------|------|------|---x        always on the same grid, from byte 0 of the text
    text     what is before a mark is passed over, and ends here: |

so the text that comes behind a mark is the same wherever reading began.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megaspeed.data.text.pieces import BadRecord, OnBad
from megaspeed.data.text.records import BRING_AGAIN

ARCHIVES = {".gz": "gzip", ".zst": "zstd"}
"""Suffix -> name of the compression."""

_BLOCK_BYTES = 1 << 16
_DAMAGE = (OSError, EOFError, zlib.error)


class ByteStream:
    """Bytes in order, of one file. A context manager.

    Attributes:
        position: bytes that are behind, uncompressed; those that were passed over too.
    """

    def __init__(self, path: Path, after: int = 0) -> None:
        """
        Args:
            path: the file. Where it cannot be read to its end, the stream ends before the damage.
            after: bytes to pass over, uncompressed.

        Raises:
            OSError: the file cannot be opened.
        """
        self._path, self._after = path, after
        self._disk, self._bytes = _open(path)
        self._damage: BadRecord | None = None
        self._lines = 0
        self.position = 0
        if self._disk is None:
            self.position = self._bytes.seek(after)
        while rest := min(after - self.position, _BLOCK_BYTES):
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
        while room := min(size - len(taken), _BLOCK_BYTES):
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

    def tell_damage(self, on_bad: OnBad) -> None:
        """Tells why the stream ended before the file did, if it did.

        For when all that comes before the damage is used: what reads ahead meets it earlier.
        """
        if self._damage is not None:
            on_bad(self._damage)

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
        with ByteStream(self._path) as passed_over:
            while rest := min(self._after - passed_over.position, _BLOCK_BYTES):
                lines += passed_over.read(rest).count(b"\n")
        return lines

    def _next(self, read: Callable[[], bytes]) -> bytes:
        if self._damage is not None:
            return b""
        try:
            data = read()
        except _DAMAGE as error:
            self._damage = self._broken(error)
            return b""
        if not data and self._disk is not None and self._disk.tell() == 0:
            self._damage = self._broken("even of no text it has a header")
        self.position += len(data)
        return data

    def _broken(self, why: Exception | str) -> BadRecord:
        size = self._path.stat().st_size
        return BadRecord(
            self._path,
            f"byte {self.disk_bytes:,} of {size:,} on disk",
            f"the {self._kind} is damaged or cut short and cannot be read on ({why}); "
            f"{self.position:,} bytes of text could be read",
            BRING_AGAIN,
        )


class _Blocks(io.RawIOBase):
    """The text of an archive, read in blocks of one size however little is asked for.

    What a block has before it meets the damage is lost with it.
    """

    def __init__(self, disk: Any, uncompressed: Any) -> None:
        self._disk, self._uncompressed = disk, uncompressed
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        if not self._rest:
            self._rest = memoryview(self._uncompressed.read(_BLOCK_BYTES))
        taken = self._rest[: len(room)]
        room[: len(taken)] = taken
        self._rest = self._rest[len(taken) :]
        return len(taken)

    def close(self) -> None:
        self._uncompressed.close()
        self._disk.close()
        super().close()


def _open(path: Path) -> tuple[Any, io.BufferedReader]:
    """(the compressed file, None where it is none; the bytes of the text)."""
    compression = ARCHIVES.get(path.suffix.lower())
    if compression is None:
        return None, io.BufferedReader(path.open("rb", buffering=0), _BLOCK_BYTES)
    disk, uncompressed = _uncompressed(path, compression)
    return disk, io.BufferedReader(_Blocks(disk, uncompressed), _BLOCK_BYTES)


def _uncompressed(path: Path, compression: str) -> tuple[Any, Any]:
    """(the compressed file, what reads from it)."""
    if compression == "gzip" and _may_be_padded(path):
        # Slower than Arrow, which takes the zeros behind an archive for another one.
        padded = path.open("rb")
        return padded, gzip.GzipFile(fileobj=padded)
    import pyarrow  # slow to import, and rarely needed

    disk = pyarrow.OSFile(os.fsencode(path), "rb")  # a name in str would have to be UTF-8
    return disk, pyarrow.CompressedInputStream(disk, compression)


def _may_be_padded(path: Path) -> bool:
    """Whether the last byte is zero: of padding to whole blocks, or of the size of a short text."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\0"

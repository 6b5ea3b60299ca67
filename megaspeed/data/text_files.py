"""Read plain text and JSON lines, uncompressed or compressed as ``.gz`` or ``.zst``.

An archive is decompressed while it is read, and its checksums are verified. If it is truncated or
damaged, the text before the damage is used, and then the damage is reported.
"""

import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from megaspeed.data.pieces import (
    COPY_AGAIN,
    CORRECT_IT,
    PIECE_BYTES,
    STATE_FIELD,
    BadRecord,
    OnBad,
    Piece,
    TextFormat,
    cut_at_most,
    no_such_field,
    pieces_of,
    what_is_wrong,
)

ARCHIVES = {".gz": "gzip", ".zst": "zstd"}
"""Suffix -> name of the compression."""

DOCUMENT_SEPARATOR = b"<|endoftext|>"
_BOM = "\ufeff"  # ignored at the beginning of a file
_READ_BYTES = 1 << 16
# Longer than any document worth having. Reading such a line takes three times as much memory.
_LONGEST_LINE_BYTES = 1 << 30
# A piece, and enough bytes after it to see a separator with its line end.
_WINDOW_BYTES = PIECE_BYTES + len(DOCUMENT_SEPARATOR) + len(b"\r\n")


class ByteStream:
    """The bytes of a file, decompressed.

    Attributes:
        position: bytes read so far, decompressed.
        lines: lines read so far.
    """

    def __init__(self, path: Path) -> None:
        """
        Raises:
            OSError: the file cannot be opened.
        """
        self._path = path
        self._compression = ARCHIVES.get(path.suffix.lower())
        self._disk, self._bytes = _open(path, self._compression)
        self._damage: BadRecord | None = None
        self.position = self.lines = 0

    def close(self) -> None:
        self._bytes.close()
        self._disk.close()

    def read(self, size: int) -> bytes:
        """Return the next ``size`` bytes; fewer only at the end of the file, or before damage."""
        found = bytearray()
        while size > len(found):
            block = self._next(self._bytes.read1, min(size - len(found), _READ_BYTES))
            if not block:
                break
            found += block
        return bytes(found)

    def line(self) -> bytes:
        """Read a line and its end, or the start of one that is too long; empty after the last."""
        self.lines += 1
        return self._next(self._bytes.readline, _LONGEST_LINE_BYTES + 1)

    def skip_line(self) -> None:
        """Read on to the end of a line, and keep nothing of it."""
        while self._next(self._bytes.readline, _READ_BYTES)[-1:] not in (b"", b"\n"):
            pass

    def report_damage(self, on_bad: OnBad) -> None:
        """Report why the stream ended early, if it did. Call it after all bytes are used."""
        if self._damage is not None:
            on_bad(self._damage)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the file on disk that were read so far."""
        return self.position if self._compression is None else int(self._disk.tell())

    @property
    def damage_hint(self) -> str:
        """Appended to a problem: an archive may be damaged. Empty without an archive."""
        return "" if self._compression is None else f" (the {self._kind} may be damaged)"

    @property
    def _kind(self) -> str:
        return "file" if self._compression is None else f"{self._compression} archive"

    def _next(self, read: Callable[..., bytes], *size: int) -> bytes:
        if self._damage is not None:
            return b""
        try:
            data = read(*size)
            if not data and self._compression is not None and self._disk.tell() == 0:
                raise EOFError("the file is empty, without an archive's header")
        except (OSError, EOFError, zlib.error) as error:
            self._damage = BadRecord(
                self._path,
                f"byte {self.disk_bytes:,} of {self._path.stat().st_size:,} on disk",
                f"the {self._kind} is damaged or truncated and cannot be read further ({error}); "
                f"{self.position:,} bytes of text could be read",
                COPY_AGAIN,
            )
            return b""
        self.position += len(data)
        return data


def _open(path: Path, compression: str | None) -> tuple[Any, Any]:
    """Return (the file on disk, a buffered reader of its decompressed bytes)."""
    if compression == "zstd":
        import pyarrow  # slow to import, and rarely needed

        disk = pyarrow.OSFile(os.fsencode(path), "rb")  # a str would have to be UTF-8
        stream: Any = pyarrow.CompressedInputStream(disk, compression)
        return disk, io.BufferedReader(stream, _READ_BYTES)
    disk = path.open("rb")
    return disk, disk if compression is None else gzip.GzipFile(fileobj=disk)


@dataclass(frozen=True, slots=True)
class PlainText(TextFormat):
    """UTF-8 text: one document, or several with ``<|endoftext|>`` between them."""

    def pieces(self, path: Path, on_bad: OnBad) -> Iterator[Piece]:
        with closing(ByteStream(path)) as stream:
            has_text = is_bad = False  # of the document that is being read
            for start, content, ends_document in _cut(stream):
                text = ""
                try:
                    # After bytes that are not UTF-8, the rest of a document is skipped.
                    text = "" if is_bad else content.decode("utf-8")
                except UnicodeDecodeError as error:
                    is_bad = True
                    on_bad(_not_utf8(path, start, content[error.start], error, stream.damage_hint))
                if start == 0:
                    text = text.removeprefix(_BOM)
                if text or (ends_document and has_text):
                    yield Piece(text, ends_document, stream.disk_bytes)
                has_text = not ends_document and (has_text or bool(text))
                is_bad = is_bad and not ends_document
            stream.report_damage(on_bad)


def _cut(stream: ByteStream) -> Iterator[tuple[int, bytes, bool]]:
    """Yield (offset in the text, a piece of one document, whether the document ends there)."""
    start, window = 0, bytearray()
    while window := window + stream.read(_WINDOW_BYTES - len(window)):
        separator = window.find(DOCUMENT_SEPARATOR, 0, _WINDOW_BYTES - len(b"\r\n"))
        if separator >= 0:
            stop = separator
            following = stop + len(DOCUMENT_SEPARATOR)
            # The line end after a separator belongs to it.
            line_ends = (end for end in (b"\r\n", b"\n") if window.startswith(end, following))
            following += len(next(line_ends, b""))
        elif len(window) > PIECE_BYTES:
            following = stop = cut_at_most(window, PIECE_BYTES)
        else:
            following = stop = len(window)
        ends_document = separator >= 0 or stop == len(window)
        yield start, bytes(window[:stop]), ends_document
        del window[:following]
        start += following


def _not_utf8(path: Path, start: int, byte: int, error: UnicodeDecodeError, hint: str) -> BadRecord:
    return BadRecord(
        path,
        f"byte {start + error.start:,}",
        f"text must be UTF-8, but this byte is 0x{byte:02x} ({error.reason}){hint}",
        "convert the file, for example with iconv -t UTF-8",
    )


class _NoText(Exception):
    """A line has no text. Contains the reason and how to fix it."""

    def __init__(
        self, problem: str, mend: str = CORRECT_IT, *, may_be_damage: bool = False
    ) -> None:
        self.problem, self.mend, self.may_be_damage = problem, mend, may_be_damage


_DECODER = json.JSONDecoder(object_pairs_hook=tuple)
"""An object becomes a tuple of pairs, so that repeated keys are seen."""


@dataclass(frozen=True, slots=True)
class JsonLines(TextFormat):
    """One JSON object on each line. One of its fields is the text of a document.

    Attributes:
        text_field: the name of this field.
    """

    has_records: ClassVar[bool] = True
    text_field: str = "text"

    def pieces(self, path: Path, on_bad: OnBad) -> Iterator[Piece]:
        with closing(ByteStream(path)) as stream:
            start = 0
            while line := stream.line():
                text = ""
                try:
                    text = self._text_of(line if start else line.removeprefix(_BOM.encode()))
                except _NoText as wrong:
                    where = f"line {stream.lines:,} (byte {start:,})"
                    hint = stream.damage_hint if wrong.may_be_damage else ""
                    on_bad(BadRecord(path, where, wrong.problem + hint, wrong.mend))
                if len(line) > _LONGEST_LINE_BYTES and not line.endswith(b"\n"):
                    stream.skip_line()
                if text:
                    yield from pieces_of(text, stream.disk_bytes)
                start = stream.position
            stream.report_damage(on_bad)

    def _text_of(self, line: bytes) -> str:
        if len(line) > _LONGEST_LINE_BYTES:
            raise _NoText(
                f"a line must have at most {_LONGEST_LINE_BYTES:,} bytes, because it is read into "
                "memory, but this one has more",
                "divide its document among several lines, or into files of plain text, which may "
                "have any length",
            )
        if not line.strip():
            return ""
        record, field = _parsed(line), self.text_field
        texts = [value for key, value in record if key == field]
        if not texts:
            names = dict.fromkeys(key for key, _ in record)
            raise _NoText(no_such_field(field, names, "field"), f"{STATE_FIELD}, or {CORRECT_IT}")
        if len(texts) > 1:
            raise _NoText(f'a line must have one field "{field}", but has {len(texts)}')
        wrong = what_is_wrong(texts[0])
        if wrong is not None:
            raise _NoText(f'the field "{field}" must be a string, but is {wrong}')
        return str(texts[0])


def _parsed(line: bytes) -> tuple[tuple[str, object], ...]:
    """Return the keys and values of the object in a line."""
    law = "a line must be one JSON object in UTF-8, but this one"
    try:
        record = _DECODER.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        problem = f"has 0x{line[error.start]:02x} at byte {error.start:,} of the line"
        raise _NoText(f"{law} {problem} ({error.reason})", may_be_damage=True) from None
    except json.JSONDecodeError as error:
        problem = f"is not JSON ({error.msg} at character {error.pos:,})"
        raise _NoText(f"{law} {problem}", may_be_damage=True) from None
    except (ValueError, RecursionError) as error:  # a number or a depth that is too large
        raise _NoText(f"{law} cannot be read as JSON ({error})", may_be_damage=True) from None
    if not isinstance(record, tuple):
        raise _NoText(f"{law} is {what_is_wrong(record) or 'a string'}")
    return record

"""Plain UTF-8 text: one document, or several where `<|endoftext|>` stands between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megaspeed.data.text.byte_stream import ByteStream
from megaspeed.data.text.cutting import cut_at_most
from megaspeed.data.text.pieces import PIECE_BYTES, BadRecord, OnBad, Piece
from megaspeed.data.text.text_format import TextFormat

DOCUMENT_SEPARATOR = b"<|endoftext|>"
_LINE_ENDS = (b"\r\n", b"\n")
_BYTE_ORDER_MARK = "\ufeff"  # at the beginning of a file it is no text
# A piece, and as much behind it as tells whether a separator follows.
_WINDOW_BYTES = PIECE_BYTES + len(DOCUMENT_SEPARATOR) + len(_LINE_ENDS[0])


@dataclass(frozen=True, slots=True)
class PlainText(TextFormat):
    """A mark is the byte, in the text, behind the separator that ends a document."""

    def pieces(self, path: Path, after: int, on_bad: OnBad) -> Iterator[Piece]:
        with ByteStream(path, after) as stream:
            yield from _decoded(path, _Stretches(stream), stream, on_bad)
            stream.tell_damage(on_bad)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Bytes `start` and on of the text: at most a piece of one document."""

    start: int
    content: bytes
    ends_document: bool
    mark: int


class _Stretches:
    """The text cut at separators and, where a document is longer than a piece, within."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._start = stream.position  # of the window
        self._window = bytearray()

    def __iter__(self) -> Iterator[_Stretch]:
        while self._fill():
            separator = self._window.find(DOCUMENT_SEPARATOR, 0, _WINDOW_BYTES - 2)
            if separator >= 0:
                yield self._take(separator, self._behind(separator))
            elif len(self._window) > PIECE_BYTES:
                cut = cut_at_most(self._window, PIECE_BYTES)
                yield self._take(cut, cut, ends_document=False)
            else:
                yield self._take(len(self._window), len(self._window))

    def _fill(self) -> bool:
        """Reads until the window is full or the text ends; whether anything is in it."""
        self._window += self._stream.read(_WINDOW_BYTES - len(self._window))
        return len(self._window) > 0

    def _behind(self, separator: int) -> int:
        """Where the next document begins: a separator takes the end of its own line with it."""
        behind = separator + len(DOCUMENT_SEPARATOR)
        for line_end in _LINE_ENDS:
            if self._window.startswith(line_end, behind):
                return behind + len(line_end)
        return behind

    def _take(self, stop: int, behind: int, ends_document: bool = True) -> _Stretch:
        content = bytes(self._window[:stop])
        stretch = _Stretch(self._start, content, ends_document, self._start + behind)
        del self._window[:behind]
        self._start += behind
        return stretch


def _decoded(
    path: Path, stretches: _Stretches, stream: ByteStream, on_bad: OnBad
) -> Iterator[Piece]:
    """The stretches as text. A document is left out from a bad piece on."""
    is_begun = is_left_out = False
    for stretch in stretches:
        text = ""
        if not is_left_out:
            try:
                text = stretch.content.decode("utf-8")
                if stretch.start == 0:
                    text = text.removeprefix(_BYTE_ORDER_MARK)
            except UnicodeDecodeError as error:
                is_left_out = True
                on_bad(_not_utf8(path, stretch, error, stream.doubt))
        is_last_of_some = stretch.ends_document and is_begun
        if text or is_last_of_some:
            yield Piece(text, stretch.ends_document, stretch.mark, stream.disk_bytes)
        is_begun = not stretch.ends_document and (is_begun or bool(text))
        is_left_out = is_left_out and not stretch.ends_document


def _not_utf8(path: Path, stretch: _Stretch, error: UnicodeDecodeError, doubt: str) -> BadRecord:
    byte = stretch.content[error.start]
    return BadRecord(
        path,
        # The offset a person looks for is the one in the text, not in the piece.
        f"byte {stretch.start + error.start:,}",
        f"text must be UTF-8, and this byte is 0x{byte:02x} ({error.reason}){doubt}",
        "convert the file, for example with iconv -t UTF-8",
    )

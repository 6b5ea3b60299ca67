"""The output of every text format: documents in pieces, and records that cannot be used.

    file --its format--> piece . piece . piece(ends document) . piece(ends document) . ...

A piece has at most 256 KiB of UTF-8, so memory does not depend on the length of a document. A
longer document is cut at places that do not change its tokens:

    "... the quick brown| fox ..."      a space belongs to the word after it
    "... the end|\\n    A line ..."       so does a line end

A cut before a space is safe with the common tokenizers. A byte-level BPE splits text into words
before it merges, and a space begins a word. In the vocabulary of a SentencePiece model, the mark of
a space occurs only at the beginning of entries. After a letter or a digit, a line end begins a new
word for all of them, unless the vocabulary was trained across lines. If the last 64 KiB of a piece
have neither, the text is cut between two characters. There, one token may become two.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megaspeed.config.errors import shortened
from megaspeed.data.errors import DataError
from megaspeed.files.paths import FileState, state_of

PIECE_BYTES = 1 << 18
_CUT_WINDOW_BYTES = 1 << 16
_LONGEST_CHARACTER_BYTES = 4
_MARK_OF_A_SPACE = "\u2581"  # how SentencePiece writes it
_FIELDS_SHOWN = 12

CUT_RULE = f"at spaces or line ends in the last {_CUT_WINDOW_BYTES} of {PIECE_BYTES} bytes"
"""Part of every cache key that depends on ids: other cuts change some ids of long documents."""

CORRECT_IT = "correct it"
STATE_FIELD = "name the right one as text_field, or --text-field"
COPY_AGAIN = "copy the complete file here again"
_KINDS: dict[type, str] = {
    dict: "an object",
    list: "a list",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    bytes: "not UTF-8",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive text of one document."""

    text: str
    ends_document: bool  # whether it is the document's last piece
    # Bytes of the file on disk that were read so far, for progress; an estimate for tables.
    read_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record of a file that is not text to train on."""

    path: Path
    where: str  # the place in the file, such as "line 12 (byte 3,456)" or "row 7"
    problem: str  # what was expected, and what was found
    mend: str  # how to fix it

    def __str__(self) -> str:
        return f"{self.path}, {self.where}: {self.problem}; {self.mend}"


OnBad = Callable[[BadRecord], None]
"""Handles a bad record. If it returns, reading continues with the next record."""


def refuse(record: BadRecord) -> None:
    """Raise DataError."""
    raise DataError(f"{record}, or skip bad records with `megaspeed tokenize --skip-bad`")


class TextFormat(ABC):
    """How a file is read. It is small and immutable, because it is sent to other processes."""

    @abstractmethod
    def pieces(self, path: Path, on_bad: OnBad) -> Iterator[Piece]:
        """Yield the text of every document, in order.

        Raises OSError if the file does not exist, or this user may not read it.
        """

    def state(self, path: Path) -> FileState:
        """Size and times of the file, which change if it changes.

        Raises OSError if there is no file.
        """
        return state_of(path)

    def part(self) -> str:
        """Identify one of several texts at the same path; empty if there is only one."""
        return ""


def pieces_of(text: str, read_bytes: int) -> Iterator[Piece]:
    """Yield a document that is in memory, in pieces."""
    if len(text) * _LONGEST_CHARACTER_BYTES <= PIECE_BYTES:
        yield Piece(text, True, read_bytes)
        return
    encoded = text.encode("utf-8")
    start = 0
    while len(encoded) - start > PIECE_BYTES:
        cut = cut_at_most(encoded, start + PIECE_BYTES)
        yield Piece(encoded[start:cut].decode("utf-8"), False, read_bytes)
        start = cut
    yield Piece(encoded[start:].decode("utf-8"), True, read_bytes)


def cut_at_most(text: bytes | bytearray, limit: int) -> int:
    """Return the last place at or before ``limit`` at which the text may be cut.

    Args:
        text: UTF-8, longer than ``limit``, which is more than 64 KiB.
        limit: bytes.
    """
    window = limit - _CUT_WINDOW_BYTES
    for places in (_before_spaces, _before_line_ends):
        for cut in places(text, window, limit):
            return cut
    return next(cut for cut in range(limit, 0, -1) if _begins_character(text[cut]))


def _before_spaces(text: bytes | bytearray, window: int, limit: int) -> Iterator[int]:
    """Cuts before spaces, the last one first.

    Of several spaces, only the first is used, because they may be one token.
    """
    space = text.rfind(b" ", window, limit)
    while space > window:
        character = _character_before(text, space)
        if not character.isspace() and character != _MARK_OF_A_SPACE:
            yield space
        space = text.rfind(b" ", window, space)


def _before_line_ends(text: bytes | bytearray, window: int, limit: int) -> Iterator[int]:
    """Cuts before line ends, the last one first.

    Only those after a letter or digit: a full stop and a line end may be one token.
    """
    line_end = text.rfind(b"\n", window, limit)
    while line_end > window + 1:
        cut = line_end - 1 if text[line_end - 1] == ord("\r") else line_end
        if _character_before(text, cut).isalnum():
            yield cut
        line_end = text.rfind(b"\n", window, line_end)


def _character_before(text: bytes | bytearray, end: int) -> str:
    start = end - 1
    while start > end - _LONGEST_CHARACTER_BYTES and not _begins_character(text[start]):
        start -= 1
    return text[start:end].decode("utf-8", errors="replace")


def _begins_character(byte: int) -> bool:
    return byte & 0b1100_0000 != 0b1000_0000


def what_is_wrong(value: object) -> str | None:
    """Describe a value that is not text; None if it is text."""
    if value is None:
        return "null"
    if not isinstance(value, str):
        return _KINDS.get(type(value), type(value).__name__)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(value[error.start]):04x}"
        return f"one with half a character ({half} at character {error.start:,})"
    return None


def no_such_field(name: str, present: Iterable[str], kind: str) -> str:
    """Return the problem of a record without this field, or of a table without this column."""
    names = ", ".join(shortened((f'"{other}"' for other in present), _FIELDS_SHOWN)) or "none"
    return f'the {kind} "{name}" must hold the text, but is missing; the {kind}s are {names}'

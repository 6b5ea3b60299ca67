"""A long document in pieces of at most 256 KiB, cut where the tokens stay as they are.

"... the quick brown| fox ..."      the space belongs to the word behind it
"... the end|\n    A line ..."       the line end does, too

What the tokenizers in use have in common makes the first cut safe: a byte-level BPE splits text
into words before it merges, and takes a space as the beginning of the word behind it; in the
vocabulary of a SentencePiece model the mark of a space only begins entries (or is one, with others
like it). Behind a letter or a digit a line end begins something new for all of these, unless a
vocabulary was trained across lines. Where 64 KiB have neither, text is cut between two characters,
and one token may be two there.
"""

from __future__ import annotations

from collections.abc import Iterator

from megaspeed.data.text.pieces import PIECE_BYTES, Piece

# How far back from a piece's limit a good place to cut is looked for.
_CUT_WINDOW_BYTES = 1 << 16
_LONGEST_CHARACTER_BYTES = 4
_MARK_OF_A_SPACE = "\u2581"  # how SentencePiece writes it

HOW_CUT = f"at spaces or line ends in the last {_CUT_WINDOW_BYTES} of {PIECE_BYTES} bytes"
"""Part of all that the ids of a long document depend on: with other cuts a few are others."""


def pieces_of(text: str, mark: int, read_bytes: int) -> Iterator[Piece]:
    """One document that is in memory, as pieces; `mark` and `read_bytes` are of its end."""
    if len(text) * _LONGEST_CHARACTER_BYTES <= PIECE_BYTES:
        yield Piece(text, True, mark, read_bytes)
        return
    encoded = text.encode("utf-8")
    start = 0
    while len(encoded) - start > PIECE_BYTES:
        cut = cut_at_most(encoded, start + PIECE_BYTES)
        yield Piece(encoded[start:cut].decode("utf-8"), False, mark, read_bytes)
        start = cut
    yield Piece(encoded[start:].decode("utf-8"), True, mark, read_bytes)


def cut_at_most(text: bytes | bytearray, limit: int) -> int:
    """The last good place to cut at or before `limit`.

    Args:
        text: UTF-8, longer than `limit`, which is more than 64 KiB.
        limit: bytes.
    """
    window = limit - _CUT_WINDOW_BYTES
    for places in (_before_spaces, _before_line_ends):
        for cut in places(text, window, limit):
            return cut
    return _between_characters(text, limit)


def _before_spaces(text: bytes | bytearray, window: int, limit: int) -> Iterator[int]:
    """The last one first; of a run of spaces, which may be one token, only before all of it."""
    space = text.rfind(b" ", window, limit)
    while space > window:
        character = _character_before(text, space)
        if not character.isspace() and character != _MARK_OF_A_SPACE:
            yield space
        space = text.rfind(b" ", window, space)


def _before_line_ends(text: bytes | bytearray, window: int, limit: int) -> Iterator[int]:
    """The last one first; behind a full stop it may be one token with it, behind a word never."""
    line_end = text.rfind(b"\n", window, limit)
    while line_end > window + 1:
        cut = line_end - 1 if text[line_end - 1] == ord("\r") else line_end
        if _character_before(text, cut).isalnum():
            yield cut
        line_end = text.rfind(b"\n", window, line_end)


def _between_characters(text: bytes | bytearray, limit: int) -> int:
    for cut in range(limit, limit - _LONGEST_CHARACTER_BYTES, -1):
        if _begins_character(text[cut]):
            return cut
    return limit


def _character_before(text: bytes | bytearray, end: int) -> str:
    start = end - 1
    while start > end - _LONGEST_CHARACTER_BYTES and not _begins_character(text[start]):
        start -= 1
    return text[start:end].decode("utf-8", errors="replace")


def _begins_character(byte: int) -> bool:
    return byte & 0b1100_0000 != 0b1000_0000

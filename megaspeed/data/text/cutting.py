"""A long document in pieces of at most 256 KiB, cut where the tokens stay as they are.

"... the quick brown| fox ..."      the space belongs to the word behind it
"""

from __future__ import annotations

from collections.abc import Iterator

from megaspeed.data.text.pieces import PIECE_BYTES, Piece

# How far back from a piece's limit a good place to cut is looked for.
_CUT_WINDOW_BYTES = 1 << 16
_WHITESPACE = frozenset(b" \t\n\r\v\f")
_LONGEST_CHARACTER_BYTES = 4


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
    """The last place at or before `limit` where cutting leaves the tokens as they are.

    A byte-level BPE never merges across the space in "X Y" (X and Y not white), because its
    pre-tokenizer takes that space as the beginning of the word Y. Text without any such space in
    64 KiB is cut between two characters, which may split one token there.

    Args:
        text: UTF-8, longer than `limit`, which is more than 64 KiB.
        limit: bytes.
    """
    window = limit - _CUT_WINDOW_BYTES
    space = text.rfind(b" ", window, limit)
    while space > window:
        if text[space - 1] not in _WHITESPACE and text[space + 1] not in _WHITESPACE:
            return space
        space = text.rfind(b" ", window, space)
    for cut in range(limit, limit - _LONGEST_CHARACTER_BYTES, -1):
        if text[cut] & 0b1100_0000 != 0b1000_0000:  # not in the middle of a character
            return cut
    return limit

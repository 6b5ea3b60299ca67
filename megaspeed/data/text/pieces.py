"""What a text file of any format gives: pieces of documents in order, and records that are bad.

    file --its format--> piece . piece . piece(ends document) . piece(ends document) . ...

A piece is at most 256 KiB of UTF-8, so that memory stays flat however long a document is. The mark
of a piece that ends a document says where reading goes on after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megaspeed.data.errors import DataError

PIECE_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a document's text, in order.

    Attributes:
        text: of the piece.
        ends_document: whether it is its document's last one.
        mark: where reading goes on after it; the format knows what it counts. Only of use where
            the piece ends a document.
        read_bytes: how much of the file on disk is behind it, for progress; an estimate for tables.
    """

    text: str
    ends_document: bool
    mark: int = 0
    read_bytes: int = 0


@dataclass(frozen=True, slots=True)
class BadRecord:
    """Something in a file that is no text to train on.

    Attributes:
        path: the file.
        where: in the file, as a person looks for it: "line 12 (byte 3,456)", "row 7".
        problem: what is wrong there, with what was expected.
        mend: what to do.
    """

    path: Path
    where: str
    problem: str
    mend: str

    def __str__(self) -> str:
        return f"{self.path}, {self.where}: {self.problem}; {self.mend}"


OnBad = Callable[[BadRecord], None]
"""What is done about a bad record; where it returns, reading goes on with the next record."""


SKIP_BEFOREHAND = ", or pass over bad records with `megaspeed tokenize --skip-bad`"
"""What else can be done about a bad record where text is trained on directly."""


def refuse(record: BadRecord, otherwise: str = "") -> None:
    """Raises DataError: nothing bad is passed over in silence.

    Args:
        record: what is bad.
        otherwise: put behind the record's own mend: what else can be done.
    """
    raise DataError(f"{record}{otherwise}")

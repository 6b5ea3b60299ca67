"""The input as a stream of batches, each of which knows how far it reaches.

    documents   |----|--|-------|------------------------------|---|-----|
    batches     |       |       |        |        |            |         |
    reached     yes     yes     no       no       no           yes       yes

A batch ends where a document ends, or within a document that is longer than a batch. Only where a
document ends can reading go on later, so only there is anything reached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from megaspeed.data.errors import DataError
from megaspeed.data.text.pieces import BadRecord, Piece, refuse
from megaspeed.data.text.sources import SourceFile
from megaspeed.data.tokenizing.document_entry import DocumentEntry, DocumentHash

BATCH_CHARACTERS = 1 << 19
"""Text of one batch: a fraction of a second of work, and some 50 MB while it is encoded."""

# They are held in memory until the batch is written.
_BAD_AT_ONCE = 100_000


@dataclass(frozen=True, slots=True)
class Position:
    """The end of a document, or the beginning of a file.

    Attributes:
        file: number of the file in the list of all.
        mark: where in it reading goes on; what `SourceFile.pieces` takes.
    """

    file: int
    mark: int


BEGINNING = Position(0, 0)


@dataclass(frozen=True, slots=True)
class Reached:
    """What is behind a batch once its ids are written.

    Attributes:
        position: where reading can go on; None where the batch ends within a document.
        documents: that ended in the batch, in order.
        skipped: the bad records that were passed over since the batch before.
        read_bytes: of all files, for progress.
    """

    position: Position | None
    documents: tuple[DocumentEntry, ...]
    skipped: tuple[BadRecord, ...]
    read_bytes: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Neighbouring pieces of text, to be encoded by one worker."""

    pieces: tuple[Piece, ...]
    reached: Reached


def read_batches(
    files: Sequence[SourceFile], start: Position, *, skip_bad: bool
) -> Iterator[Batch]:
    """Everything from `start` on. The last batch reaches the end of all files, and may be empty.

    Args:
        files: the input.
        start: a position that an earlier batch reached, or the beginning.
        skip_bad: whether bad records are passed over; else the first one is an error.

    Raises:
        DataError: a record is bad and is not to be passed over, or very many are.
    """
    bytes_before = [0, *accumulate(file.state()[1] for file in files)]
    filling = _Filling()
    for number in range(start.file, len(files)):
        mark = start.mark if number == start.file else 0
        on_bad = filling.pass_over if skip_bad else refuse
        for piece in files[number].pieces(mark, on_bad):
            filling.add(piece, files[number].name)
            if filling.is_full():
                position = Position(number, piece.mark) if piece.ends_document else None
                yield filling.take(position, bytes_before[number] + piece.read_bytes)
    yield filling.take(Position(len(files), 0), bytes_before[-1])


class _Filling:
    """The batch that is being filled."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._documents: list[DocumentEntry] = []
        self._skipped: list[BadRecord] = []
        self._characters = 0
        self._began_within_document = False
        self._document = DocumentHash()

    def add(self, piece: Piece, file_name: str) -> None:
        self._pieces.append(piece)
        self._characters += len(piece.text)
        self._document.update(piece.text)
        if piece.ends_document:
            self._documents.append(self._document.entry(file_name))
            self._document = DocumentHash()

    def pass_over(self, record: BadRecord) -> None:
        if len(self._skipped) == _BAD_AT_ONCE:
            raise DataError(
                f"bad records are passed over where they are few, and there are {_BAD_AT_ONCE:,} "
                f"without a batch of good text between them, the last one {record}"
            )
        self._skipped.append(record)

    def is_full(self) -> bool:
        # After a document that began before, reading can go on here: let no other one begin.
        ends_long_document = self._began_within_document and self._pieces[-1].ends_document
        return ends_long_document or self._characters >= BATCH_CHARACTERS

    def take(self, position: Position | None, read_bytes: int) -> Batch:
        """The batch; the next one begins empty."""
        reached = Reached(position, tuple(self._documents), tuple(self._skipped), read_bytes)
        batch = Batch(tuple(self._pieces), reached)
        for filled in (self._pieces, self._documents, self._skipped):
            filled.clear()
        self._characters = 0
        self._began_within_document = position is None
        return batch

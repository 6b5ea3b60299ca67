"""The input as a stream of batches, each of which knows how far it reaches.

    documents   |----|--|-------|------------------------------|---|-----|
    batches     |       |       |        |        |            |         |
    position    1, 0    3, 0    3, 1     3, 2     3, 3         4, 0      6, 0

A batch ends where a document ends, or within a document that is longer than a batch. Its position
says where reading goes on: behind how many documents, and behind how many pieces of the next one.
These pieces are read again, for the document's hash and to come to the same cuts, but they are not
encoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice

from megaspeed.data.text.pieces import BadRecord, OnBad, Piece
from megaspeed.data.text.sources import SourceFile
from megaspeed.data.tokenizing.document_entry import DocumentEntry, DocumentHash
from megaspeed.data.tokenizing.passed_over import PassedOver

BATCH_CHARACTERS = 1 << 18
"""Text of one batch: a fraction of a second of work, and some 25 MB while it is encoded."""


@dataclass(frozen=True, slots=True)
class Position:
    """The end of a piece, or the beginning of a file.

    Attributes:
        file: number of the file in the list of all.
        mark: the end of the last document before; what `SourceFile.pieces` takes.
        pieces: of the document behind the mark, how many are before the position.
    """

    file: int
    mark: int
    pieces: int = 0

    def behind(self, piece: Piece) -> Position:
        """The end of this piece, which is the next one."""
        if piece.ends_document:
            return Position(self.file, piece.mark)
        return replace(self, pieces=self.pieces + 1)


BEGINNING = Position(0, 0)


@dataclass(frozen=True, slots=True)
class Reached:
    """What is behind a batch once its ids are written.

    Attributes:
        position: where reading can go on.
        documents: that ended in the batch, in order.
        passed_over: bad records, since the beginning of all files.
        read_bytes: of all files, for progress.
    """

    position: Position
    documents: tuple[DocumentEntry, ...]
    passed_over: PassedOver
    read_bytes: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Neighbouring pieces of text, to be encoded by one worker.

    Attributes:
        pieces: in order.
        within_document: whether the first one goes on with a document of the batch before.
        reached: what is behind them.
    """

    pieces: tuple[Piece, ...]
    within_document: bool
    reached: Reached


def read_batches(
    files: Sequence[SourceFile],
    start: Position,
    on_bad: OnBad,
    passed_over: Callable[[], PassedOver],
) -> Iterator[Batch]:
    """Everything from `start` on. The last batch reaches the end of all files, and may be empty.

    Args:
        files: the input.
        start: a position that an earlier batch reached, or the beginning.
        on_bad: told of every bad record behind `start`; where it returns, the next one follows.
        passed_over: how many it has passed over so far.

    Raises:
        DataError: a record is bad, and `on_bad` refuses it.
    """
    bytes_before = [0, *accumulate(file.state()[1] for file in files)]
    filling = _Filling(within_document=start.pieces > 0)
    for number in range(start.file, len(files)):
        position = start if number == start.file else Position(number, 0)
        reader = _Reader(files[number], position, on_bad)
        for piece in reader.done():
            filling.remember(piece)
        for piece in reader.new():
            position = position.behind(piece)
            filling.add(piece, files[number].name)
            if filling.is_full():
                yield filling.take(position, passed_over(), bytes_before[number] + piece.read_bytes)
    yield filling.take(Position(len(files), 0), passed_over(), bytes_before[-1])


class _Reader:
    """The pieces of a file from a position on, and before them those that lead to it."""

    def __init__(self, file: SourceFile, position: Position, on_bad: OnBad) -> None:
        self._is_done = position.pieces > 0
        self._on_bad = on_bad
        self._pieces = file.pieces(position.mark, self._meet)
        self._done = position.pieces

    def done(self) -> Iterator[Piece]:
        """Of the document that the position lies in, what is before it."""
        yield from islice(self._pieces, self._done)
        self._is_done = False

    def new(self) -> Iterator[Piece]:
        """What is behind the position."""
        return self._pieces

    def _meet(self, record: BadRecord) -> None:
        if not self._is_done:  # else it was met when the position was reached
            self._on_bad(record)


class _Filling:
    """The batch that is being filled."""

    def __init__(self, *, within_document: bool) -> None:
        self._pieces: list[Piece] = []
        self._documents: list[DocumentEntry] = []
        self._characters = 0
        self._within_document = within_document
        self._document = DocumentHash()

    def remember(self, piece: Piece) -> None:
        """A piece that an earlier batch had, of the document that goes on here."""
        self._document.update(piece.text)

    def add(self, piece: Piece, file_name: str) -> None:
        self._pieces.append(piece)
        self._characters += len(piece.text)
        self._document.update(piece.text)
        if piece.ends_document:
            self._documents.append(self._document.entry(file_name))
            self._document = DocumentHash()

    def is_full(self) -> bool:
        return self._characters >= BATCH_CHARACTERS

    def take(self, position: Position, passed_over: PassedOver, read_bytes: int) -> Batch:
        """The batch; the next one begins empty."""
        reached = Reached(position, tuple(self._documents), passed_over, read_bytes)
        batch = Batch(tuple(self._pieces), self._within_document, reached)
        self._pieces.clear()
        self._documents.clear()
        self._characters = 0
        self._within_document = position.pieces > 0
        return batch

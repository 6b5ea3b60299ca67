"""What every format of text answers: its documents in pieces, and whether its files changed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from megaspeed.data.text.pieces import OnBad, Piece
from megaspeed.files.reading import FileState, state_of


class TextFormat(ABC):
    """How the text of a file is read. Small and immutable: it is sent to other processes.

    Attributes:
        has_records: whether it has records of several fields, on this machine, so that the first
            of them shows whether the field of the text is named rightly.
    """

    has_records: ClassVar[bool] = False

    @abstractmethod
    def pieces(self, path: Path, after: int, on_bad: OnBad) -> Iterator[Piece]:
        """The documents behind the mark `after` (0: all of them), piece by piece.

        Args:
            path: the file.
            after: the mark of a piece that ended a document.
            on_bad: told of every record that is no text; where it returns, the next one follows.

        Raises:
            OSError: the file is not there, or this user may not read it.
        """

    def state(self, path: Path) -> FileState:
        """Of what is at `path`, to tell whether it changed.

        Raises:
            OSError: nothing is there.
        """
        return state_of(path)

    def part(self) -> str:
        """Which of several texts at one path this is; empty where there is only one."""
        return ""

"""Bad records that are passed over: each is a line in a file, and none is held in memory.

    reader   good  bad  bad  good | good  bad ...        is some batches ahead of the writer
    lines          1    2               3                written by the reader, as they come
    batch                         ^ 2 records            says how many are before its end

However many come one after the other, memory is flat. The lines that stand behind what the journal
knows of are cut off when work goes on, and are met again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from megaspeed.data.text.pieces import BadRecord, OnBad
from megaspeed.data.tokenizing.growing_file import GrowingFile


@dataclass(frozen=True, slots=True)
class PassedOver:
    """How much was passed over before some place of the input.

    Attributes:
        records: that were bad.
        lines_bytes: of the lines that tell of them.
    """

    records: int = 0
    lines_bytes: int = 0


class PassedOverLines:
    """The file with a line for each of them."""

    def __init__(self, path: Path, so_far: PassedOver, tell: OnBad) -> None:
        """Goes on behind the lines of `so_far`; `tell` is told of each that is added."""
        self._lines = GrowingFile(path, so_far.lines_bytes)
        self._records = so_far.records
        self._tell = tell

    @property
    def so_far(self) -> PassedOver:
        """What was added."""
        return PassedOver(self._records, self._lines.size_bytes)

    def add(self, record: BadRecord) -> None:
        """Passes over the record."""
        self._lines.append(_line(record))
        self._records += 1
        self._tell(record)

    def flush(self) -> None:
        """Brings every line to the disk."""
        self._lines.flush()

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()


def _line(record: BadRecord) -> bytes:
    facts = {"file": str(record.path), "where": record.where, "problem": record.problem}
    return json.dumps(facts).encode("utf-8") + b"\n"

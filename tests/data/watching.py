"""Who watches a tokenization in tests: one who writes down, one who stops it."""

from pathlib import Path

from megaspeed.data.pieces import BadRecord
from megaspeed.data.tokenize import Standing


class Record:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.began: list[Standing] = []
        self.reached: list[Standing] = []
        self.passed_over: list[BadRecord] = []

    def begins(self, standing: Standing, total_bytes: int) -> None:
        self.began.append(standing)

    def passes_over(self, record: BadRecord) -> None:
        self.passed_over.append(record)

    def reaches(self, standing: Standing) -> None:
        self.reached.append(standing)


class Stop(Record):
    """Stops the work after so many batches, as Ctrl-C does."""

    def __init__(self, after_batches: int) -> None:
        super().__init__()
        self._batches = after_batches

    def reaches(self, standing: Standing) -> None:
        super().reaches(standing)
        if len(self.reached) == self._batches:
            raise KeyboardInterrupt


def contents(folder: Path) -> dict[str, bytes]:
    """Everything in a folder but the lock."""
    return {
        path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".lock"
    }

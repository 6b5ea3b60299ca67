"""Progress of a tokenization, in bytes, because the number of tokens is not known beforehand."""

import time
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from megaspeed.cli.bar_or_lines import BarOrLines
from megaspeed.data.pieces import BadRecord
from megaspeed.data.tokenize import Standing

_RECORDS_SHOWN = 10


class TokenizingProgress:
    """Shows tokens a second, the remaining time, and the first bad records."""

    def __init__(self) -> None:
        self._exits = ExitStack()
        self._bar = BarOrLines(0)
        self._start = self._now = Standing(0, 0, 0, 0)
        self._begun_at = time.monotonic()
        self._records = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._exits.close()

    @property
    def skipped(self) -> int:
        """Bad records that were skipped, including those of earlier calls."""
        return self._now.skipped

    def tokens_per_second(self) -> float:
        """Since this process began."""
        seconds = max(1e-9, time.monotonic() - self._begun_at)
        return (self._now.tokens - self._start.tokens) / seconds

    def begins(self, standing: Standing, total_bytes: int) -> None:
        """Shows what earlier calls have done."""
        self._start = self._now = standing
        self._begun_at = time.monotonic()
        bar = BarOrLines(total_bytes, done_before=standing.read_bytes)
        self._bar = self._exits.enter_context(bar)
        if standing.tokens:
            bar.tell(f"continuing after {standing.tokens:,} tokens")

    def passes_over(self, record: BadRecord) -> None:
        """Shows the first few."""
        if self._records < _RECORDS_SHOWN:
            self._bar.tell(f"skipped: {record.path}, {record.where}: {record.problem}")
        elif self._records == _RECORDS_SHOWN:
            self._bar.tell("more bad records are skipped; all are listed in skipped.jsonl")
        self._records += 1

    def reaches(self, standing: Standing) -> None:
        """Shows the progress."""
        self._now = standing
        text = f"{standing.tokens:,} tokens, {self.tokens_per_second():,.0f} tokens/s"
        self._bar.show(standing.read_bytes, text)

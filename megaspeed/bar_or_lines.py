"""The progress of long work: a bar on a terminal, otherwise a line every few seconds."""

import time
from datetime import timedelta
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 10.0


class BarOrLines:
    """Shows on standard error how much of a total is done, and a text.

    Args:
        total: the total, in any unit; 0 if it is not known yet.
        start: a line that is printed first if there is no terminal.
        seconds_between_lines: time between two lines if there is no terminal.
        quiet: whether nothing is shown.
    """

    def __init__(
        self,
        total: float,
        start: str = "",
        seconds_between_lines: float = _SECONDS_BETWEEN_LINES,
        quiet: bool = False,
    ) -> None:
        self._total = total
        self._seconds_between_lines = seconds_between_lines
        self._line_at = time.monotonic()
        self._console = Console(
            stderr=True, quiet=quiet, highlight=False, markup=False, soft_wrap=True
        )
        self._bar = Progress(
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=self._console,
            transient=True,
            disable=quiet or not self._console.is_terminal,
        )
        if start and not self._console.is_terminal:
            self._console.print(start)
        self._task = self._bar.add_task("", total=total or None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._bar.stop()

    def show(self, done: float, text: str = "", total: float | None = None) -> None:
        """Show that ``done`` of the total is done, and a text about it. The total may change."""
        if total is not None and total != self._total:
            self._total = total
            self._bar.reset(self._task, total=total or None)
        self._bar.update(self._task, completed=done, description=text)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._line_at >= self._seconds_between_lines:
            self._line_at = now
            share = f"{done / self._total:4.0%}  " if self._total else ""
            (task,) = self._bar.tasks
            seconds = task.time_remaining  # None if it is not known yet
            left = f"{timedelta(seconds=int(seconds))} left" if seconds else ""
            self._console.print(share + ", ".join(filter(None, (text, left))))

    def tell(self, text: str) -> None:
        """Print a line that stays, above the bar."""
        self._console.print(text)

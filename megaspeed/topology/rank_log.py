"""One log file for each rank, with what is too much for the console.

    logs/rank-00005.log     failure reports, stacks of a hang, Python's log records and warnings

Until it is opened, what is written is kept in memory: a run that is refused leaves no file.
"""

import logging
import sys
import time
from pathlib import Path
from typing import TextIO

FOLDER = "logs"


class RankLog:
    """This rank's log file. Any thread may write."""

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._before: list[str] = []

    @property
    def stream(self) -> TextIO:
        """An open file with a descriptor; standard error before the log is opened."""
        return self._file or sys.__stderr__ or sys.stderr  # the latter may have none

    @property
    def path(self) -> Path | None:
        """Where it is; None before it is opened."""
        return None if self._file is None else Path(self._file.name)

    def open(self, run_dir: Path, rank: int) -> None:
        """Append to the file of ``rank``, also what was written before and Python's log records.

        A folder that cannot be written to leaves the log in memory: the run itself will say so.
        """
        path = run_dir / FOLDER / f"rank-{rank:05d}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", buffering=1, encoding="utf-8", errors="replace")
        except OSError:
            return
        self._file.writelines(self._before)
        self._before.clear()
        handler = logging.StreamHandler(self._file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
        logging.getLogger().addHandler(handler)
        logging.captureWarnings(True)

    def write(self, text: str) -> None:
        """Write text as it is. A full disk is borne."""
        if self._file is None:
            self._before.append(text)
            return
        try:
            self._file.write(text)
        except (OSError, ValueError):
            self._before.append(text)

    def note(self, line: str) -> None:
        """Write a line with the time."""
        self.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")

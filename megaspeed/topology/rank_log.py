"""One log file for each rank, with details that the console does not show.

    logs/rank-00005.log     failure reports, stacks of a hang, Python's log records and warnings

Until the file is opened, text is kept in memory, so a run that is refused leaves no file.
"""

import contextlib
import logging
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

FOLDER = "logs"


class RankLog:
    """This rank's log file. Any thread may write.

    Args:
        run_dir: the folder of the run.
        rank: whose log it is.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._to_be = run_dir / FOLDER / f"rank-{rank:05d}.log"
        self._file: TextIO | None = None
        self._handler: logging.Handler | None = None
        self._before: list[str] = []

    @property
    def stream(self) -> TextIO:
        """An open file with a descriptor; standard error if the log could not be opened."""
        return self._file or sys.__stderr__ or sys.stderr

    @property
    def path(self) -> Path | None:
        """The path of the file; None before it is opened."""
        return None if self._file is None else self._to_be

    def open(self) -> None:
        """Open the file for appending. Write the text kept in memory, and from now on also Python's
        log records.

        If the folder cannot be written to, the log stays in memory; the run reports the problem.
        """
        if self._file is not None:
            return
        try:
            self._to_be.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._to_be.open("a", buffering=1, encoding="utf-8", errors="replace")
        except OSError:
            return
        self._handler = logging.StreamHandler(self._file)
        form = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
        self._handler.setFormatter(form)
        logging.getLogger().addHandler(self._handler)
        logging.captureWarnings(True)
        self.write("".join(self._before))
        self._before.clear()

    def write(self, text: str) -> None:
        """Write text; keep it in memory until the file is open. Ignores a full disk."""
        if self._file is None:
            self._before.append(text)
            return
        with contextlib.suppress(OSError, ValueError):
            self._file.write(text)

    def note(self, line: str) -> None:
        """Write a line with the time."""
        self.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._handler is not None:
            logging.getLogger().removeHandler(self._handler)
            logging.captureWarnings(False)
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

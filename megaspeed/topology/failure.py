"""What a rank reports when it fails, and its log file.

    [gpu17, rank 5 (pp 1, dp 0, tp 1), step 12, Backward(micro_batch=3)] RuntimeError: ...
    Traceback (most recent call last):
      ...

A rank writes this report while the exception propagates, before it waits for anything: other ranks
may wait for this rank, and objects that close after the exception may wait for other ranks.
"""

import contextlib
import json
import logging
import socket
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from megaspeed.topology.grid import Grid

_DURING = "during "


def note_phase(error: Exception, phase: object) -> None:
    """Add the phase as a note to an exception that leaves it."""
    error.add_note(f"{_DURING}{phase}")


def place_of(grid: Grid, rank: int, doing: str = "", host: str | None = None) -> str:
    """Such as "[gpu17, rank 5 (pp 1, dp 0, tp 1), step 12]". ``host`` is this host if omitted."""
    if rank < grid.world_size:
        at = grid.coordinates_of(rank)
        where = f"rank {rank} (pp {at.pp}, dp {at.dp}, tp {at.tp})"
    else:
        where = f"rank {rank} (spare)"
    return f"[{', '.join(part for part in (host or socket.gethostname(), where, doing) if part)}]"


def describe_failure(error: Exception, grid: Grid, rank: int) -> str:
    """The failure report of a rank: a header line, then the traceback."""
    notes: list[str] = getattr(error, "__notes__", [])
    # The innermost phase was noted first.
    phases = [note.removeprefix(_DURING) for note in reversed(notes) if note.startswith(_DURING)]
    lines = str(error).strip().splitlines() or [""]
    trace = "".join(traceback.format_exception(error))
    return f"{place_of(grid, rank, ', '.join(phases))} {type(error).__name__}: {lines[0]}\n{trace}"


def print_error(line: str) -> None:
    """Write a line to standard error at once. Ignores a full disk and a closed file."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def write_error_file(error_file: str | None, text: str) -> None:
    """Write the file in which torchrun looks for the reason why a rank has ended.

    Args:
        error_file: its path; None if another launcher started the rank.
        text: the report, whose first line torchrun prints.
    """
    if error_file is None or Path(error_file).exists():
        return
    extra: dict[str, Any] = {"py_callstack": text, "timestamp": str(int(time.time()))}
    message = {"message": text.splitlines()[0], "extraInfo": extra}
    with contextlib.suppress(OSError):
        Path(error_file).write_text(json.dumps({"message": message}))


def processes_killed_for_memory() -> int:
    """How many processes the kernel has killed on this host because memory ran out."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("oom_kill ")).split()[1])
    return 0


class RankLog:
    """``logs/rank-00005.log`` in the run folder: details that the console does not show.

    It contains failure reports, the stacks of a hang, Python's log records and warnings. Until the
    file is opened, the text is kept in memory, so a run that is refused leaves no file. Any thread
    may write.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._path = run_dir / "logs" / f"rank-{rank:05d}.log"
        self._file: TextIO | None = None
        self._handler: logging.Handler | None = None
        self._buffered: list[str] = []

    @property
    def stream(self) -> TextIO:
        """An open file with a descriptor; standard error if the log file is not open."""
        return self._file or sys.__stderr__ or sys.stderr

    @property
    def path(self) -> Path | None:
        """The path of the file; None before it is opened."""
        return None if self._file is None else self._path

    def open(self) -> None:
        """Open the file for appending and write the text kept in memory. From now on, Python's log
        records are written, too.

        If the folder cannot be written to, the text stays in memory; the run reports the problem.
        """
        if self._file is not None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", buffering=1, encoding="utf-8", errors="replace")
        except OSError:
            return
        self._handler = logging.StreamHandler(self._file)
        form = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
        self._handler.setFormatter(form)
        logging.getLogger().addHandler(self._handler)
        logging.captureWarnings(True)
        self.write("".join(self._buffered))
        self._buffered.clear()

    def write(self, text: str) -> None:
        """Write text, or keep it in memory until the file is open. Ignores a full disk."""
        if self._file is None:
            self._buffered.append(text)
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

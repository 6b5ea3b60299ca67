"""Whether a file is what it was: told by its state, without reading it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

FileState = tuple[str, int, int, int]
"""(path, size in bytes, mtime in ns, ctime in ns)."""

_YOUNG_FILE_SECONDS = 2.0


def state_of(path: Path) -> FileState:
    """Of what is at `path`.

    Raises:
        OSError: nothing is there.
    """
    stat = path.stat()
    return (str(path.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def are_settled(states: Iterable[FileState], seen_at_seconds: float) -> bool:
    """Whether any later change of the files must show in their states.

    A file that changes twice within a tick of the file system's clock, and keeps its size, has the
    same state both times. Ticks are at most two seconds (FAT).

    Args:
        states: as they were seen.
        seen_at_seconds: when, by the clock.
    """
    times_ns = [max(mtime_ns, ctime_ns) for _, _, mtime_ns, ctime_ns in states]
    return max(times_ns, default=0) / 1e9 < seen_at_seconds - _YOUNG_FILE_SECONDS

"""Reads and recognizes files from other sources: only regular files, in bounded time and memory.

    regular file      read, up to a limit
    named pipe        opening it would wait for a writer
    device, socket    may never end
    folder            has no content to read

Links are followed.
"""

import errno
import hashlib
import os
import signal
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LARGEST_BYTES = 1 << 24
"""Limit for a file that is read into memory: 16 MiB. The largest model index has 10 MB."""

FileState = tuple[str, int, int, int]
"""(path, size in bytes, mtime in ns, ctime in ns). If it is unchanged, so is the file."""

COARSEST_TICK_SECONDS = 2.0
"""FAT has the slowest clock of all file systems: it ticks every two seconds."""

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def file_problem(path: Path) -> str | None:
    """Why there is no ordinary file at ``path``, such as "is a named pipe"; None if there is one.

    Opens nothing.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return "is a broken link" if os.path.islink(path) else "does not exist"
    except (OSError, ValueError) as error:  # ValueError: the path has a NUL
        return f"cannot be reached ({getattr(error, 'strerror', None) or error})"
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), None)
    return None if kind is None else f"is {kind}"


def read_file(path: Path, largest_bytes: int = LARGEST_BYTES) -> bytes:
    """The bytes of an ordinary file.

    Raises OSError if there is none, this user may not read it, or it has more than
    ``largest_bytes``; ``strerror`` is the reason.
    """
    os.stat(path)  # raises the system's own error if nothing is there
    problem = file_problem(path)
    if problem is not None:
        raise OSError(errno.EINVAL, f"it {problem}", str(path))
    with path.open("rb") as stream:
        content = stream.read(largest_bytes + 1)
    if len(content) > largest_bytes:
        raise OSError(errno.EINVAL, f"it has more than {largest_bytes:,} bytes", str(path))
    return content


def special_files(folder: Path) -> Iterator[str]:
    """A sentence for each entry of a folder that is neither a file nor a folder.

    For folders that a library reads, because the library would open such entries.
    """
    yield from special_among(sorted(folder.iterdir()))


def special_among(paths: Iterable[Path]) -> Iterator[str]:
    """A sentence for each of ``paths`` that exists and is neither a file nor a folder."""
    for path in paths:
        problem = file_problem(path)
        if problem is not None and os.path.lexists(path) and not os.path.isdir(path):
            yield f"{path} {problem}, but must be a file"


def sha256_of(path: Path) -> str:
    """The hash of a file in hexadecimal, computed in constant memory.

    Raises OSError if the file cannot be read.
    """
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def state_of(path: Path) -> FileState:
    """The state of the file at ``path``. Raises OSError if nothing is there."""
    found = path.stat()
    return (str(path.absolute()), found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def are_settled(states: Iterable[FileState], seen_at_seconds: float) -> bool:
    """Whether every later change of the files will change their states.

    A file that changes twice within one tick of the file system's clock, and keeps its size, has
    the same state both times.

    Args:
        states: the states that were seen.
        seen_at_seconds: when they were seen, in seconds since the epoch.
    """
    times_ns = [max(mtime_ns, ctime_ns) for _, _, mtime_ns, ctime_ns in states]
    return max(times_ns, default=0) / 1e9 < seen_at_seconds - COARSEST_TICK_SECONDS


class _TimeOver(BaseException):
    """Not an Exception, so that no handler inside the block catches it."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Leaves the block after ``seconds``, without an error.

    Only the main thread can be interrupted. In another thread there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(*_: Any) -> None:
        raise _TimeOver

    previous = signal.signal(signal.SIGALRM, leave)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _TimeOver:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, *timer)

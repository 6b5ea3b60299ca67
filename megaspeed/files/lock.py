"""Locks a file, so that one process at a time does something.

The kernel releases the lock when the process ends, even if it is killed. While the lock is held,
the file contains the process that holds it, as "host pid". Afterwards the file stays, empty.
"""

import errno
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

_SECONDS_BEFORE_REPORT = 10.0
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class Locked(Exception):
    """Another process holds the lock.

    Attributes:
        holder: that process, such as "process 4711 on node3"; None if it is not known.
    """

    def __init__(self, path: Path) -> None:
        self.holder = _holder(path)
        super().__init__(f"{self.holder or 'another process'} holds the lock {path}")


@contextmanager
def lock(
    path: Path,
    *,
    wait_seconds: float = 0.0,
    on_wait: Callable[[str | None], None] | None = None,
    reentrant: bool = False,
    required: bool = True,
) -> Iterator[bool]:
    """Holds the lock on the file ``path`` inside the ``with`` block.

    The file and its folder are created if needed.

    Args:
        path: the lock file.
        wait_seconds: how long to wait for another process; ``math.inf`` waits without a limit.
        on_wait: is called once, with ``Locked.holder``, after ten seconds of waiting.
        reentrant: whether a thread that holds the lock may enter it again.
        required: what happens on a network file system without locks. If True, a marker file
            replaces the lock. If a process is killed on another host, its marker file remains. If
            False, the block runs without a lock.

    Yields:
        False if this thread already held the lock, else True.

    Raises:
        Locked: another process held the lock for ``wait_seconds``.
        OSError: the file cannot be created.
    """
    file_lock = FileLock(path, is_singleton=reentrant, fallback_to_soft=required)
    try:
        _acquire(file_lock, path, wait_seconds, on_wait)
    except Timeout as error:
        raise Locked(path) from error
    except OSError as error:
        if required or error.errno not in _NO_LOCKS:
            raise
    outermost, held = file_lock.lock_counter <= 1, identity(path)
    # filelock writes the content of a marker file itself.
    names_holder = outermost and file_lock.is_locked and not isinstance(file_lock, SoftFileLock)
    try:
        if names_holder:
            _write(path, f"{socket.gethostname()} {os.getpid()}\n")
        yield outermost
    finally:
        if names_holder and identity(path) == held:
            _write(path, "")  # another process may get the same number later
        file_lock.release()


def identity(path: Path) -> tuple[int, int] | None:
    """The device and the inode of what is at ``path``; None if nothing is there.

    If they change while a lock on ``path`` is held, another process can lock the path, too.
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def _acquire(
    file_lock: BaseFileLock,
    path: Path,
    wait_seconds: float,
    on_wait: Callable[[str | None], None] | None,
) -> None:
    if on_wait is not None and wait_seconds > _SECONDS_BEFORE_REPORT:
        with suppress(Timeout):
            file_lock.acquire(timeout=_SECONDS_BEFORE_REPORT)
            return
        on_wait(_holder(path))
        wait_seconds -= _SECONDS_BEFORE_REPORT
    file_lock.acquire(timeout=wait_seconds)


def _write(path: Path, text: str) -> None:
    # Only for people and messages. The disk may be full, or the folder may have a new name.
    with suppress(OSError), path.open("r+") as file:
        file.truncate(0)
        file.write(text)


def _holder(path: Path) -> str | None:
    try:
        host, process = path.read_text(errors="replace").split()
    except (OSError, ValueError):
        return None
    return f"process {process} on {host}" if process.isdigit() else None

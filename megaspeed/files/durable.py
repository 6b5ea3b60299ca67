"""Writes files and folders that are complete or absent, even if the process is killed.

    file      FILE.writing        written and flushed to the disk, then renamed to FILE
    folder    OUT.writing/...     filled, then renamed to OUT

A rename replaces the name in one step. A process that has the old file open or mapped keeps it.
After a loss of power, the new name exists only if its folder was flushed too. A lock on a file lets
one process at a time do something.
"""

import errno
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from filelock import FileLock, SoftFileLock, Timeout
from typing_extensions import Buffer  # collections.abc has it from Python 3.12

TEMPORARY = ".writing"
"""The end of the name of a file or folder that is being written."""

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)

T = TypeVar("T")


def write_file(path: Path, fill: Callable[[BinaryIO], T]) -> T:
    """Write ``path`` with ``fill``, which gets the open file. Replaces an existing file.

    If ``path`` is a link, the file that it points to is replaced. Only one process may write
    ``path`` at a time. Returns what ``fill`` returns.

    If ``fill`` raises, or the disk is full, no temporary file stays, and an OSError names ``path``.
    """
    path = path.resolve()
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with temporary.open("wb") as stream:
            filled = fill(stream)
            stream.flush()
            # Without this, a machine that loses power may keep the new name and lose the bytes.
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
    return filled


def write_bytes(path: Path, content: Buffer) -> None:
    """Write ``path`` with this content, as ``write_file`` does."""
    write_file(path, lambda stream: stream.write(content))


def flush_folder(path: Path) -> None:
    """Flush the names in a folder to the disk, after files in it were created or renamed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """An empty folder to fill. It is renamed to ``path`` if the block ends without an error.

    If the block raises, the folder is removed. The block must flush the files that it writes.
    Raises FileExistsError if ``path`` exists, or another process is filling it or was killed.
    """
    refuse_existing(path)
    writing = path.with_name(path.name + TEMPORARY)
    try:
        writing.mkdir(parents=True)
    except FileExistsError:
        raise FileExistsError(
            f"{path} is filled under the name {writing}, which exists: another process is filling "
            f"it, or was killed; wait for the other process, remove {writing}, or name another "
            "folder"
        ) from None
    try:
        yield writing
        flush_folder(writing)
        # A rename would replace an empty folder that another process has made meanwhile.
        refuse_existing(path)
        writing.rename(path)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise
    flush_folder(path.parent)


def refuse_existing(path: Path) -> None:
    """Raise FileExistsError if something exists at ``path``."""
    if os.path.lexists(path):
        raise FileExistsError(f"{path} exists already; name a folder that does not exist")


class Locked(Exception):
    """Another process holds the lock."""

    def __init__(self, path: Path) -> None:
        self.holder = _holder(path)  # such as "process 4711 on node3"; None if it is not known
        super().__init__(f"{self.holder or 'another process'} holds the lock {path}")


@contextmanager
def lock(
    path: Path, *, wait_seconds: float = 0.0, reentrant: bool = False, required: bool = True
) -> Iterator[None]:
    """Hold the lock on the file ``path`` inside the ``with`` block; one process at a time can.

    The file and its folder are created if needed. The kernel releases the lock when the process
    ends, even if it is killed. While the lock is held, the file contains the process that holds it,
    as "host pid". Afterwards the file stays, empty.

    Args:
        wait_seconds: how long to wait for another process; ``math.inf`` waits without a limit.
        reentrant: whether a thread that holds the lock may enter it again.
        required: what happens on a network file system without locks. If True, a marker file
            replaces the lock. If a process is killed on another host, its marker file remains. If
            False, the block runs without a lock.

    Raises:
        Locked: another process held the lock for ``wait_seconds``.
        OSError: the file cannot be created.
    """
    file_lock = FileLock(path, is_singleton=reentrant, fallback_to_soft=required)
    try:
        file_lock.acquire(timeout=wait_seconds)
    except Timeout as error:
        raise Locked(path) from error
    except OSError as error:
        if required or error.errno not in _NO_LOCKS:
            raise
    held = identity(path)
    # filelock writes the content of a marker file itself.
    names_holder = file_lock.lock_counter == 1 and not isinstance(file_lock, SoftFileLock)
    try:
        if names_holder:
            _write_holder(path, f"{socket.gethostname()} {os.getpid()}\n")
        yield
    finally:
        if names_holder and identity(path) == held:
            _write_holder(path, "")  # another process may get the same number later
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


def _write_holder(path: Path, text: str) -> None:
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

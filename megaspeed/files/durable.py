"""Writes files and folders that are complete or absent, even if the process is killed.

    file      FILE.writing                written and flushed to the disk, then renamed to FILE
    folder    OUT.writing/.unfinished     a lock, held while the folder is filled
              OUT.writing/...             filled, then renamed to OUT; the lock is removed last

A rename replaces the name in one step. A process that has the old file open or mapped keeps it.
After a loss of power, the new name exists only if its folder was flushed too.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from megaspeed.files.lock import Locked, lock

TEMPORARY = ".writing"
"""The end of the name of a file or folder that is being written."""

_UNFINISHED = ".unfinished"

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

    If the block raises, the folder is removed. The block must flush the files that it writes. The
    remains of a killed process are replaced. Raises FileExistsError if ``path`` exists, or another
    process is filling it.
    """
    refuse_existing(path)
    writing = path.with_name(path.name + TEMPORARY)
    in_use = FileExistsError(
        f"{path} is filled under the name {writing}, which exists: another process is filling it, "
        f"or it is not megaspeed's; wait for the other process, move {writing} away, or name "
        "another folder"
    )
    try:
        writing.mkdir(parents=True)
    except FileExistsError:
        # Without the lock file, the folder belongs to someone else.
        if not (writing / _UNFINISHED).is_file():
            raise in_use from None
    with ExitStack() as stack:
        try:
            stack.enter_context(lock(writing / _UNFINISHED))
        except Locked as error:
            raise in_use from error
        try:
            refuse_existing(path)  # another process may have finished it meanwhile
            _clear(writing)
            yield writing
            flush_folder(writing)
            # A rename would replace an empty folder that another process has made meanwhile.
            refuse_existing(path)
            writing.rename(path)
        except BaseException:
            shutil.rmtree(writing, ignore_errors=True)
            raise
        # After the rename: earlier, another process could make it again and clear the folder.
        (path / _UNFINISHED).unlink()
    flush_folder(path)
    flush_folder(path.parent)


def refuse_existing(path: Path) -> None:
    """Raise FileExistsError if something exists at ``path``."""
    if os.path.lexists(path):
        raise FileExistsError(f"{path} exists already; name a folder that does not exist")


def _clear(folder: Path) -> None:
    """Remove the remains of a killed process, but keeps the lock."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != _UNFINISHED:
            entry.unlink()

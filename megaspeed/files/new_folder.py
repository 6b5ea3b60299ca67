"""A folder is there whole, or not at all: filled under a temporary name beside it, then renamed.

    OUT.writing/.unfinished     a lock, held as long as the folder is filled; taken out at the end
    OUT.writing/...             what becomes OUT

Who makes OUT.writing fills it. A process that was killed leaves it with a lock that nobody holds,
and the next one goes on in its place. A folder of that name without the lock is somebody else's.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megaspeed.files.durable import TEMPORARY, flush_folder

_LOCK = ".unfinished"


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """An empty folder to fill, which becomes ``path`` where the block ends without an error.

    Where it raises, nothing is left. Its files are flushed by who writes them. What a process that
    was killed has left is replaced.

    Raises:
        FileExistsError: there is something at ``path``, or another process is filling it.
    """
    refuse_existing(path)
    with _sole_use(path.with_name(path.name + TEMPORARY), path) as writing:
        try:
            yield writing
            (writing / _LOCK).unlink()
            flush_folder(writing)
            # A rename would take the place of an empty folder that is there by now.
            refuse_existing(path)
            writing.rename(path)
        except BaseException:
            shutil.rmtree(writing, ignore_errors=True)
            raise
    flush_folder(path.parent)


def refuse_existing(path: Path) -> None:
    """Raises FileExistsError where there is something at ``path``."""
    if os.path.lexists(path):
        raise FileExistsError(f"{path} is there already; name a folder that is not")


@contextmanager
def _sole_use(writing: Path, path: Path) -> Iterator[Path]:
    """The folder, empty but for its lock; the kernel frees the lock of a process that died."""
    made = _make(writing)
    lock = _open_lock(writing, made=made)
    try:
        if lock is None or not _take(lock, made=made):
            raise FileExistsError(
                f"{path} is filled under the name {writing}, and that is there: another process "
                f"is filling it, or it is not megaspeed's; wait for the other one, move {writing} "
                "away, or name another folder"
            )
        _clear(writing)
        yield writing
    finally:
        if lock is not None:
            os.close(lock)


def _make(writing: Path) -> bool:
    """Whether it was not there."""
    try:
        writing.mkdir(parents=True)
    except FileExistsError:
        return False
    return True


def _open_lock(writing: Path, *, made: bool) -> int | None:
    """The lock in a folder that was made just now, or in one of ours; None where there is none."""
    try:
        return os.open(writing / _LOCK, os.O_RDWR | (os.O_CREAT if made else 0), 0o666)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _take(lock: int, *, made: bool) -> bool:
    """Whether nobody else holds it, and it still stands in a folder."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # Some network file systems know no locks. There a folder is its maker's alone.
        return made
    # It was taken out if its folder was finished since it was opened.
    return os.fstat(lock).st_nlink > 0


def _clear(writing: Path) -> None:
    """Removes what a process that was killed has left, but for the lock."""
    for entry in writing.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != _LOCK:
            entry.unlink()

"""A file is there whole, or not at all.

    write    under a temporary name beside it
    flush    to the disk
    rename   to its own name, in one stroke; who has the old file open or mapped keeps it

A process that dies on the way leaves the temporary name and the old file. The new name itself
outlives a loss of power only once its folder was flushed, too.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

TEMPORARY = ".writing"
"""What the name of a file or a folder ends in while it is being written."""

T = TypeVar("T")


def write_whole(path: Path, fill: Callable[[BinaryIO], T]) -> T:
    """Writes ``path`` with ``fill``, which is given the open file; what was there is replaced.

    A link stays, and the file that it names is replaced. For one process at a time. Where ``fill``
    fails, the temporary file stays.

    Returns:
        What ``fill`` returns.
    """
    path = path.resolve()
    temporary = path.with_name(path.name + TEMPORARY)
    with temporary.open("wb") as stream:
        filled = fill(stream)
        stream.flush()
        # Without this a machine that loses power may keep the new name and lose the bytes.
        os.fsync(stream.fileno())
    temporary.replace(path)
    return filled


def flush_folder(path: Path) -> None:
    """Brings the names in a folder to the disk: what was made, renamed and removed in it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

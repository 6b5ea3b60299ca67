"""Reads files from other sources: only regular files, and only up to a size limit.

    regular file      read, up to a limit
    named pipe        opening it would wait for a writer
    device, socket    may never end
    folder            has no content to read

Links are followed.
"""

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

LARGEST_BYTES = 1 << 24
"""Limit for a file that is read into memory: 16 MiB. The largest model index has 10 MB."""

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


def read_whole(path: Path, largest_bytes: int = LARGEST_BYTES) -> bytes:
    """The bytes of an ordinary file.

    Raises:
        OSError: there is none, this user may not read it, or it has more than ``largest_bytes``;
            ``strerror`` is the reason.
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
            yield f"{path} {problem}, and must be a file"

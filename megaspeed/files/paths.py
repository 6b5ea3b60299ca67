"""Paths, and what is at them: only regular files are read, in bounded time and memory.

    regular file      read, up to a limit
    named pipe        opening it would wait for a writer
    device, socket    may never end
    folder            has no content to read

Links are followed.
"""

import errno
import hashlib
import os
import shutil
import stat
from argparse import ArgumentTypeError
from collections.abc import Iterable, Iterator
from pathlib import Path

_LONGEST_NAME, _LONGEST_PATH = 255, 4095
"""Limits of Linux and its file systems, in bytes."""

LARGEST_BYTES = 1 << 24
"""Limit for a file that is read into memory: 16 MiB. The largest model index has 10 MB."""

FileState = tuple[str, int, int, int]
"""(path, size in bytes, mtime in ns, ctime in ns). If it is unchanged, so is the file."""

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


def special_among(paths: Iterable[Path]) -> Iterator[str]:
    """A sentence for each of ``paths`` that exists and is neither a file nor a folder.

    For what a library reads, because the library would open it.
    """
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


def nearest_existing(path: Path) -> Path:
    """``path``, or the nearest folder above it that exists."""
    # os.path.exists: Path.exists raises below a folder that this user may not enter.
    path = path.absolute()
    return next(place for place in (path, *path.parents) if os.path.exists(place))


def free_bytes(path: Path) -> int:
    """Free space on the disk of ``path``, which need not exist yet."""
    return shutil.disk_usage(nearest_existing(path)).free


def folder_problem(name: str, folder: Path) -> str | None:
    """Why ``folder``, given as ``name``, cannot be created or written to; None if it can."""
    full = folder.absolute()
    # A broken link counts as existing, because no folder can be created in its place.
    existing = next(place for place in (full, *full.parents) if os.path.lexists(place))
    if not os.path.isdir(existing):
        why = file_problem(existing) or "is a file"
        problem = f"{name} {folder} cannot be a folder, because {existing} {why}"
    elif not os.access(existing, os.W_OK | os.X_OK):
        problem = f"{name} {folder} cannot be written to: {existing} forbids it"
    else:
        return None
    return f"{problem}; name another folder"


def expand_home(source: str | Path) -> Path:
    """The path with a leading ~ replaced; the path itself if there is no such user."""
    return Path(os.path.expanduser(source))


def path_problem(text: str) -> str | None:
    """Why no file can have this path; None if one can. Does not access the file system.

    Also works for globs, because each part of a glob matches one name.
    """
    if "\0" in text:
        return "it has a NUL character, which ends a path; remove it"
    encoded = text.encode("utf-8", "surrogatepass")
    longest = max(map(len, encoded.split(b"/")))
    if longest > _LONGEST_NAME:
        return f"a name in it has {longest:,} bytes, but must have at most {_LONGEST_NAME}"
    if len(encoded) > _LONGEST_PATH:
        return f"it has {len(encoded):,} bytes, but must have at most {_LONGEST_PATH:,}"
    return None


def path_argument(text: str) -> Path:
    """A path on the command line. Expands ~, because a shell does not do so in ``--output=~/x``.

    Raises ArgumentTypeError if it is empty, not UTF-8 or a broken link, or no file can have it.
    """
    if not text:
        raise ArgumentTypeError("the path is empty; name one")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # Python represents such bytes as lone surrogates
        raise ArgumentTypeError(
            f"a path must be UTF-8, because the libraries that read and write files accept only "
            f"UTF-8, but {text!r} is not; name another"
        ) from error
    problem = path_problem(text)
    if problem is None and os.path.islink(text) and not os.path.exists(text):
        problem = f"it {file_problem(Path(text))}"
    if problem is not None:
        raise ArgumentTypeError(f"{problem}; name another")
    return expand_home(text)

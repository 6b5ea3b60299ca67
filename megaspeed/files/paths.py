"""Paths: home folders, the nearest existing folder, and paths that cannot exist."""

import os
import shutil
from argparse import ArgumentTypeError
from pathlib import Path

from megaspeed.files.reading import file_problem

_LONGEST_NAME, _LONGEST_PATH = 255, 4095
"""Limits of Linux and its file systems, in bytes."""

_VIRTUAL = (("proc",), ("sys",))  # nobody can create files there, although root seems to be allowed


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
    elif not os.access(existing, os.W_OK | os.X_OK) or existing.resolve().parts[1:2] in _VIRTUAL:
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
    longest = max(len(_encoded(part)) for part in text.split("/"))
    if longest > _LONGEST_NAME:
        return f"a name in it has {longest:,} bytes, but must have at most {_LONGEST_NAME}"
    if len(_encoded(text)) > _LONGEST_PATH:
        return f"it has {len(_encoded(text)):,} bytes, but must have at most {_LONGEST_PATH:,}"
    return None


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


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

"""Where a path leads: from whose home, and as far as it is there yet."""

import os
from argparse import ArgumentTypeError
from pathlib import Path

from megaspeed.files.reading import file_problem

_LONGEST_NAME, _LONGEST_PATH = 255, 4095
"""Bytes, as Linux and its file systems limit them."""


def nearest_existing(path: Path) -> Path:
    """``path``, or the nearest folder above it that exists."""
    # os.path.exists: Path.exists raises below a folder that this user may not enter.
    whole = path.absolute()
    return next(place for place in (whole, *whole.parents) if os.path.exists(place))


def folder_problem(name: str, folder: Path) -> str | None:
    """Why ``folder``, given as ``name``, cannot be made or written to; None where it can."""
    whole = folder.absolute()
    # A link that leads nowhere is there as well: nothing can be made in its place.
    existing = next(place for place in (whole, *whole.parents) if os.path.lexists(place))
    if not os.path.isdir(existing):
        why = file_problem(existing) or "is a file"
        problem = f"{name} {folder} cannot be a folder, because {existing} {why}"
    elif not os.access(existing, os.W_OK | os.X_OK):
        problem = f"{name} {folder} cannot be written to: {existing} forbids it"
    else:
        return None
    return f"{problem}; name another folder"


def expand_home(source: str | Path) -> Path:
    """The path with a leading ~ replaced; where there is no such user, the path as it is."""
    return Path(os.path.expanduser(source))


def path_problem(text: str) -> str | None:
    """Why nothing can have this path; None if something can. Looks at the text alone.

    Globs count as well: each of their parts stands for a name.
    """
    if "\0" in text:
        return "it has a NUL character, which ends a path; remove it"
    longest = max(len(_encoded(part)) for part in text.split("/"))
    if longest > _LONGEST_NAME:
        return f"a name in it has {longest:,} bytes, and must have at most {_LONGEST_NAME}"
    if len(_encoded(text)) > _LONGEST_PATH:
        return f"it has {len(_encoded(text)):,} bytes, and must have at most {_LONGEST_PATH:,}"
    return None


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def named_place(text: str) -> Path:
    """A path on the command line, of which a shell leaves the ~ of ``--output=~/x`` to us.

    Raises:
        ArgumentTypeError: it is empty, its bytes are no UTF-8, or no file can have it.
    """
    if not text:
        raise ArgumentTypeError("it is a path, and this one is empty; name one")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # Python hands such bytes on as lone surrogates
        raise ArgumentTypeError(
            f"a name must be UTF-8, because the libraries that read and write there take no other, "
            f"and {text!r} is not; name another"
        ) from error
    problem = path_problem(text)
    if problem is None and os.path.islink(text) and not os.path.exists(text):
        problem = f"it {file_problem(Path(text))}"
    if problem is not None:
        raise ArgumentTypeError(f"{problem}; name another")
    return expand_home(text)

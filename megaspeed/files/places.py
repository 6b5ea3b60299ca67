"""Where a path leads: from whose home, and as far as it is there yet."""

import os
from argparse import ArgumentTypeError
from pathlib import Path


def nearest_existing(path: Path) -> Path:
    """``path``, or the nearest folder above it that exists."""
    # os.path.exists: Path.exists raises below a folder that this user may not enter.
    whole = path.absolute()
    return next(place for place in (whole, *whole.parents) if os.path.exists(place))


def folder_problem(name: str, folder: Path) -> str | None:
    """Why ``folder``, given as ``name``, cannot be made or written to; None where it can."""
    existing = nearest_existing(folder)
    if not existing.is_dir():
        problem = f"{name} {folder} cannot be a folder, because {existing} is a file"
    elif not os.access(existing, os.W_OK | os.X_OK):
        problem = f"{name} {folder} cannot be written to: {existing} forbids it"
    else:
        return None
    return f"{problem}; name another folder"


def expand_home(source: str | Path) -> Path:
    """The path with a leading ~ replaced; where there is no such user, the path as it is."""
    return Path(os.path.expanduser(source))


def named_place(text: str) -> Path:
    """A path on the command line, of which a shell leaves the ~ of ``--output=~/x`` to us.

    Raises:
        ArgumentTypeError: it is empty, or its bytes are no UTF-8.
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
    return expand_home(text)

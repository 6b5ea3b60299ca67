"""A folder is there whole, or not at all: filled under a temporary name beside it, then renamed."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megaspeed.files.durable import TEMPORARY, flush_folder


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """An empty folder to fill, which becomes ``path`` where the block ends without an error.

    Where it raises, nothing is left. Its files are flushed by who writes them. For one process at a
    time; what a process that was killed has left is replaced.

    Raises:
        FileExistsError: there is something at ``path``.
    """
    refuse_existing(path)
    writing = path.with_name(path.name + TEMPORARY)
    if writing.exists():
        shutil.rmtree(writing)
    writing.mkdir(parents=True)
    try:
        yield writing
        flush_folder(writing)
        refuse_existing(path)
        writing.rename(path)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise
    flush_folder(path.parent)


def refuse_existing(path: Path) -> None:
    """Raises FileExistsError where there is something at ``path``."""
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"{path} is there already; name a folder that is not")

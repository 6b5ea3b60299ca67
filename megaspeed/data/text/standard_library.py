"""The corpus that every machine has: the source text of the Python standard library."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Not source text of the library itself: installed packages, tests (some are deliberately not
# UTF-8), and what the build of this one interpreter wrote.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "sitecustomize", "usercustomize")


def library_folder() -> Path:
    """Where this interpreter's library is."""
    return Path(sysconfig.get_path("stdlib"))


def library_files() -> Iterator[Path]:
    """Its `.py` files, in no order."""
    for folder, subfolders, names in os.walk(library_folder()):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in _SKIPPED_FOLDERS and not name.startswith(_SKIPPED_PREFIXES)
        ]
        for name in names:
            if name.endswith(".py") and not name.startswith(_SKIPPED_PREFIXES):
                yield Path(folder, name)

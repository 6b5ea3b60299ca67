"""Sources to files: what `data.train` and `data.validation` list, found on this machine.

A source is the word `python-stdlib`, the path of a text file, or a glob such as `books/**/*.txt`.
Every file has a name relative to its source, with forward slashes, and files are in the order of
these names: so the same files give the same corpus wherever they lie and in whatever order the
file system lists them.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaspeed.config.data import BUNDLED_CORPUS
from megaspeed.data.errors import DataError

# Not source text of the library itself: installed packages, tests (some are deliberately not
# UTF-8), and what the build of this one interpreter wrote.
_STDLIB_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
_STDLIB_SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "sitecustomize", "usercustomize")

# Formats that hold text but are not text: read as text they would train on their syntax.
_NOT_PLAIN_TEXT = frozenset(
    {".json", ".jsonl", ".parquet", ".arrow", ".csv", ".gz", ".bz2", ".xz", ".zst", ".zip", ".bin"}
)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One text file: `name` is relative to its source, `path` is where it is on this machine."""

    name: str
    path: Path

    def state(self) -> tuple[str, int, int, int]:
        """(path, size in bytes, mtime in ns, ctime in ns), to tell whether the file changed."""
        stat = self.path.stat()
        return (str(self.path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def list_files(sources: Sequence[str], setting: str) -> list[SourceFile]:
    """The files of `sources`, sources in their order and each source's files by name.

    Args:
        sources: the source strings, as in the JSON.
        setting: the JSON key they come from, for messages: `data.train` or `data.validation`.

    Raises:
        DataError: a source matches nothing, cannot be read, is not plain text, or a file is
            matched twice; all such problems at once.
    """
    if not sources:
        raise DataError(
            f"{setting} must list at least one source and lists none; "
            f'name a text file or a glob, or "{BUNDLED_CORPUS}"'
        )
    files: list[SourceFile] = []
    problems: list[str] = []
    first_source: dict[Path, str] = {}
    for source in sources:
        found = _files_of(source)
        if not found:
            problems.append(_nothing_found(source, setting))
        for file in found:
            real = file.path.resolve()
            if real in first_source:
                problems.append(
                    f"{setting}: a file is trained on once an epoch, and {file.path} is matched "
                    f"by both {first_source[real]!r} and {source!r}; narrow one of the two"
                )
                continue
            first_source[real] = source
            problem = _unreadable(file, setting)
            if problem is None:
                files.append(file)
            else:
                problems.append(problem)
    if problems:
        raise DataError(*problems)
    return files


def _files_of(source: str) -> list[SourceFile]:
    if source == BUNDLED_CORPUS:
        return sorted(_stdlib_files(), key=lambda file: file.name)
    path = expand_home(source)
    if path.is_file():
        return [SourceFile(path.name, path.absolute())]
    root = _fixed_part(path)
    matches = (Path(match) for match in glob.glob(str(path), recursive=True))
    files = [
        SourceFile(match.relative_to(root).as_posix(), match.absolute())
        for match in matches
        if match.is_file()
    ]
    return sorted(files, key=lambda file: file.name)


def expand_home(source: str) -> Path:
    """The path with a leading ~ replaced; where there is no such user, the path as it is."""
    try:
        return Path(source).expanduser()
    except RuntimeError:
        return Path(source)


def _stdlib_files() -> Iterator[SourceFile]:
    root = Path(sysconfig.get_path("stdlib"))
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in _STDLIB_SKIPPED_FOLDERS and not name.startswith(_STDLIB_SKIPPED_PREFIXES)
        ]
        for name in names:
            if name.endswith(".py") and not name.startswith(_STDLIB_SKIPPED_PREFIXES):
                path = Path(folder, name)
                yield SourceFile(path.relative_to(root).as_posix(), path)


def _fixed_part(pattern: Path) -> Path:
    """The folder above the first part of the pattern that has a wildcard."""
    fixed: list[str] = []
    for part in pattern.parts[:-1]:
        if glob.has_magic(part):
            break
        fixed.append(part)
    return Path(*fixed)


def _nothing_found(source: str, setting: str) -> str:
    if source == BUNDLED_CORPUS:
        folder = sysconfig.get_path("stdlib")
        return (
            f'{setting}: "{BUNDLED_CORPUS}" needs the standard library as .py files and {folder} '
            "has none; name text files instead"
        )
    path = expand_home(source)
    if path.is_dir():
        return (
            f"{setting}: a source is a file or a glob, and {source!r} is a folder; "
            f'write "{(path / "**" / "*.txt").as_posix()}"'
        )
    if glob.has_magic(source):
        return (
            f"{setting}: a glob must match at least one file, and {source!r} matches 0 under "
            f"{_fixed_part(path).absolute()}; relative paths start from the working directory"
        )
    return (
        f"{setting}: there is no file {path.absolute()}; correct the path, "
        f'or use "{BUNDLED_CORPUS}" for the default corpus'
    )


def _unreadable(file: SourceFile, setting: str) -> str | None:
    if file.path.suffix.lower() in _NOT_PLAIN_TEXT:
        return (
            f"{setting}: sources are plain UTF-8 text, and {file.path} is a "
            f"{file.path.suffix} file; extract its text into a .txt file"
        )
    if not os.access(file.path, os.R_OK):
        return f"{setting}: {file.path} cannot be read by this user; change its permissions"
    return None

"""Find what sources name: a file, a folder, or the matches of a glob.

``!books/drafts`` or ``!README*`` excludes files from the sources before it.
"""

import glob
import os
import sys
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import chain, takewhile
from pathlib import Path

from megaspeed.config.data import BUNDLED_CORPUS, Source
from megaspeed.data.errors import raise_any
from megaspeed.files.paths import expand_home

Found = tuple[Source, list[Path]]
"""A source that is not an exclusion, and the absolute paths that it names, sorted."""

_REPORTED_AFTER_SECONDS = 5.0


def find(sources: Sequence[Source], setting: str, report: bool = False) -> list[Found]:
    """List what sources name, without what is excluded. Datasets and python-stdlib have no path.

    Raises:
        DataError: every exclusion that removes nothing, or all that a source names.
    """
    found: list[Found] = []
    problems: list[str] = []
    for source in sources:
        if not source.excludes:
            is_path = source.path not in (None, BUNDLED_CORPUS)
            found.append((source, paths_at(str(source.path), report) if is_path else []))
            continue
        pattern, before = _exclusion(str(source.path)[1:]), found
        found = [(s, [p for p in paths if not _excludes(pattern, p.parts)]) for s, paths in before]
        if found == before:
            problems.append(
                f"{setting}: an exclusion must remove a file of the sources before it, but "
                f"'{source}' removes none of {sum(len(paths) for _, paths in found):,}; correct "
                "it, move it after its sources, or omit it"
            )
        problems += [
            f"{setting}: a source must keep a file, but '{source}' excludes all "
            f"{len(paths):,} of '{each}'; narrow the exclusion, or omit the source"
            for (each, paths), (_, left) in zip(before, found, strict=True)
            if paths and not left
        ]
    raise_any(problems)
    return found


def paths_at(text: str, report: bool = False) -> list[Path]:
    """Return the absolute paths that a path or a glob names, sorted.

    If ``report``, a search that takes long is reported once on standard error.
    """
    path = expand_home(text)
    if os.path.exists(path):  # its name may look like a glob
        return [path.absolute()]
    found: set[Path] = set()
    report_at = time.monotonic() + _REPORTED_AFTER_SECONDS if report else float("inf")
    for matched in matches(path) if glob.has_magic(str(path)) else ():
        found.update(Path(match).absolute() for match in matched)
        if time.monotonic() > report_at:
            below = fixed_part(path).absolute()
            sys.stderr.write(f"looking for files below {below}: {len(found):,} found so far\n")
            report_at = float("inf")
    return sorted(found)


def matches(pattern: Path) -> Iterator[list[str]]:
    """Match as ``glob.glob(recursive=True)``, folder by folder for ``**``, some paths repeatedly.

    ``**`` enters each folder once, so links in a circle end.
    """
    if "**" not in pattern.parts:
        yield glob.glob(str(pattern))
        return
    above = list(takewhile("**".__ne__, pattern.parts))
    below = pattern.parts[len(above) + 1 :] or ("*",)
    for top in glob.glob(str(Path(*above))):
        for folder in _folders_from(top):
            yield from matches(Path(glob.escape(folder), *below))


def _folders_from(top: str) -> Iterator[str]:
    """Yield the folder and those below it, without hidden ones. Links to folders are entered last.

    So a file is found below its real folder if possible. A link to a folder above leads nowhere.
    """
    entered, starts = set(map(str, Path(top).resolve().parents)), [top]
    for folder, names, _ in chain.from_iterable(map(os.walk, starts)):  # its links become starts
        real = os.path.realpath(folder)
        names[:] = [] if real in entered else sorted(n for n in names if n[0] != ".")
        if real not in entered:
            entered.add(real)
            starts += filter(os.path.islink, (os.path.join(folder, name) for name in names))
            yield folder


def fixed_part(pattern: Path) -> Path:
    """Return the folder above the first part of the pattern that has a wildcard."""
    return Path(*takewhile(lambda part: not glob.has_magic(part), pattern.parts[:-1]))


def _exclusion(text: str) -> tuple[str, ...]:
    if "/" not in text.rstrip("/"):  # a name in any folder, as in .gitignore
        return ("**", text.rstrip("/"))
    return Path(os.path.abspath(expand_home(text))).parts


def _excludes(pattern: Sequence[str], names: Sequence[str]) -> bool:
    """Return whether the pattern, or a name as is, matches the path or a folder above it."""
    if not pattern or not names:
        return set(pattern) <= {"**"}
    if pattern[0] == "**":
        return _excludes(pattern[1:], names) or _excludes(pattern, names[1:])
    is_named = fnmatchcase(names[0], pattern[0]) or names[0] == pattern[0]
    return is_named and _excludes(pattern[1:], names[1:])

"""Finds what sources name: a file, a folder, a prefix of token files, or the matches of a glob.

    books/**/*.txt  !books/drafts  !README*      `!` excludes from the sources before it

A glob follows links. Links to folders are entered last, and no folder is entered twice for the same
rest of a pattern. So links in a circle end, and a file is found below its real folder if possible.
"""

from __future__ import annotations

import glob
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from megaspeed.config.data import BUNDLED_CORPUS, EXCLUDES, Source
from megaspeed.data.errors import raise_any
from megaspeed.files.paths import expand_home

Report = Callable[[str], object]
"""Shows the user a line."""

_REPORTED_AFTER_SECONDS = 5.0


@dataclass(frozen=True)
class Found:
    """A source that is not an exclusion, and the absolute paths that it names, sorted."""

    source: Source
    paths: list[Path]


def silently(line: str) -> None:
    """A `Report` that shows nothing."""


def on_standard_error(line: str) -> None:
    """A `Report` on standard error."""
    sys.stderr.write(f"{line}\n")


def find(sources: Sequence[Source], setting: str, report: Report = silently) -> list[Found]:
    """What the sources name, without what is excluded. Datasets and python-stdlib name no path.

    Raises:
        DataError: every exclusion that removes nothing, or all that a source names.
    """
    found: list[Found] = []
    problems: list[str] = []
    for source in sources:
        if not source.excludes:
            is_path = source.path not in (None, BUNDLED_CORPUS)
            found.append(Found(source, paths_at(str(source.path), report) if is_path else []))
            continue
        pattern = _exclusion(str(source.path).removeprefix(EXCLUDES))
        kept = [Found(f.source, [p for p in f.paths if not _excludes(pattern, p)]) for f in found]
        if kept == found:
            problems.append(
                f"{setting}: an exclusion must remove a file of the sources before it, but "
                f"'{source}' removes none of {sum(len(each.paths) for each in found):,}; correct "
                "it, move it after its sources, or omit it"
            )
        problems += [
            f"{setting}: a source must keep a file, but '{source}' excludes all "
            f"{len(each.paths):,} of '{each.source}'; narrow the exclusion, or omit the source"
            for each, left in zip(found, kept, strict=True)
            if each.paths and not left.paths
        ]
        found = kept
    raise_any(problems)
    return found


def paths_at(text: str, report: Report = silently) -> list[Path]:
    """The absolute paths that a path, a prefix of token files or a glob names, sorted."""
    path = expand_home(text)
    if os.path.exists(path) or os.path.isfile(f"{path}.idx"):  # its name may look like a glob
        return [path.absolute()]
    return sorted(match.absolute() for match in matches(path, report))


def matches(glob_pattern: Path, report: Report = silently) -> Iterator[Path]:
    """The matches of a glob, as of `glob.iglob(recursive=True)`. A long search is reported once."""
    if not glob.has_magic(str(glob_pattern)):
        return
    root = fixed_part(glob_pattern)
    pattern = glob_pattern.parts[len(root.parts) :]
    start = _without_folders(pattern, {0})
    # A link to a folder above the root would lead out of it.
    entered = {(os.stat(folder)[1:3], start) for folder in root.resolve().parents}
    folders, links = [(str(root), start)], list[tuple[str, frozenset[int]]]()
    count, report_at = 0, time.monotonic() + _REPORTED_AFTER_SECONDS
    while folders or links:
        folder, places = (folders or links).pop()
        try:
            visit = (os.stat(folder)[1:3], places)  # inode and device
            entries = [] if visit in entered else sorted(os.scandir(folder), key=lambda e: e.name)
        except OSError:  # this user may not enter it
            continue
        entered.add(visit)
        for entry in entries:
            after = _after(pattern, places, entry.name, is_glob=True)
            if len(pattern) in after:
                count += 1
                yield Path(entry.path)
            is_link = entry.is_symlink()
            if min(after, default=len(pattern)) < len(pattern) and (
                os.path.isdir(entry.path) if is_link else entry.is_dir()
            ):
                (links if is_link else folders).append((entry.path, after))
        if time.monotonic() > report_at:
            report(f"looking for files below {root.absolute()}: {count:,} found so far")
            report_at = float("inf")


def fixed_part(pattern: Path) -> Path:
    """The folder above the first part of the pattern that has a wildcard."""
    fixed: list[str] = []
    for part in pattern.parts[:-1]:
        if glob.has_magic(part):
            break
        fixed.append(part)
    return Path(*fixed)


def _exclusion(text: str) -> tuple[str, ...]:
    if "/" not in text.rstrip("/"):  # a name in any folder, as in .gitignore
        return ("**", text.rstrip("/"))
    return Path(os.path.abspath(expand_home(text))).parts


def _excludes(pattern: Sequence[str], path: Path) -> bool:
    """Whether the pattern matches the path or a folder above it."""
    places = _without_folders(pattern, {0})
    for name in Path(os.path.abspath(path)).parts:
        places = _after(pattern, places, name)
        if len(pattern) in places:
            return True
    return False


def _after(
    pattern: Sequence[str], places: frozenset[int], name: str, *, is_glob: bool = False
) -> frozenset[int]:
    """The places of the pattern that can be reached with this name; its length is its end.

    Wildcards of a glob do not match the dot of a hidden name. An exclusion may state a name as is.
    """
    reached = set()
    for place in places - {len(pattern)}:
        part = pattern[place]
        if is_glob and name.startswith(".") and not part.startswith("."):
            continue
        if part == "**":
            reached.add(place)
        elif fnmatchcase(name, part) or (part == name and not is_glob):
            reached.add(place + 1)
    return _without_folders(pattern, reached)


def _without_folders(pattern: Sequence[str], places: set[int]) -> frozenset[int]:
    """The places, and those after each `**`, which matches no folder, too."""
    for place, part in enumerate(pattern):
        if part == "**" and place in places:
            places.add(place + 1)
    return frozenset(places)

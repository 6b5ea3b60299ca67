"""Sources to files: what `data.train` and `data.validation` list, found on this machine.

A source is the word `python-stdlib`, the path of a file or of a saved dataset, a glob such as
`books/**/*.txt`, or the name of a dataset. Every file has a name relative to its source, with
forward slashes, and files are in the order of these names: so the same files give the same corpus
wherever they lie and in whatever order the file system lists them.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from megaspeed.config.data import BUNDLED_CORPUS, Source
from megaspeed.data.errors import DataError
from megaspeed.data.text.dataset import NamedDataset, SavedDataset
from megaspeed.data.text.formats import format_of, is_file_or_dataset, why_refused
from megaspeed.data.text.pieces import OnBad, Piece, refuse
from megaspeed.data.text.plain_text import PlainText
from megaspeed.data.text.standard_library import library_files, library_folder
from megaspeed.data.text.text_format import TextFormat
from megaspeed.files.paths import expand_home
from megaspeed.files.reading import FileState, file_problem

_PLAIN_TEXT = PlainText()
_LOOKED_AT_FILES = 10_000


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of text, or one split of a dataset.

    Attributes:
        name: relative to its source.
        path: where it is on this machine; of a dataset known by name, that name.
        format: how it is read.
    """

    name: str
    path: Path
    format: TextFormat = _PLAIN_TEXT

    def pieces(self, after: int = 0, on_bad: OnBad = refuse) -> Iterator[Piece]:
        """The text of its documents, in order.

        Args:
            after: a mark: begin behind the document that it ends.
            on_bad: told of every record that is no text; where it returns, the next one follows.

        Raises:
            DataError: a record is bad, and `on_bad` refuses it.
            OSError: the file is not there, or this user may not read it.
        """
        return self.format.pieces(self.path, after, on_bad)

    def state(self) -> FileState:
        """(path, size in bytes, mtime in ns, ctime in ns), to tell whether the file changed."""
        return self.format.state(self.path)

    def place(self) -> tuple[str, str]:
        """What it is whatever it is called: equal places hold the same text."""
        is_named = isinstance(self.format, NamedDataset)
        return (str(self.path if is_named else self.path.resolve()), self.format.part())


def list_files(sources: Sequence[Source], setting: str) -> list[SourceFile]:
    """The files of `sources`, sources in their order and each source's files by name.

    Args:
        sources: as in the configuration.
        setting: where they come from, for messages: `data.train` or `data.validation`.

    Raises:
        DataError: a source matches nothing, cannot be read, is of no format that is read, or a
            file is matched twice; all such problems at once.
    """
    return [file for files in files_by_source(sources, setting) for file in files]


def files_by_source(sources: Sequence[Source], setting: str) -> list[list[SourceFile]]:
    """As `list_files`, with a list of its own for each source."""
    if not sources:
        raise DataError(
            f"{setting} must list at least one source and lists none; "
            f'name a text file or a glob, or "{BUNDLED_CORPUS}"'
        )
    listed: list[list[SourceFile]] = []
    problems: list[str] = []
    first: dict[tuple[str, str], tuple[Path, Source]] = {}
    for source in sources:
        found = _files_of(source)
        listed.append(found)
        if not found:
            problems.append(_nothing_found(source, setting))
        for file in found:
            if file.place() in first:
                before = first[file.place()]
                problems.append(matched_twice(setting, before, (file.path, source)))
                continue
            first[file.place()] = (file.path, source)
            problem = _unreadable(file, setting)
            if problem is not None:
                problems.append(problem)
    if problems:
        raise DataError(*problems)
    return listed


def matched_twice(setting: str, first: tuple[Path, Source], second: tuple[Path, Source]) -> str:
    """That one file is listed twice; `first` and `second` are its paths and sources."""
    law = f"{setting}: a file is listed once, and"
    path, source = first
    other_path, other_source = second
    shown = str(path) if path == other_path else f"{path}, which is {other_path} too (by a link),"
    if path != other_path and source is other_source:
        return f"{law} {shown} is matched twice by '{source}'; narrow it"
    return (
        f"{law} {shown} is matched by both '{source}' and '{other_source}'; narrow one of the "
        "two, or leave it out"
    )


def _files_of(source: Source) -> list[SourceFile]:
    if source.dataset is not None:
        dataset = NamedDataset.of(source)
        return [SourceFile(source.dataset + dataset.part(), Path(source.dataset), dataset)]
    return sorted(_files_at(source), key=lambda file: file.name)


def _files_at(source: Source) -> Iterator[SourceFile]:
    if source.path == BUNDLED_CORPUS:
        folder = library_folder()
        for path in library_files():
            yield SourceFile(path.relative_to(folder).as_posix(), path)
        return
    path = expand_home(str(source.path))
    if is_file_or_dataset(path):
        yield SourceFile(path.name, path.absolute(), format_of(path, source))
        return
    root = _fixed_part(path)
    for match in map(Path, glob.glob(str(path), recursive=True)):
        if is_file_or_dataset(match):
            name = match.relative_to(root).as_posix()
            yield SourceFile(name, match.absolute(), format_of(match, source))


def _fixed_part(pattern: Path) -> Path:
    """The folder above the first part of the pattern that has a wildcard."""
    fixed: list[str] = []
    for part in pattern.parts[:-1]:
        if glob.has_magic(part):
            break
        fixed.append(part)
    return Path(*fixed)


def _nothing_found(source: Source, setting: str) -> str:
    if source.path == BUNDLED_CORPUS:
        return (
            f'{setting}: "{BUNDLED_CORPUS}" needs the standard library as .py files and '
            f"{library_folder()} has none; name text files instead"
        )
    path = expand_home(str(source.path))
    if path.is_dir():
        return (
            f"{setting}: a source is a file, a glob or a folder that save_to_disk of datasets "
            f"wrote, and '{source}' is another folder{_what_is_in(path)}"
        )
    literal = str(path).replace("[", "[[]")
    if literal != str(path) and glob.glob(literal, recursive=True):
        return (
            f"{setting}: brackets in a glob stand for one of the characters between them, and "
            f"'{source}' matches 0 files so; write \"{literal}\" for the brackets themselves"
        )
    if glob.has_magic(str(path)):
        return (
            f"{setting}: a glob must match at least one file, and '{source}' matches 0 under "
            f"{_fixed_part(path).absolute()}; relative paths start from the working directory"
        )
    if os.path.lexists(path):
        return f"{setting}: {path.absolute()} {file_problem(path)}; name a file of text"
    return (
        f"{setting}: there is no file {path.absolute()}; correct the path, "
        f'or use "{BUNDLED_CORPUS}" for the default corpus'
    )


def _what_is_in(folder: Path) -> str:
    """How many files of which suffix are in a folder, and the glob of the most that may be text."""
    seen = list(islice(_files_below(folder), _LOOKED_AT_FILES))
    suffixes = Counter(path.suffix for path in seen).most_common()
    if not suffixes:
        return ", and empty; name another"
    there = ", ".join(f"{count} {suffix or 'without suffix'}" for suffix, count in suffixes[:4])
    counted = Counter(path.suffix for path in seen if why_refused(path) is None).most_common()
    # A glob of files without suffix matches every other file, too.
    readable = [suffix for suffix, _ in counted if suffix or len(suffixes) == 1]
    if not readable:
        return f" with no text (its files: {there}); name a file or a glob of text"
    glob_of_most = Path(glob.escape(str(folder)), "**", f"*{readable[0]}").as_posix()
    return f' (its files: {there}); write "{glob_of_most}"'


def _files_below(folder: Path) -> Iterator[Path]:
    """Those that a glob finds, so no hidden ones; what this user may not enter is passed over."""
    for place, folders, names in os.walk(folder):
        folders[:] = _visible(folders)
        paths = (Path(place, name) for name in _visible(names))
        yield from filter(os.path.isfile, paths)


def _visible(names: Sequence[str]) -> list[str]:
    return [name for name in names if not name.startswith(".")]


def _unreadable(file: SourceFile, setting: str) -> str | None:
    if isinstance(file.format, NamedDataset):
        return None
    mend = why_refused(file.path) if file.path.is_file() else None
    if mend is not None:
        return f"{setting}: {file.path} is a {file.path.suffix} file, which is not read; {mend}"
    if isinstance(file.format, SavedDataset):
        wrong = file.format.problem(file.path)
        return None if wrong is None else f"{setting}: {wrong}"
    if not os.access(file.path, os.R_OK):
        return f"{setting}: {file.path} cannot be read by this user; change its permissions"
    return None

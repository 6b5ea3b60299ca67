"""Find the files of text that ``data.train`` and ``data.validation`` list.

A source is the word ``python-stdlib``, the path of a file or of a saved dataset, a glob such as
``books/**/*.txt``, or the name of a dataset. Every file has a name relative to its source, with
forward slashes, and files are sorted by these names. So the same files give the same corpus,
wherever they are and in any order in which the file system lists them.

The suffix of a file determines its format. A number after it is ignored, as in ``pages.jsonl.1``:

    .jsonl .ndjson     JSON lines             also as .gz and .zst
    .parquet           a table
    any other          plain UTF-8 text       also as .gz and .zst

Formats that contain text in another syntax are refused, because the model would train on the
syntax.
"""

import glob
import os
import re
import sysconfig
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path

from megaspeed.config.run import BUNDLED_CORPUS, Source
from megaspeed.data.errors import DataError, raise_any
from megaspeed.data.formats import (
    ARCHIVES,
    JsonLines,
    NamedDataset,
    PlainText,
    SavedDataset,
    Table,
    is_saved_dataset,
)
from megaspeed.data.pieces import OnBad, Piece, TextFormat, refuse
from megaspeed.files.paths import FileState, expand_home, file_problem

_EXTRACT = "extract its text into .txt or .jsonl files"
_UNPACK = "unpack it, or pack each file alone as .gz or .zst"
_REFUSED: Mapping[str, str] = {
    ".json": "one object on each line is read if the file is named .jsonl",
    ".arrow": "name the folder that datasets' save_to_disk wrote",
    ".bin": "it may hold token ids, which are not text",
    ".idx": "it may be the index of token ids, which are not text",
    **dict.fromkeys((".csv", ".tsv", ".pdf", ".docx", ".npy", ".pt"), _EXTRACT),
    **dict.fromkeys((".tar", ".tgz", ".zip", ".bz2", ".xz", ".7z"), _UNPACK),
}
_JSON_LINES = (".jsonl", ".ndjson")
_TABLE = ".parquet"

# Folders and files that are omitted: installed packages; tests, of which some are deliberately not
# UTF-8; and files that the build of this interpreter wrote.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "sitecustomize", "usercustomize")

_LIBRARY = Path(sysconfig.get_path("stdlib"))
_PLAIN_TEXT = PlainText()

Found = tuple[Source, list[Path]]
"""A source, and the absolute paths that it names, sorted. A named dataset has none."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of text, or one split of a dataset."""

    name: str  # its name relative to its source
    path: Path  # its path on this machine, or the name of a dataset that is loaded by name
    format: TextFormat = _PLAIN_TEXT  # how it is read

    def pieces(self, on_bad: OnBad = refuse) -> Iterator[Piece]:
        """Yield the text of its documents, in order.

        Args:
            on_bad: called with every record that is not text.

        Raises:
            DataError: a record is bad, and ``on_bad`` refuses it.
            OSError: the file does not exist, or this user may not read it.
        """
        return self.format.pieces(self.path, on_bad)

    def state(self) -> FileState:
        """Return (path, bytes, mtime in ns, ctime in ns), which change if the file changes."""
        return self.format.state(self.path)

    def place(self) -> tuple[str, str]:
        """Identify the text: files with equal places hold the same text."""
        is_named = isinstance(self.format, NamedDataset)
        return (str(self.path if is_named else self.path.resolve()), self.format.part())


def find(sources: Sequence[Source]) -> list[Found]:
    """List the paths that sources name. Datasets and python-stdlib have none."""
    return [
        (source, [] if source.path in (None, BUNDLED_CORPUS) else paths_at(str(source.path)))
        for source in sources
    ]


def paths_at(text: str) -> list[Path]:
    """Return the absolute paths that a path or a glob names, sorted."""
    path = expand_home(text)
    if os.path.exists(path):  # its name may look like a glob
        return [path.absolute()]
    matches = _matches(path) if glob.has_magic(str(path)) else ()
    return sorted({Path(match).absolute() for match in matches})


def _matches(pattern: Path) -> Iterator[str]:
    """Match as ``glob.glob(recursive=True)``, but ``**`` enters each folder once.

    So links in a circle end.
    """
    if "**" not in pattern.parts:
        yield from glob.glob(str(pattern))
        return
    above = list(takewhile("**".__ne__, pattern.parts))
    below = pattern.parts[len(above) + 1 :] or ("*",)
    for top in glob.glob(str(Path(*above))):
        for folder in _folders_from(top):
            yield from _matches(Path(glob.escape(folder), *below))


def _folders_from(top: str) -> Iterator[str]:
    """Yield the folder and those below it, without hidden ones. Links to folders come last.

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


def files_by_source(
    found: Sequence[Found], setting: str, may_be_empty: Container[Source] = ()
) -> list[list[SourceFile]]:
    """Return the files of each source, sorted by name.

    Args:
        found: the sources, with their paths.
        setting: the key that they come from, such as ``data.train``.
        may_be_empty: sources that need not have files of text, because they have tokens.

    Raises:
        DataError: a source matches nothing, cannot be read, has an unknown format, or a file is
            matched by two sources; all such problems at once.
    """
    if not found:
        raise DataError(
            f"{setting} must list at least one source, but lists none; "
            f'name a text file or a glob, or "{BUNDLED_CORPUS}"'
        )
    first: dict[tuple[str, str], tuple[Path, Source]] = {}
    problems: list[str | None] = []
    listed = [files_of(source, paths) for source, paths in found]
    for (source, _), files in zip(found, listed, strict=True):
        if not files and source not in may_be_empty:
            problems.append(_nothing_found(source, setting))
        for file in files:
            problems.append(_unreadable(file, setting))
            named = (file.path, source)
            if first.setdefault(file.place(), named) is not named:
                problems.append(_matched_twice(setting, first[file.place()], named))
    raise_any(problems)
    return listed


def _matched_twice(setting: str, first: tuple[Path, Source], second: tuple[Path, Source]) -> str:
    """Return the problem that one file is listed twice, as (path, source) and (path, source)."""
    path, source = first
    other_path, other_source = second
    link = "" if path == other_path else f" (the same file as {other_path}, by a link)"
    return (
        f"{setting}: a file may be listed only once, but {path}{link} is matched by both "
        f"'{source}' and '{other_source}'; narrow one of the two, or remove it"
    )


def files_of(source: Source, paths: Sequence[Path]) -> list[SourceFile]:
    """Return the files of a source, sorted by name. Links to files that it has are omitted."""
    if source.dataset is not None:
        keys = ("configuration", "revision", "streaming", "split", "text_field")
        dataset = NamedDataset(**{key: getattr(source, key) for key in keys})
        return [SourceFile(source.dataset + dataset.part(), Path(source.dataset), dataset)]
    files = sorted(_files_at(source, paths), key=lambda file: file.name)
    own: dict[tuple[str, str], SourceFile] = {}
    for file in sorted(files, key=lambda file: file.place()[0] != str(file.path)):  # links last
        own.setdefault(file.place(), file)
    return [file for file in files if own[file.place()] is file]


def _files_at(source: Source, paths: Sequence[Path]) -> Iterator[SourceFile]:
    if source.path == BUNDLED_CORPUS:
        for path in _library_files():
            yield SourceFile(path.relative_to(_LIBRARY).as_posix(), path)
        return
    path = expand_home(str(source.path))
    root = None if os.path.exists(path) else _fixed_part(path).absolute()
    for match in paths:
        if os.path.isdir(match) and not is_saved_dataset(match):
            continue
        name = path.name if root is None else match.relative_to(root).as_posix()
        yield SourceFile(name, match, _format_of(match, source))


def _fixed_part(pattern: Path) -> Path:
    """Return the folder above the first part of the pattern that has a wildcard."""
    return Path(*takewhile(lambda part: not glob.has_magic(part), pattern.parts[:-1]))


def _library_files() -> Iterator[Path]:
    """Yield the ``.py`` files of the standard library, unsorted."""
    for folder, subfolders, names in os.walk(_LIBRARY):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in _SKIPPED_FOLDERS and not name.startswith(_SKIPPED_PREFIXES)
        ]
        for name in names:
            if name.endswith(".py") and not name.startswith(_SKIPPED_PREFIXES):
                yield Path(folder, name)


def _format_of(path: Path, source: Source) -> TextFormat:
    if path.is_dir():
        return SavedDataset(source.split, source.text_field)
    suffix = _suffix(path)
    if suffix in _JSON_LINES:
        return JsonLines(source.text_field)
    return Table(source.text_field) if suffix == _TABLE else _PLAIN_TEXT


def _suffix(path: Path) -> str:
    """Return the suffix that states the format, in lower case, without .gz, .zst and numbers."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    while suffixes and (suffixes[-1] in ARCHIVES or suffixes[-1][1:].isdecimal()):
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _unreadable(file: SourceFile, setting: str) -> str | None:
    if isinstance(file.format, NamedDataset):
        return None
    if isinstance(file.format, SavedDataset):
        wrong = file.format.problem(file.path)
        return None if wrong is None else f"{setting}: {wrong}"
    problem = file_problem(file.path)
    if problem is not None:
        return f"{setting}: {file.path} {problem}; name a file of text"
    mend = _REFUSED.get(_suffix(file.path))
    if mend is not None:
        return f"{setting}: {file.path} is a {file.path.suffix} file, which is not read; {mend}"
    if not os.access(file.path, os.R_OK):
        return f"{setting}: {file.path} cannot be read by this user; change its permissions"
    return None


def _nothing_found(source: Source, setting: str) -> str:
    if source.path == BUNDLED_CORPUS:
        return (
            f'{setting}: "{BUNDLED_CORPUS}" needs the standard library as .py files, but '
            f"{_LIBRARY} has none; name text files instead"
        )
    path = expand_home(str(source.path))
    if path.is_dir():
        return (
            f"{setting}: a source must be a file, a glob or a folder that save_to_disk of datasets "
            f"wrote, but '{source}' is another folder; name the files in it, for example with "
            f'"{Path(glob.escape(str(path)), "**", "*.txt")}"'
        )
    if glob.has_magic(str(path)):
        return (
            f"{setting}: a glob must match at least one file, but '{source}' matches 0 under "
            f"{_fixed_part(path).absolute()}; relative paths start from the working directory"
        )
    mend = f'use "{BUNDLED_CORPUS}" for the default corpus'
    if re.fullmatch(r"([\w-]+/)?[\w-]+", str(source)):
        key = f'{{"dataset": "{source}"}}' if setting.startswith("data.") else f"--dataset {source}"
        mend = f"name a dataset of Hugging Face with {key}"
    return f"{setting}: there is no file {path.absolute()}; correct the path, or {mend}"

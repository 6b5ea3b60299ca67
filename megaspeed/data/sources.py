"""Find the sources of text that ``data.train`` and ``data.validation`` list.

A source is the word ``python-stdlib``, the path of a file or of a saved dataset, a glob such as
``books/**/*.txt``, or the name of a dataset. Every file has a name relative to its source, with
forward slashes, and files are sorted by these names. So the same files give the same corpus,
wherever they are and in any order in which the file system lists them.

The suffix of a file determines its format:

    .jsonl .ndjson     JSON lines             also as .gz and .zst
    .parquet           a table
    any other          plain UTF-8 text       also as .gz and .zst

Formats that contain text in another syntax are refused, because the model would train on the
syntax. A name such as ``pages.jsonl.1`` is refused, too, because its suffix does not state the
format.
"""

import glob
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from megaspeed.config.data import BUNDLED_CORPUS, Source
from megaspeed.data.errors import DataError, raise_any
from megaspeed.data.pieces import OnBad, Piece, TextFormat, refuse
from megaspeed.data.search import Found, fixed_part, matches
from megaspeed.data.tables import NamedDataset, SavedDataset, Table, is_saved_dataset
from megaspeed.data.text_files import ARCHIVES, JsonLines, PlainText
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
_KNOWN_SUFFIXES = {*_JSON_LINES, _TABLE, *ARCHIVES, *_REFUSED}

# Folders and files that are omitted: installed packages; tests, of which some are deliberately not
# UTF-8; and files that the build of this interpreter wrote.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "sitecustomize", "usercustomize")

_PLAIN_TEXT = PlainText()


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of text, or one split of a dataset.

    Attributes:
        name: its name relative to its source.
        path: its path on this machine, or the name of a dataset that is loaded by name.
        format: how it is read.
    """

    name: str
    path: Path
    format: TextFormat = _PLAIN_TEXT

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


def files_by_source(found: Sequence[Found], setting: str, report: bool) -> list[list[SourceFile]]:
    """Return the files of each source, sorted by name. If ``report``, skipped links are reported.

    Globs skip links to files that are listed. If two links lead to one file, the first one is
    listed. ``setting`` is the key that the sources come from, such as ``data.train``.

    Raises:
        DataError: a source matches nothing, cannot be read, has an unknown format, or a file is
            matched twice; all such problems at once.
    """
    if not found:
        raise DataError(
            f"{setting} must list at least one source, but lists none; "
            f'name a text file or a glob, or "{BUNDLED_CORPUS}"'
        )
    named = [[(f.place(), f, source) for f in _files_of(source, paths)] for source, paths in found]
    first: dict[tuple[str, str], tuple[SourceFile, Source]] = {}
    in_order = sorted(chain(*named), key=lambda each: each[0][0] != str(each[1].path))
    for place, file, source in in_order:  # a file before links to it
        first.setdefault(place, (file, source))
    problems: list[str | None] = []
    listed: list[list[SourceFile]] = []
    for (source, paths), files in zip(found, named, strict=True):
        listed.append([file for place, file, _ in files if first[place][0] is file])
        skips_links = listed[-1] and glob.has_magic(str(source.path))
        broken = [path for path in paths if path.is_symlink() and not os.path.exists(path)]
        if broken:
            problems.append(
                f"{setting}: a link must lead to a file, but of '{source}', {len(broken):,} are "
                f"broken, the first {broken[0]}; restore their files, remove the links, or exclude "
                f'them with "!{broken[0]}"'
            )
        elif not files:
            problems.append(_nothing_found(source, setting))
        problems += [_unreadable(file, setting) for file in listed[-1]]
        for place, file, _ in files:
            other, its_source = first[place]
            if other is not file and (other.path == file.path or not skips_links):
                this = (file.path, source)
                problems.append(matched_twice(setting, (other.path, its_source), this))
    raise_any(problems)
    links = sum(map(len, named)) - len(first)
    if links and report:
        sys.stderr.write(f"{setting}: skipped links to files already listed: {links:,}\n")
    return listed


def is_file_or_dataset(path: Path) -> bool:
    """Return whether ``path`` is something that a format may read."""
    return path.is_file() or is_saved_dataset(path)


def matched_twice(setting: str, first: tuple[Path, Source], second: tuple[Path, Source]) -> str:
    """Return the problem that one file is listed twice, as (path, source) and (path, source)."""
    path, source = first
    other_path, other_source = second
    link = "" if path == other_path else f" (the same file as {other_path}, by a link)"
    if link and source is other_source:
        law = f"{setting}: a file may be listed only once"
        return f"{law}, but '{source}' matches {path}{link} twice; narrow it"
    return (
        f"{setting}: a file may be listed only once, but {path}{link} is matched by both "
        f"'{source}' and '{other_source}'; narrow one of the two, or remove it"
    )


def _files_of(source: Source, paths: Sequence[Path]) -> list[SourceFile]:
    if source.dataset is not None:
        dataset = NamedDataset.of(source)
        return [SourceFile(source.dataset + dataset.part(), Path(source.dataset), dataset)]
    return sorted(_files_at(source, paths), key=lambda file: file.name)


def _files_at(source: Source, paths: Sequence[Path]) -> Iterator[SourceFile]:
    if source.path == BUNDLED_CORPUS:
        for path in _library_files():
            yield SourceFile(path.relative_to(_library_folder()).as_posix(), path)
        return
    path = expand_home(str(source.path))
    root = None if is_file_or_dataset(path) else fixed_part(path).absolute()
    for match in filter(is_file_or_dataset, paths):
        name = path.name if root is None else match.relative_to(root).as_posix()
        yield SourceFile(name, match, _format_of(match, source))


def _library_folder() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _library_files() -> Iterator[Path]:
    """Yield the ``.py`` files of the standard library, unsorted."""
    for folder, subfolders, names in os.walk(_library_folder()):
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
    suffix, is_archive = _suffix(path)
    if suffix in _JSON_LINES:
        return JsonLines(source.text_field)
    if suffix == _TABLE and not is_archive:
        return Table(source.text_field)
    return _PLAIN_TEXT


def _suffix(path: Path) -> tuple[str, bool]:
    """Return (the suffix that states the format, in lower case; whether .gz or .zst follows)."""
    is_archive = path.suffix.lower() in ARCHIVES
    named = Path(path.stem) if is_archive else path
    return named.suffix.lower(), is_archive


def _why_refused(path: Path) -> str | None:
    """How to fix a file whose format is refused; None if it is accepted."""
    suffix, is_archive = _suffix(path)
    named = Path(path.stem) if is_archive else path
    numbered = Path(named.stem).suffix.lower() if suffix.removeprefix(".").isdecimal() else ""
    if numbered in _KNOWN_SUFFIXES:  # such as pages.jsonl.1, an older log
        ending = numbered + (path.suffix if is_archive else "")
        return _REFUSED.get(numbered, f"rename it so that its name ends in {ending}")
    if suffix == _TABLE and is_archive:
        return "unpack it; a table is compressed within"
    return _REFUSED.get(suffix)


def _unreadable(file: SourceFile, setting: str) -> str | None:
    if isinstance(file.format, NamedDataset):
        return None
    mend = _why_refused(file.path) if file.path.is_file() else None
    if mend is not None:
        return f"{setting}: {file.path} is a {file.path.suffix} file, which is not read; {mend}"
    if isinstance(file.format, SavedDataset):
        wrong = file.format.problem(file.path)
        return None if wrong is None else f"{setting}: {wrong}"
    if not os.access(file.path, os.R_OK):
        return f"{setting}: {file.path} cannot be read by this user; change its permissions"
    return None


def _nothing_found(source: Source, setting: str) -> str:
    if source.path == BUNDLED_CORPUS:
        return (
            f'{setting}: "{BUNDLED_CORPUS}" needs the standard library as .py files, but '
            f"{_library_folder()} has none; name text files instead"
        )
    path = expand_home(str(source.path))
    if path.is_dir():
        inside = Path(glob.escape(str(path)), "**")
        files = filter(os.path.isfile, islice(chain.from_iterable(matches(inside)), 10_000))
        readable = (file for file in map(Path, files) if not _why_refused(file))
        inside /= f"*{next((file.suffix for file in readable), '.txt')}"
        return (
            f"{setting}: a source must be a file, a glob or a folder that save_to_disk of datasets "
            f"wrote, but '{source}' is another folder; name the files in it, for example with "
            f'"{inside}"'
        )
    if glob.has_magic(str(path)):
        brackets = '; for a bracket that is part of a name, write "[[]"' if "[" in str(path) else ""
        return (
            f"{setting}: a glob must match at least one file, but '{source}' matches 0 under "
            f"{fixed_part(path).absolute()}; relative paths start from the working directory"
            f"{brackets}"
        )
    if os.path.lexists(path):
        return f"{setting}: {path.absolute()} {file_problem(path)}; name a file of text"
    return (
        f"{setting}: there is no file {path.absolute()}; correct the path, "
        f'or use "{BUNDLED_CORPUS}" for the default corpus'
    )

"""Which format a file has: its suffix says so, and a folder's content.

    .jsonl .ndjson     JSON lines             also as .gz and .zst
    .parquet           a table
    any other          plain UTF-8 text       also as .gz and .zst
    folder             a dataset, as `save_to_disk` of datasets writes it

Formats that hold text but are not text are refused: read as text they would train on their syntax.
So is a name such as `pages.jsonl.1`, whose suffix does not say what it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megaspeed.config.data import Source
from megaspeed.data.text.byte_stream import ARCHIVES
from megaspeed.data.text.dataset import SavedDataset, is_saved_dataset
from megaspeed.data.text.json_lines import JsonLines
from megaspeed.data.text.plain_text import PlainText
from megaspeed.data.text.table import Table
from megaspeed.data.text.text_format import TextFormat

_EXTRACT = "extract its text into .txt or .jsonl files"
_UNPACK = "unpack it, or pack each file alone as .gz or .zst"
_REFUSED: Mapping[str, str] = {
    ".json": "one object on each line is read where the file is named .jsonl",
    ".arrow": "name the folder that datasets' save_to_disk wrote",
    ".bin": "it may hold token ids, which are no text",
    ".idx": "it may be the index of token ids, which are no text",
    **dict.fromkeys((".csv", ".tsv", ".pdf", ".docx", ".npy", ".pt"), _EXTRACT),
    **dict.fromkeys((".tar", ".tgz", ".zip", ".bz2", ".xz", ".7z"), _UNPACK),
}
_JSON_LINES = (".jsonl", ".ndjson")
_TABLE = ".parquet"
_NAMED_BY_SUFFIX = {*_JSON_LINES, _TABLE, *ARCHIVES, *_REFUSED}


def is_file_or_dataset(path: Path) -> bool:
    """Whether there is at `path` what a format may read, if it is of one that is read."""
    return path.is_file() or is_saved_dataset(path)


def format_of(path: Path, source: Source) -> TextFormat:
    """The format of what is at `path`; `source` says which field and split are meant."""
    if path.is_dir():
        return SavedDataset(source.split, source.text_field)
    suffix, is_archive = _suffix(path)
    if suffix in _JSON_LINES:
        return JsonLines(source.text_field)
    if suffix == _TABLE and not is_archive:
        return Table(source.text_field)
    return PlainText()


def why_refused(path: Path) -> str | None:
    """What to do where the file is of a format that is not read; None where it is."""
    suffix, is_archive = _suffix(path)
    before = _suffix_before_number(path)
    if before in _NAMED_BY_SUFFIX:
        ending = before + (path.suffix if is_archive else "")
        return _REFUSED.get(before, f"rename it so that its name ends in {ending}")
    if suffix == _TABLE and is_archive:
        return "unpack it; a table is compressed within"
    return _REFUSED.get(suffix)


def _suffix(path: Path) -> tuple[str, bool]:
    """(the suffix that names the format, in small letters; whether an archive's is behind it)."""
    suffixes, is_archive = _suffixes(path)
    return (suffixes[-1] if suffixes else ""), is_archive


def _suffix_before_number(path: Path) -> str:
    """`.jsonl` of `pages.jsonl.1`, as a log that is rotated is named; empty of other names."""
    suffixes, _ = _suffixes(path)
    is_numbered = len(suffixes) > 1 and suffixes[-1].removeprefix(".").isdecimal()
    return suffixes[-2] if is_numbered else ""


def _suffixes(path: Path) -> tuple[list[str], bool]:
    """(all suffixes but an archive's, in small letters; whether an archive's is behind them)."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    is_archive = bool(suffixes) and suffixes[-1] in ARCHIVES
    return (suffixes[:-1] if is_archive else suffixes), is_archive

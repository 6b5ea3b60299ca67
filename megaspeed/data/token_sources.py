"""Recognize and open sources that are already token ids.

a folder with our index.json        written by ``megaspeed tokenize``
NAME.bin and NAME.idx, or NAME      Megatron-LM's
NAME.bin alone                      nanoGPT's
a glob of any of these              every match, sorted by name; ordinary folders are skipped
"""

from collections.abc import Iterable
from pathlib import Path

from megaspeed.data.cache import Cache
from megaspeed.data.errors import DataError
from megaspeed.data.foreign_tokens import open_megatron, open_nanogpt, why_not_16_bit, with_suffix
from megaspeed.data.token_file import TokenFile
from megaspeed.data.token_folder import INDEX, SHARDS, is_token_folder, open_token_folder
from megaspeed.files.reading import special_among


def token_paths(paths: Iterable[Path]) -> list[Path]:
    """Return the token folders, .idx files, .bin files and prefixes of such files among some paths.

    A pair of .bin and .idx is represented by its .idx.
    """
    return list(dict.fromkeys(map(_index_of_pair, filter(_is_tokens, paths))))


def open_tokens(path: Path, cache: Cache) -> tuple[TokenFile, ...]:
    """Return the token files at one of ``token_paths``, in order.

    Raises:
        DataError: every file that is damaged or has another format, or there are no tokens.
    """
    if path.is_dir():
        files = open_token_folder(path, cache)
        if not files:
            raise DataError(f"a source must have tokens, but {path} has none; name another")
        return files
    special = next(special_among([path]), None)
    if special is not None:
        raise DataError(special)
    if path.suffix == ".idx":
        return (open_megatron(path.with_suffix(""), cache),)
    if _is_shard(path):
        raise DataError(
            f"the shards of a token folder are read through its {INDEX}, but {path} is one shard; "
            f"name the folder, {path.parent}"
        )
    return (open_nanogpt(path, cache),)


def why_not_tokens(path: Path, vocab_size: int) -> str | None:
    """Return a problem with the first ids of one of ``token_paths``; None if there is none."""
    special = next(special_among([path]), None)
    if special is not None:
        return special
    is_nanogpt = path.suffix == ".bin" and path.is_file() and not _is_shard(path)
    return why_not_16_bit(path, vocab_size) if is_nanogpt else None


def _is_tokens(path: Path) -> bool:
    if path.is_dir():
        return is_token_folder(path)
    return path.suffix in (".bin", ".idx") or _is_pair(path)


def _is_pair(prefix: Path) -> bool:
    """Return whether NAME.bin and NAME.idx exist for this NAME."""
    if prefix.is_dir() or not prefix.name:
        return False
    return all(with_suffix(prefix, suffix).is_file() for suffix in (".bin", ".idx"))


def _is_shard(path: Path) -> bool:
    """Return whether it is a file of a finished token folder."""
    return path.match(SHARDS) and (path.parent / INDEX).is_file()


def _index_of_pair(path: Path) -> Path:
    """NAME.idx if the path names a pair; any other path unchanged."""
    if path.suffix == ".bin" and path.with_suffix(".idx").is_file():
        return path.with_suffix(".idx")
    return with_suffix(path, ".idx") if _is_pair(path) else path

"""Recognize and open sources that are already token ids.

a folder with our index.json        written by ``megaspeed tokenize``
NAME.bin                            16-bit ids, little-endian, and nothing else
a glob of any of these              every match, sorted by name; ordinary folders are skipped

nanoGPT's data/openwebtext/prepare.py writes such a NAME.bin, and Megatron-LM does if the vocabulary
is small enough. It does not state its largest id, so it is read completely, once on each machine.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np

from megaspeed.data.cache import Cache, remembered
from megaspeed.data.errors import DataError
from megaspeed.data.token_file import TokenFile, TokenIndex, in_blocks
from megaspeed.data.token_folder import INDEX, SHARDS, is_token_folder, open_token_folder
from megaspeed.files.json_values import Facts
from megaspeed.files.paths import special_among

_RAW_DTYPE: Final = "<u2"
_LOOKED_AT_IDS = 1 << 16
_FEWEST_IDS = 64  # fewer may look like 32-bit ids by chance


def token_paths(paths: Iterable[Path]) -> list[Path]:
    """Return the token folders and .bin files among some paths."""
    return [path for path in paths if path.suffix == ".bin" or is_token_folder(path)]


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
    if _is_shard(path):
        raise DataError(
            f"the shards of a token folder are read through its {INDEX}, but {path} is one shard; "
            f"name the folder, {path.parent}"
        )
    return (_open_raw(path, cache),)


def why_not_tokens(path: Path, vocab_size: int) -> str | None:
    """Return a problem with the first ids of one of ``token_paths``; None if there is none.

    In a file of 32-bit ids, every second 16-bit number is the upper half of an id. It is 0 if the
    vocabulary is at most 65,536, and a small number if it is larger. 16-bit ids do not look like
    this.
    """
    special = next(special_among([path]), None)
    if special is not None or not path.is_file() or _is_shard(path):
        return special
    ids = np.fromfile(path, dtype=_RAW_DTYPE, count=_LOOKED_AT_IDS)
    lower, upper = ids[0::2], ids[1::2]
    largest_upper = (vocab_size - 1) >> 16
    if len(ids) < _FEWEST_IDS or upper.max() > largest_upper or lower.max() <= largest_upper:
        return None
    return (
        f"a .bin holds 16-bit ids, but every second one of {path} is at most {largest_upper}, as "
        f"in a file of 32-bit ids for model.vocab_size {vocab_size}; write it as uint16 if all ids "
        "are below 65,536, or tokenize the text with `megaspeed tokenize`"
    )


def _open_raw(path: Path, cache: Cache) -> TokenFile:
    size = path.stat().st_size
    if size == 0 or size % 2:
        raise DataError(
            f"a .bin holds a number of complete 16-bit ids, but {path} has {size} bytes; it was "
            "truncated or has another format: copy it again, or tokenize again"
        )
    purpose = "for its largest id and its checksum"
    found = remembered(cache, "surveys", [path], lambda: _read_ids(path), purpose)
    index = TokenIndex(
        tokens=size // 2,
        documents=None,
        dtype=_RAW_DTYPE,
        largest_id=found["largest_id"],
        vocab_size=None,
        end_of_text=None,
        tokenizer_fingerprint=None,
        corpus_fingerprint=found["fingerprint"],
    )
    return TokenFile(path, index)


def _read_ids(path: Path) -> Facts:
    """Read every id once. The fingerprint is the sha256 of the dtype and of every byte."""
    digest, largest_id = hashlib.sha256(_RAW_DTYPE.encode()), 0
    for _, block in in_blocks(np.memmap(path, dtype=_RAW_DTYPE, mode="r")):
        digest.update(block.tobytes())
        largest_id = max(largest_id, int(block.max()))
    return {"fingerprint": digest.hexdigest(), "largest_id": largest_id}


def _is_shard(path: Path) -> bool:
    """Return whether it is a file of a finished token folder."""
    return path.match(SHARDS) and (path.parent / INDEX).is_file()

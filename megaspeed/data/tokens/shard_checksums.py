"""The whole of every shard against its checksum, once for each machine.

Opening a token folder reads a sample of each shard, which an edit or a damage elsewhere escapes.
"""

from __future__ import annotations

from pathlib import Path

from megaspeed.data.cache import Cache
from megaspeed.data.errors import DataError
from megaspeed.data.tokens.remembered import remembered
from megaspeed.data.tokens.token_folder import COPY_AGAIN, read_index
from megaspeed.files.json_values import Facts
from megaspeed.files.reading import sha256_of

# Part of every key: raise it when something else is to be remembered of a shard.
_FORMAT = 1
_CHECKSUM = "sha256"


def check_shard_checksums(folder: Path, cache: Cache) -> None:
    """Compares the shards of a folder, all of them there; reads those not seen before as they are.

    Raises:
        DataError: every shard whose bytes are not those that were written.
    """
    problems = []
    for shard in read_index(folder).shards:
        found = _checksum(folder / shard.file, cache)
        if found != shard.checksum:
            problems.append(
                f"a shard must be as it was written, and {folder / shard.file} is not: its sha256 "
                f"is {found[:16]}... instead of {shard.checksum[:16]}...; {COPY_AGAIN}"
            )
    if problems:
        raise DataError(*problems)


def _checksum(path: Path, cache: Cache) -> str:
    def read() -> Facts:
        return {_CHECKSUM: sha256_of(path)}

    facts = remembered(cache, "checksums", _FORMAT, [path], read, "to compare its checksum")
    return str(facts[_CHECKSUM])

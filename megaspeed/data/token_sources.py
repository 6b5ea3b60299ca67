"""Sources that are token ids already: recognize, check and open them.

a folder that ``megaspeed tokenize`` or training on text wrote:

    FOLDER/tokens-00000.bin ...      ids, in shards that end with a document
    FOLDER/index.json                written last: the content of the shards, with checksums
    FOLDER/tokenizer.json ...        the tokenizer, as AutoTokenizer loads it
    FOLDER/plan.json                 only while the folder is not finished

NAME.bin                             16-bit ids, little-endian, and nothing else

Every start checks that each shard has its size. Each machine reads every shard completely once, and
again if its size or times change, and verifies its checksum.

nanoGPT's data/openwebtext/prepare.py writes such a NAME.bin, and Megatron-LM does if the vocabulary
is small enough. It does not state its largest id, so it is also read completely, once on each
machine.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
from pydantic import TypeAdapter

from megaspeed.data.cache import Cache, remembered
from megaspeed.data.errors import DataError, raise_any
from megaspeed.data.token_file import IdType, TokenFile, TokenIndex, in_blocks
from megaspeed.files.json_values import Facts, read_sealed, write_sealed
from megaspeed.files.paths import sha256_of, special_among

INDEX = "index.json"
PLAN = "plan.json"
SHARDS = "tokens-*.bin"

# Folders of format 1 also had the checksums of samples of their shards.
_FORMAT = 2
_FORMATS_READ = (1, 2)
_COPY_AGAIN = "copy the folder again, or remove it and tokenize again"

_RAW_DTYPE: Final = "<u2"
_LOOKED_AT_IDS = 1 << 16
_FEWEST_IDS = 64  # fewer may look like 32-bit ids by chance


@dataclass(frozen=True)
class Shard:
    """One file of the folder."""

    file: str  # its name in the folder
    tokens: int  # number of its ids, including end-of-text tokens
    documents: int  # number of its documents
    checksum: str  # sha256 of the file, in hexadecimal


@dataclass(frozen=True)
class TokenFolderIndex(TokenIndex):
    """The content of a token folder. All facts are known, and are those of all shards together."""

    documents: int
    end_of_text: int
    tokenizer_fingerprint: str
    vocab_size: int  # one more than the largest id of the tokenizer
    shards: tuple[Shard, ...]  # in order


def token_paths(paths: Iterable[Path]) -> list[Path]:
    """Return the token folders and .bin files among some paths."""
    return [path for path in paths if path.suffix == ".bin" or is_token_folder(path)]


def open_tokens(path: Path, cache: Cache) -> tuple[TokenFile, ...]:
    """Return the token files at one of ``token_paths``, in order.

    Raises DataError with every file that is damaged or has another format, or if there are none.
    """
    if path.is_dir():
        files = open_token_folder(path, cache)
        if not files:
            raise DataError(f"a source must have tokens, but {path} has none; name another")
        return files
    return (_open_raw(path, cache),)


def why_not_tokens(path: Path, vocab_size: int) -> str | None:
    """Return a problem with the first ids of one of ``token_paths``; None if there is none.

    In a file of 32-bit ids, every second 16-bit number is the upper half of an id. It is 0 if the
    vocabulary is at most 65,536, and a small number if it is larger. 16-bit ids do not look like
    this.
    """
    special = next(special_among([path]), None)
    if special is not None or not path.is_file():
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
    found = remembered(cache, "surveys", path, lambda: _read_ids(path))
    index = TokenIndex(
        tokens=size // 2,
        documents=None,
        dtype=_RAW_DTYPE,
        largest_id=found["largest_id"],
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


def write_index(folder: Path, index: TokenFolderIndex) -> None:
    """Write the index, which finishes a folder. Its shards must be on the disk."""
    write_sealed(folder / INDEX, {"format": _FORMAT, **asdict(index)})


def is_token_folder(path: Path) -> bool:
    """Return whether ``path`` is a folder of token files, finished or not.

    Other programs write files named index.json and plan.json, too, but without our seal.
    """
    return path.is_dir() and (
        any(path.glob(SHARDS))
        or any(read_sealed(path / name) is not None for name in (INDEX, PLAN))
    )


def read_index(folder: Path) -> TokenFolderIndex:
    """Return the content of a finished folder.

    Raises DataError if the folder is not finished, or its index is damaged.
    """
    path = folder / INDEX
    if not path.exists():
        raise DataError(
            f"only a finished token folder can be trained on, but {folder} has no {INDEX}: its "
            "tokenization did not finish; run the same `megaspeed tokenize` command again, which "
            "continues it"
        )
    facts = read_sealed(path)
    if facts is None:
        raise DataError(f"{path} was changed or damaged (its hash does not match); {_COPY_AGAIN}")
    found = facts.pop("format", None)
    if found not in _FORMATS_READ:
        raise DataError(
            f"token folders have format {_FORMAT}, but {path} has format {found}; {_COPY_AGAIN}"
        )
    return TypeAdapter(TokenFolderIndex).validate_python(facts)


def open_token_folder(folder: Path, cache: Cache) -> tuple[TokenFile, ...]:
    """Open the shards of a finished folder.

    Args:
        cache: stores which shards this machine has already read completely.

    Raises:
        DataError: every shard that is missing, truncated or changed.
    """
    index = read_index(folder)
    raise_any(_problem(folder / shard.file, shard, index.dtype, cache) for shard in index.shards)
    return token_files(folder, index)


def token_files(folder: Path, index: TokenFolderIndex) -> tuple[TokenFile, ...]:
    """Return the shards of a folder as token files.

    A single shard has the fingerprint of its documents, so it gives the same stream as the text. If
    there are several, the fingerprint of each is the checksum of its ids.
    """
    is_single = len(index.shards) == 1
    return tuple(
        TokenFile(
            folder / shard.file,
            TokenIndex(
                tokens=shard.tokens,
                documents=shard.documents,
                dtype=index.dtype,
                largest_id=index.largest_id,
                end_of_text=index.end_of_text,
                tokenizer_fingerprint=index.tokenizer_fingerprint,
                corpus_fingerprint=index.corpus_fingerprint if is_single else shard.checksum,
            ),
        )
        for shard in index.shards
    )


def _problem(path: Path, shard: Shard, dtype: IdType, cache: Cache) -> str | None:
    """Return what is wrong with a shard; None if nothing is. An unchanged shard is read once."""
    if not path.is_file():
        return f"a token folder must have every shard, but {path} is missing; {_COPY_AGAIN}"
    size, expected = path.stat().st_size, shard.tokens * np.dtype(dtype).itemsize
    if size != expected:
        return (
            f"a shard must be as long as its index states, but {path} has {size} bytes instead of "
            f"{expected}; {_COPY_AGAIN}"
        )
    facts = remembered(cache, "checksums", path, lambda: {"sha256": sha256_of(path)})
    if facts["sha256"] == shard.checksum:
        return None
    return (
        f"a shard must stay as it was written, but {path} did not: its sha256 is "
        f"{facts['sha256'][:16]}... instead of {shard.checksum[:16]}...; {_COPY_AGAIN}"
    )

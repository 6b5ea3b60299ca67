"""Token folders, which `megaspeed tokenize` writes.

    FOLDER/tokens-00000.bin ...      ids, in shards that end with a document
    FOLDER/index.json                written last: the content of the shards, with checksums
    FOLDER/tokenizer.json ...        the tokenizer, as AutoTokenizer loads it
    FOLDER/plan.json                 only while the folder is not finished

Every start checks the size and 1 MiB of each shard, which is fast enough for thousands of ranks.
Each machine reads every shard completely once, and verifies its checksum.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from megaspeed.data.cache import Cache, remembered
from megaspeed.data.errors import DataError
from megaspeed.data.token_file import IdType, TokenFile, TokenIndex
from megaspeed.files.json_values import read_sealed, write_sealed
from megaspeed.files.reading import sha256_of, spaced_sample

INDEX = "index.json"
PLAN = "plan.json"
SHARDS = "tokens-*.bin"

_FORMAT = 1
_CHECKSUMS_FORMAT = 1
_SAMPLES_KEY = "samples"
_KEYS_OF_INDEX = {"format", "shards", _SAMPLES_KEY}
_KEYS_OF_PLAN = {"format", "input", "shard_tokens"}
_SAMPLED_BLOCKS = 16
_SAMPLED_BLOCK_BYTES = 1 << 16
_COPY_AGAIN = "copy the folder again, or write it again with `megaspeed tokenize --fresh`"


@dataclass(frozen=True)
class Shard:
    """One file of the folder.

    Attributes:
        file: its name in the folder.
        tokens: number of its ids, including end-of-text tokens.
        documents: number of its documents.
        checksum: sha256 of the file, in hexadecimal.
    """

    file: str
    tokens: int
    documents: int
    checksum: str


@dataclass(frozen=True)
class TokenFolderIndex:
    """The content of a token folder.

    Attributes:
        dtype: the type of the ids.
        documents, tokens: their number in all shards.
        vocab_size: one more than the largest id of the tokenizer.
        end_of_text: the id after each document.
        tokenizer_fingerprint: sha256 of the tokenizer as JSON.
        corpus_fingerprint: sha256 over the documents' names, sizes and contents.
        largest_id: the largest id in any shard.
        shards: in order.
    """

    dtype: IdType
    documents: int
    tokens: int
    vocab_size: int
    end_of_text: int
    tokenizer_fingerprint: str
    corpus_fingerprint: str
    largest_id: int
    shards: tuple[Shard, ...]


def write_index(folder: Path, index: TokenFolderIndex) -> None:
    """Writes the index, which finishes a folder. Its shards must be on the disk."""
    samples = [_sample(folder / shard.file) for shard in index.shards]
    facts = {**asdict(index), "shards": [asdict(shard) for shard in index.shards]}
    write_sealed(folder / INDEX, {"format": _FORMAT, **facts, _SAMPLES_KEY: samples})


def is_token_folder(path: Path) -> bool:
    """Whether `path` is a folder of token files, finished or not.

    Other programs write files named index.json and plan.json, too, so their keys are compared.
    """
    return path.is_dir() and (
        any(path.glob(SHARDS))
        or (read_sealed(path / INDEX) or {}).keys() >= _KEYS_OF_INDEX
        or (read_sealed(path / PLAN) or {}).keys() >= _KEYS_OF_PLAN
    )


def read_index(folder: Path) -> TokenFolderIndex:
    """The content of a finished folder.

    Raises:
        DataError: the folder is not finished, or its index is damaged.
    """
    return _read(folder)[0]


def open_token_folder(folder: Path, cache: Cache) -> tuple[TokenFile, ...]:
    """Opens the shards of a folder.

    A single shard has the fingerprint of its documents, so it gives the same stream as the text. If
    there are several, the fingerprint of each is the checksum of its ids.

    Args:
        folder: a finished token folder.
        cache: stores which shards this machine has already read completely.

    Raises:
        DataError: every shard that is missing, truncated or changed.
    """
    index, samples = _read(folder)
    problems = [
        _problem(folder / shard.file, shard.tokens * np.dtype(index.dtype).itemsize, sample)
        for shard, sample in zip(index.shards, samples, strict=True)
    ]
    if not any(problems):
        problems = [_wrong_checksum(folder / shard.file, shard, cache) for shard in index.shards]
    if any(problems):
        raise DataError(*filter(None, problems))
    return tuple(
        TokenFile(
            folder / shard.file,
            TokenIndex(
                tokens=shard.tokens,
                documents=shard.documents,
                dtype=index.dtype,
                largest_id=index.largest_id,
                vocab_size=index.vocab_size,
                end_of_text=index.end_of_text,
                tokenizer_fingerprint=index.tokenizer_fingerprint,
                corpus_fingerprint=(
                    index.corpus_fingerprint if len(index.shards) == 1 else shard.checksum
                ),
            ),
        )
        for shard in index.shards
    )


def _read(folder: Path) -> tuple[TokenFolderIndex, list[str]]:
    """(the index, the hash of the sample of each shard)."""
    path = folder / INDEX
    if not path.exists():
        raise DataError(
            f"only a finished token folder can be trained on, and {folder} has no {INDEX}: its "
            "tokenization did not end; run the same `megaspeed tokenize` command again, which "
            "continues it"
        )
    facts = read_sealed(path)
    if facts is None:
        raise DataError(f"{path} was changed or damaged (its hash does not match); {_COPY_AGAIN}")
    found = facts.pop("format", None)
    samples = facts.pop(_SAMPLES_KEY, [])
    if found != _FORMAT:
        raise DataError(
            f"token folders have format {_FORMAT}, and {path} has format {found}; {_COPY_AGAIN}"
        )
    try:
        index = TypeAdapter(TokenFolderIndex).validate_python(facts)
    except ValidationError as error:
        raise DataError(f"{path} does not state what a token folder holds: {error}") from error
    return index, samples


def _problem(path: Path, expected_bytes: int, sample: str) -> str | None:
    """A problem with the size or the sample of a shard; None if there is none."""
    if not path.is_file():
        return f"a token folder must have every shard, and {path} is missing; {_COPY_AGAIN}"
    size = path.stat().st_size
    if size != expected_bytes:
        return (
            f"a shard must be as long as its index states, and {path} has {size} bytes instead of "
            f"{expected_bytes}; {_COPY_AGAIN}"
        )
    found = _sample(path)
    if found != sample:
        return (
            f"a shard must stay as it was written, and the bytes of {path} differ (sha256 of a "
            f"sample {found[:16]}... instead of {sample[:16]}...); {_COPY_AGAIN}"
        )
    return None


def _wrong_checksum(path: Path, shard: Shard, cache: Cache) -> str | None:
    """A problem with the checksum of a shard. An unchanged shard is read only once."""
    facts = remembered(
        cache,
        "checksums",
        _CHECKSUMS_FORMAT,
        [path],
        lambda: {"sha256": sha256_of(path)},
        "to compare its checksum",
    )
    found = facts["sha256"]
    if found == shard.checksum:
        return None
    return (
        f"a shard must stay as it was written, and {path} did not: its sha256 is {found[:16]}... "
        f"instead of {shard.checksum[:16]}...; {_COPY_AGAIN}"
    )


def _sample(path: Path) -> str:
    return spaced_sample(path, _SAMPLED_BLOCKS, _SAMPLED_BLOCK_BYTES)

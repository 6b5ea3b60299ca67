"""A folder of token files as `megaspeed tokenize` writes it, and how it is opened for training.

    FOLDER/index.json                written last: what the folder holds, with a seal of its own
    FOLDER/tokens-00000.bin ...      shards: ids, little-endian, end-of-text behind each document
    FOLDER/tokenizer.json ...        the tokenizer, as AutoTokenizer loads it
    FOLDER/plan.json                 written first, and removed when the folder is finished

Opening checks of each shard its size and 1 MiB of it, from its first byte to its last: thousands of
ranks can do that as they start, however large the shards are. The whole of it is read once a
machine (`shard_checksums.py`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from megaspeed.data.errors import DataError
from megaspeed.data.tokens.packing import IdType
from megaspeed.data.tokens.token_file import TokenFile, TokenIndex
from megaspeed.files.json_values import read_sealed, write_sealed
from megaspeed.files.reading import spaced_sample

INDEX = "index.json"
PLAN = "plan.json"
SHARDS = "tokens-*.bin"
COPY_AGAIN = "copy the folder again, or make it anew with `megaspeed tokenize --fresh`"
"""What to do about a shard that is not as it was written."""

_FORMAT = 1
_SAMPLES_KEY = "samples"
_KEYS_OF_INDEX = {"format", "shards", _SAMPLES_KEY}
_KEYS_OF_PLAN = {"format", "input", "shard_tokens"}
_SAMPLED_BLOCKS = 16
_SAMPLED_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True)
class Shard:
    """One file of the folder.

    Attributes:
        file: its name in the folder.
        tokens: ids in it, end-of-text tokens included.
        documents: documents in it; none goes on in the next shard.
        checksum: sha256 of the whole file, in hexadecimal.
    """

    file: str
    tokens: int
    documents: int
    checksum: str


@dataclass(frozen=True)
class TokenFolderIndex:
    """What a token folder holds.

    Attributes:
        dtype: of the ids.
        documents, tokens: of all shards.
        vocab_size: the tokenizer's.
        end_of_text: the id behind each document.
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
    """Seals a folder whose shards are written and flushed to the disk."""
    samples = [_sample(folder / shard.file) for shard in index.shards]
    write_sealed(
        folder / INDEX,
        {"format": _FORMAT, **asdict(index), "shards": [asdict(shard) for shard in index.shards]}
        | {_SAMPLES_KEY: samples},
    )


def is_token_folder(path: Path) -> bool:
    """Whether `path` is a folder of token files, a finished one or not.

    An index.json or a plan.json alone makes none: others have files of that name too.
    """
    return path.is_dir() and (
        any(path.glob(SHARDS))
        or _is_ours(path / INDEX, _KEYS_OF_INDEX)
        or _is_ours(path / PLAN, _KEYS_OF_PLAN)
    )


def read_index(folder: Path) -> TokenFolderIndex:
    """What a finished folder holds.

    Raises:
        DataError: the tokenization did not end, or the index is not as it was written.
    """
    return _read(folder)[0]


def open_token_folder(folder: Path) -> tuple[TokenFile, ...]:
    """The shards, each known to be whole by its size and a sample of its bytes.

    The fingerprint of a folder of one shard is the one of its documents, so that it gives the
    same stream as the text itself; of several, each has the checksum of its own ids.

    Raises:
        DataError: every shard that is missing, cut or altered.
    """
    index, samples = _read(folder)
    problems: list[str] = []
    for shard, sample in zip(index.shards, samples, strict=True):
        try:
            _check(folder / shard.file, shard.tokens * np.dtype(index.dtype).itemsize, sample)
        except DataError as error:
            problems.extend(error.problems)
    if problems:
        raise DataError(*problems)
    alone = len(index.shards) == 1
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
                corpus_fingerprint=index.corpus_fingerprint if alone else shard.checksum,
            ),
        )
        for shard in index.shards
    )


def _is_ours(sealed: Path, keys: set[str]) -> bool:
    return (read_sealed(sealed) or {}).keys() >= keys


def _read(folder: Path) -> tuple[TokenFolderIndex, list[str]]:
    """(index, sample of each shard)."""
    path = folder / INDEX
    if not path.exists():
        raise DataError(
            f"a token folder is trained on once it is finished, and {folder} has no {INDEX}: its "
            "tokenization did not end; run the same `megaspeed tokenize` command again, which "
            "goes on where it stopped"
        )
    facts = read_sealed(path)
    if facts is None:
        raise DataError(
            f"{path} is not as it was written (its seal does not fit); copy the folder again, or "
            "make it anew with `megaspeed tokenize --fresh`"
        )
    found = facts.pop("format", None)
    samples = facts.pop(_SAMPLES_KEY, [])
    if found != _FORMAT:
        raise DataError(
            f"token folders have format {_FORMAT}, and {path} has format {found}; make it anew "
            "with `megaspeed tokenize --fresh`"
        )
    try:
        index = TypeAdapter(TokenFolderIndex).validate_python(facts)
    except ValidationError as error:
        raise DataError(f"{path} does not say what a token folder holds: {error}") from error
    return index, samples


def _check(path: Path, expected_bytes: int, sample: str) -> None:
    if not path.is_file():
        raise DataError(
            f"a token folder must have every shard, and {path} is missing; {COPY_AGAIN}"
        )
    size = path.stat().st_size
    if size != expected_bytes:
        raise DataError(
            f"a shard must be as long as its index says, and {path} has {size} bytes instead of "
            f"{expected_bytes}; {COPY_AGAIN}"
        )
    found = _sample(path)
    if found != sample:
        raise DataError(
            f"a shard must be as it was written, and the bytes of {path} are others (sha256 of a "
            f"sample {found[:16]}... instead of {sample[:16]}...); {COPY_AGAIN}"
        )


def _sample(path: Path) -> str:
    return spaced_sample(path, _SAMPLED_BLOCKS, _SAMPLED_BLOCK_BYTES)

"""Token folders, which ``megaspeed tokenize`` writes, and training on text.

    FOLDER/tokens-00000.bin ...      ids, in shards that end with a document
    FOLDER/index.json                written last: the content of the shards, with checksums
    FOLDER/tokenizer.json ...        the tokenizer, as AutoTokenizer loads it
    FOLDER/skipped.jsonl             a line for each bad record, if any were skipped
    FOLDER/plan.json                 only while the folder is not finished
    FOLDER/documents.jsonl           likewise: a line for each document

Every start checks that each shard has its size. Each machine reads every shard completely once, and
again if its size or times change, and verifies its checksum.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from megaspeed.data.cache import Cache, remembered
from megaspeed.data.documents import DocumentHash, document_line
from megaspeed.data.encode import Packed
from megaspeed.data.errors import DataError, raise_any
from megaspeed.data.pieces import BadRecord
from megaspeed.data.token_file import IdType, TokenFile, TokenIndex
from megaspeed.files.json_values import read_sealed, write_sealed
from megaspeed.files.reading import sha256_of

INDEX = "index.json"
PLAN = "plan.json"
DOCUMENTS = "documents.jsonl"
SKIPPED = "skipped.jsonl"
SHARDS = "tokens-*.bin"

# Folders of format 1 also had the checksums of samples of their shards.
_FORMAT = 2
_FORMATS_READ = (1, 2)
_KEYS_OF_INDEX = {"format", "shards", "tokenizer_fingerprint"}
_KEYS_OF_PLAN = {"format", "input", "shard_tokens"}
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
class TokenFolderIndex(TokenIndex):
    """The content of a token folder. All facts are known, and are those of all shards together.

    Attributes:
        shards: in order.
    """

    dtype: IdType
    documents: int
    vocab_size: int
    end_of_text: int
    tokenizer_fingerprint: str
    shards: tuple[Shard, ...]


@dataclass
class Progress:
    """What has been written so far.

    Attributes:
        files: number of complete input files.
        shards: the complete shards.
        open_tokens, open_documents: their number in the shard that is not complete.
        skipped: number of bad records.
        documents_bytes, skipped_bytes: lengths of the two files of lines.
        largest_id: the largest id in any shard.
        read_bytes: bytes of the input that were read.
    """

    files: int = 0
    shards: list[Shard] = field(default_factory=list)
    open_tokens: int = 0
    open_documents: int = 0
    skipped: int = 0
    documents_bytes: int = 0
    skipped_bytes: int = 0
    largest_id: int = 0
    read_bytes: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens in all shards."""
        return sum(shard.tokens for shard in self.shards) + self.open_tokens

    @property
    def documents(self) -> int:
        """Number of documents in all shards."""
        return sum(shard.documents for shard in self.shards) + self.open_documents


def write_index(folder: Path, index: TokenFolderIndex) -> None:
    """Write the index, which finishes a folder. Its shards must be on the disk."""
    facts = {**asdict(index), "shards": [asdict(shard) for shard in index.shards]}
    write_sealed(folder / INDEX, {"format": _FORMAT, **facts})


class TokenFolderWriter:
    """The files of a token folder that grow: shards, and lines for documents and bad records.

    Attributes:
        progress: what has been written so far.
    """

    def __init__(self, folder: Path, dtype: str, shard_tokens: int, progress: Progress) -> None:
        """Truncates the files to `progress`, and removes later shards.

        Raises:
            DataError: a file is shorter than `progress` states.
        """
        self._folder, self._shard_tokens = folder, shard_tokens
        self.progress = progress
        kept = {shard.file: shard.tokens for shard in progress.shards}
        if progress.open_tokens:
            kept[self._open_shard.name] = progress.open_tokens
        for path in folder.glob(SHARDS):
            if path.name not in kept:
                path.unlink()
        for name, tokens in kept.items():
            _truncate(folder / name, tokens * np.dtype(dtype).itemsize)
        _truncate(folder / DOCUMENTS, progress.documents_bytes)
        _truncate(folder / SKIPPED, progress.skipped_bytes)
        self._documents = (folder / DOCUMENTS).open("ab")
        self._skipped = (folder / SKIPPED).open("ab")

    def close(self) -> None:
        """Closes the files of lines. Removes the list of bad records if there are none."""
        self._documents.close()
        self._skipped.close()
        if not self.progress.skipped:
            (self._folder / SKIPPED).unlink()

    @property
    def _open_shard(self) -> Path:
        """The shard that is not complete, which may not exist yet."""
        return self._folder / f"tokens-{len(self.progress.shards):05}.bin"

    def add_document(self, file_name: str, document: DocumentHash) -> None:
        """Writes the line of a document."""
        self._documents.write(document_line(file_name, document.size_bytes, document.content))

    def add_skipped(self, record: BadRecord) -> None:
        """Writes the line of a bad record."""
        facts = {"file": str(record.path), "where": record.where, "problem": record.problem}
        self._skipped.write(json.dumps(facts).encode("utf-8") + b"\n")
        self.progress.skipped += 1

    def write(self, packed: Packed) -> None:
        """Appends ids. A shard ends with the document that fills it."""
        self.progress.largest_id = max(self.progress.largest_id, int(packed.ids.max(initial=0)))
        start = documents = 0
        for number, stop in enumerate(packed.document_ends.tolist(), start=1):
            if self.progress.open_tokens + stop - start >= self._shard_tokens:
                self._append(packed.ids[start:stop], number - documents)
                self.complete_shard()
                start, documents = stop, number
        self._append(packed.ids[start:], len(packed.document_ends) - documents)

    def complete_shard(self) -> None:
        """Ends the open shard, if it has tokens."""
        now, path = self.progress, self._open_shard
        if now.open_tokens:
            _flush(path)
            shard = Shard(path.name, now.open_tokens, now.open_documents, sha256_of(path))
            now.shards.append(shard)
            now.open_tokens = now.open_documents = 0

    def flush(self) -> None:
        """Flushes everything to the disk, and counts the bytes of the lines."""
        self._documents.flush()
        self._skipped.flush()
        self.progress.documents_bytes = self._documents.tell()
        self.progress.skipped_bytes = self._skipped.tell()
        _flush(self._folder / DOCUMENTS)
        _flush(self._folder / SKIPPED)
        if self.progress.open_tokens:
            _flush(self._open_shard)

    def _append(self, ids: NDArray[np.unsignedinteger], documents: int) -> None:
        if len(ids):
            with self._open_shard.open("ab") as stream:
                stream.write(ids.tobytes())
            self.progress.open_tokens += len(ids)
            self.progress.open_documents += documents


def _truncate(path: Path, size_bytes: int) -> None:
    found = path.stat().st_size if path.exists() else 0
    if found < size_bytes:
        raise DataError(
            f"{path} must have the {size_bytes:,} bytes that {PLAN} states, but has {found:,}; "
            "start again with --fresh"
        )
    with path.open("ab") as stream:
        stream.truncate(size_bytes)


def _flush(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


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
    """Return the content of a finished folder.

    Raises:
        DataError: the folder is not finished, or its index is damaged.
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
    try:
        return TypeAdapter(TokenFolderIndex).validate_python(facts)
    except ValidationError as error:
        raise DataError(f"{path} does not state what a token folder holds: {error}") from error


def open_token_folder(folder: Path, cache: Cache) -> tuple[TokenFile, ...]:
    """Open the shards of a finished folder.

    Args:
        folder: the token folder.
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
    facts = {name: getattr(index, name) for name in TokenIndex.__dataclass_fields__}
    return tuple(
        TokenFile(
            folder / shard.file,
            TokenIndex(
                **facts
                | {
                    "tokens": shard.tokens,
                    "documents": shard.documents,
                    "corpus_fingerprint": (
                        index.corpus_fingerprint if is_single else shard.checksum
                    ),
                }
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
    facts = remembered(
        cache,
        "checksums",
        [path],
        lambda: {"sha256": sha256_of(path)},
        "to compare its checksum",
    )
    if facts["sha256"] == shard.checksum:
        return None
    return (
        f"a shard must stay as it was written, but {path} did not: its sha256 is "
        f"{facts['sha256'][:16]}... instead of {shard.checksum[:16]}...; {_COPY_AGAIN}"
    )

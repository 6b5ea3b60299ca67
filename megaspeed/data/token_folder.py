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
from dataclasses import asdict, dataclass, field, replace
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
from megaspeed.files.paths import sha256_of

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
_LINES_BYTES = 1 << 20  # lines that are written at once
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
        shards: in order. The last one may be open, and has no checksum yet.
        sizes: the bytes of each file that grows, when everything was flushed last.
        skipped: number of bad records.
        largest_id: the largest id in any shard.
        read_bytes: bytes of the input that were read.
    """

    files: int = 0
    shards: list[Shard] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    skipped: int = 0
    largest_id: int = 0
    read_bytes: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens in all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """Number of documents in all shards."""
        return sum(shard.documents for shard in self.shards)


class TokenFolderWriter:
    """The files of a token folder that grow: shards, and lines for documents and bad records.

    Attributes:
        progress: what has been written so far.
    """

    def __init__(self, folder: Path, shard_tokens: int, progress: Progress) -> None:
        """Truncate the files to what ``progress`` states, and remove the others.

        Raises:
            DataError: a file is shorter than ``progress`` states.
        """
        self._folder, self._shard_tokens, self.progress = folder, shard_tokens, progress
        self._lines = {DOCUMENTS: bytearray(), SKIPPED: bytearray()}
        self._written: set[str] = set()
        for path in (*folder.glob(SHARDS), folder / DOCUMENTS, folder / SKIPPED):
            if path.name not in progress.sizes:
                path.unlink(missing_ok=True)
        for name, size in progress.sizes.items():
            _truncate(folder / name, size)

    def add_document(self, file_name: str, document: DocumentHash) -> None:
        """Write the line of a document."""
        self._add_line(DOCUMENTS, document_line(file_name, document.size_bytes, document.content))

    def add_skipped(self, record: BadRecord) -> None:
        """Write the line of a bad record."""
        facts = {"file": str(record.path), "where": record.where, "problem": record.problem}
        self._add_line(SKIPPED, json.dumps(facts).encode("utf-8") + b"\n")
        self.progress.skipped += 1

    def write(self, packed: Packed) -> None:
        """Append ids. A shard ends with the document that fills it."""
        self.progress.largest_id = max(self.progress.largest_id, int(packed.ids.max(initial=0)))
        start = documents = 0
        for number, stop in enumerate(packed.document_ends.tolist(), start=1):
            if self._open_shard().tokens + stop - start >= self._shard_tokens:
                self._append_ids(packed.ids[start:stop], number - documents)
                self.complete_shard()
                start, documents = stop, number
        self._append_ids(packed.ids[start:], len(packed.document_ends) - documents)

    def complete_shard(self) -> None:
        """End the open shard, if it has tokens."""
        shard = self._open_shard()
        if shard.tokens:
            path = self._folder / shard.file
            _flush(path)
            self.progress.shards[-1] = replace(shard, checksum=sha256_of(path))

    def flush(self) -> None:
        """Flush everything to the disk, and note the size of each file."""
        for name, lines in self._lines.items():
            self._append(name, lines)
            lines.clear()
        for name in self._written:
            _flush(self._folder / name)
            self.progress.sizes[name] = (self._folder / name).stat().st_size
        self._written.clear()

    def _open_shard(self) -> Shard:
        """Return the shard that is not complete, which may have no tokens yet."""
        shards = self.progress.shards
        if shards and not shards[-1].checksum:
            return shards[-1]
        return Shard(f"tokens-{len(shards):05}.bin", tokens=0, documents=0, checksum="")

    def _append_ids(self, ids: NDArray[np.unsignedinteger], documents: int) -> None:
        shard, shards = self._open_shard(), self.progress.shards
        if len(ids):
            self._append(shard.file, ids.tobytes())
            shards[len(shards) - bool(shard.tokens) :] = [
                replace(
                    shard, tokens=shard.tokens + len(ids), documents=shard.documents + documents
                )
            ]

    def _add_line(self, name: str, line: bytes) -> None:
        self._lines[name] += line
        if len(self._lines[name]) >= _LINES_BYTES:
            self._append(name, self._lines[name])
            self._lines[name].clear()

    def _append(self, name: str, content: bytes | bytearray) -> None:
        if content:
            with (self._folder / name).open("ab") as stream:
                stream.write(content)
            self._written.add(name)


def _truncate(path: Path, size_bytes: int) -> None:
    found = path.stat().st_size if path.exists() else 0
    if found < size_bytes:
        raise DataError(
            f"{path} must have the {size_bytes:,} bytes that {PLAN} states, but has {found:,}; "
            "start again with --fresh"
        )
    os.truncate(path, size_bytes)


def _flush(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def write_index(folder: Path, index: TokenFolderIndex) -> None:
    """Write the index, which finishes a folder. Its shards must be on the disk."""
    facts = {**asdict(index), "shards": [asdict(shard) for shard in index.shards]}
    write_sealed(folder / INDEX, {"format": _FORMAT, **facts})


def is_token_folder(path: Path) -> bool:
    """Return whether ``path`` is a folder of token files, finished or not.

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

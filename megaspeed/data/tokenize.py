"""``megaspeed tokenize``: convert text of any size to a folder of token files.

    DIR/plan.json                                input, settings and progress
    DIR/tokenizer.json, tokenizer_config.json    the tokenizer, for training
    DIR/tokens-00000.bin ...                     the ids, in shards that end with a document
    DIR/documents.jsonl                          a line for each document, for the fingerprint
    DIR/skipped.jsonl                            a line for each bad record
    DIR/index.json                               written last: the folder can be trained on

The plan is saved after each input file, or after several if they are small. If the process is
killed, the same command truncates all files to the lengths in the plan and continues with the next
input file. plan.json and documents.jsonl are removed at the end.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import tokenizers
from numpy.typing import NDArray
from pydantic import TypeAdapter

from megaspeed.data.documents import Document, changed_while_read, document_line, hashed, no_text
from megaspeed.data.errors import DataError
from megaspeed.data.pieces import CUT_RULE, BadRecord, OnBad, Piece, refuse
from megaspeed.data.sources import SourceFile
from megaspeed.data.token_file import id_type
from megaspeed.data.token_sources import INDEX, PLAN, SHARDS, Shard, TokenFolderIndex, write_index
from megaspeed.data.tokenizer import Packed, TextTokenizer, encode
from megaspeed.files.durable import TEMPORARY, Locked, flush_folder, lock
from megaspeed.files.json_values import Facts, hash_of, read_sealed, write_sealed
from megaspeed.files.paths import FileState, sha256_of

DEFAULT_SHARD_TOKENS = 1 << 29
"""1 GiB of ids of 2 bytes."""

DOCUMENTS = "documents.jsonl"
SKIPPED = "skipped.jsonl"

# Increment it if the code changes so that the same plan gives other files.
_FORMAT = 3
_LOCK = ".lock"
_PROGRESS = "progress"
# The plan is saved after input files of at least this size, because saving flushes all files.
_SAVED_AT_ONCE_BYTES = 1 << 26


@dataclass
class TokenizationProgress:
    """What has been written so far."""

    files: int = 0  # number of complete input files
    # In order. The last one may be open, and has no checksum yet.
    shards: list[Shard] = field(default_factory=list)
    # The bytes of each file that grows, when everything was flushed last.
    sizes: dict[str, int] = field(default_factory=dict)
    skipped: int = 0  # number of bad records
    largest_id: int = 0  # the largest id in any shard
    read_bytes: int = 0  # bytes of the input that were read

    @property
    def tokens(self) -> int:
        """Number of tokens in all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """Number of documents in all shards."""
        return sum(shard.documents for shard in self.shards)


class TokenFolderWriter:
    """The files of a token folder that grow: shards, and lines for documents and bad records."""

    def __init__(self, folder: Path, shard_tokens: int, progress: TokenizationProgress) -> None:
        """Truncate the files to what ``progress`` states, and remove the others.

        Raises DataError if a file is shorter than ``progress`` states.
        """
        self._folder, self._shard_tokens = folder, shard_tokens
        self.progress = progress  # what has been written so far
        self._streams: dict[str, BinaryIO] = {}
        for path in (*folder.glob(SHARDS), folder / DOCUMENTS, folder / SKIPPED):
            if path.name not in progress.sizes:
                path.unlink(missing_ok=True)
        for name, size in progress.sizes.items():
            path = folder / name
            found = path.stat().st_size if path.exists() else 0
            if found < size:
                raise DataError(
                    f"{path} must have the {size:,} bytes that {PLAN} states, but has {found:,}; "
                    "remove the folder to start again"
                )
            os.truncate(path, size)

    def add_document(self, document: Document) -> None:
        """Write the line of a document."""
        self._append(DOCUMENTS, document_line(document))

    def add_skipped(self, record: BadRecord) -> None:
        """Write the line of a bad record."""
        facts = {"file": str(record.path), "where": record.where, "problem": record.problem}
        self._append(SKIPPED, json.dumps(facts).encode("utf-8") + b"\n")
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
            self._close(shard.file)
            checksum = sha256_of(self._folder / shard.file)
            self.progress.shards[-1] = replace(shard, checksum=checksum)

    def flush(self) -> None:
        """Flush everything to the disk, and note the size of each file."""
        for name in list(self._streams):
            self._close(name)

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

    def _append(self, name: str, content: bytes) -> None:
        if name not in self._streams:
            self._streams[name] = (self._folder / name).open("ab")
        self._streams[name].write(content)

    def _close(self, name: str) -> None:
        if name in self._streams:
            with self._streams.pop(name) as stream:
                stream.flush()
                os.fsync(stream.fileno())
                self.progress.sizes[name] = stream.tell()


def tokenize(
    files: Sequence[SourceFile],
    tokenizer: TextTokenizer,
    folder: Path,
    report: Callable[[TokenizationProgress], None],
    *,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    skip: OnBad | None = None,
) -> TokenFolderIndex:
    """Write a token folder. After an interruption, the same call continues.

    Args:
        files: the text.
        tokenizer: the tokenizer, which is also saved in the folder.
        folder: a folder that is new, empty, or was written by an interrupted call.
        report: called with the progress, first with that of earlier calls, then after each batch.
        shard_tokens: a shard ends with the document that makes it at least this long.
        skip: called with every bad record, which is skipped. If None, the first one raises
            DataError.

    Raises:
        DataError: a record is bad; or the folder is finished, in use, or contains other files, such
            as those of a call with another input or tokenizer.
        OSError: a file cannot be read or written.
    """
    with _lock_folder(folder):
        states = [file.state() for file in files]
        plan = _plan(files, states, tokenizer, shard_tokens)
        progress = _earlier_progress(folder, plan)
        progress.read_bytes = sum(size for _, size, _, _ in states[: progress.files])
        _save(folder, plan, progress)
        tokenizer.save(folder)
        writer = TokenFolderWriter(folder, shard_tokens, progress)
        report(progress)
        for group in _groups(states, progress.files):
            pieces = _read(files[group], states[group], writer, skip)
            for packed in encode(pieces, tokenizer):
                writer.write(packed)
                report(progress)
            progress.files = group.stop
            writer.flush()
            _save(folder, plan, progress)
        if not progress.tokens:
            raise no_text(files)
        for file, state in zip(files, states, strict=True):
            if file.state() != state:
                raise changed_while_read(f"{file.path}")
        writer.complete_shard()
        return _finish(folder, tokenizer, progress)


def _groups(states: Sequence[FileState], first: int) -> Iterator[slice]:
    """Yield groups of input files, from number ``first`` on. The plan is saved after each."""
    while first < len(states):
        stop, size = first, 0
        while stop < len(states) and (stop == first or size < _SAVED_AT_ONCE_BYTES):
            size += states[stop][1]
            stop += 1
        yield slice(first, stop)
        first = stop


def _read(
    files: Sequence[SourceFile],
    states: Sequence[FileState],
    writer: TokenFolderWriter,
    skip: OnBad | None,
) -> Iterator[Piece]:
    """Yield the text of some files. Write a line for each document and for each bad record."""

    def on_bad(record: BadRecord) -> None:
        if skip is None:
            refuse(record)
        else:
            skip(record)
            writer.add_skipped(record)

    for file, (_, size, _, _) in zip(files, states, strict=True):
        bytes_before = writer.progress.read_bytes
        for piece, document in hashed(file, on_bad):
            if document is not None:
                writer.add_document(document)
            writer.progress.read_bytes = bytes_before + piece.read_bytes
            yield piece
        writer.progress.read_bytes = bytes_before + size


def _finish(
    folder: Path, tokenizer: TextTokenizer, progress: TokenizationProgress
) -> TokenFolderIndex:
    """Write the index, and remove the files that only an unfinished folder has."""
    index = TokenFolderIndex(
        dtype=id_type(tokenizer.vocab_size),
        documents=progress.documents,
        tokens=progress.tokens,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        tokenizer_fingerprint=tokenizer.fingerprint,
        # The fingerprint of a corpus is the hash of these lines.
        corpus_fingerprint=sha256_of(folder / DOCUMENTS),
        largest_id=progress.largest_id,
        shards=tuple(progress.shards),
    )
    flush_folder(folder)
    write_index(folder, index)
    _remove_temporary_files(folder)
    return index


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Create the folder if necessary, and lock it.

    Raises DataError if another process writes to it, or it cannot be written to.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(lock(folder / _LOCK))
        except (Locked, OSError) as error:
            raise DataError(
                f"tokens must be written to a folder that no other process writes to, but {folder} "
                f"cannot be locked ({error}); name another --output"
            ) from error
        yield


def _plan(
    files: Sequence[SourceFile],
    states: Sequence[FileState],
    tokenizer: TextTokenizer,
    shard_tokens: int,
) -> Facts:
    """Everything that determines the ids and the shards."""
    listed = [
        [file.name, repr(file.format), path, size, mtime]
        for file, (path, size, mtime, _) in zip(files, states, strict=True)
    ]
    # The keys are shown in messages.
    return {
        "format": _FORMAT,
        "tokenizer": [tokenizer.fingerprint, tokenizer.end_of_text],
        "shard_tokens": shard_tokens,
        "version of tokenizers": tokenizers.__version__,
        "cutting of long documents": CUT_RULE,
        "number of input files": len(files),
        "input": hash_of(listed),
    }


def _save(folder: Path, plan: Facts, progress: TokenizationProgress) -> None:
    flush_folder(folder)
    write_sealed(folder / PLAN, plan | {_PROGRESS: asdict(progress)})


def _earlier_progress(folder: Path, plan: Facts) -> TokenizationProgress:
    """Return the progress of an earlier call with this plan; an empty one if there was none.

    Raises DataError if the folder is finished, or holds something that cannot be continued.
    """
    if (folder / INDEX).exists():
        _remove_temporary_files(folder)  # they remain if an earlier call was killed at its end
        raise DataError(
            f"{folder} is finished and holds tokens; name another --output, or remove it"
        )
    before = read_sealed(folder / PLAN)
    if before is None:
        names = sorted(path.name for path in folder.iterdir())
        others = [name for name in names if name != _LOCK and not name.endswith(TEMPORARY)]
        if others:
            raise DataError(
                f"tokens must be written to a new or empty folder, but {folder} has {len(others)} "
                f"entries that cannot be continued, the first {others[0]}; name another --output"
            )
        return TokenizationProgress()
    stored = before.pop(_PROGRESS, None)
    differing = [key for key, value in plan.items() if before.get(key) != value]
    if not differing:
        return TypeAdapter(TokenizationProgress).validate_python(stored)
    if "format" not in differing and not stored["shards"]:
        return TokenizationProgress()  # nothing was written yet
    raise DataError(
        f"the tokenization in {folder} can only be continued as it was started, but its "
        f"{' and '.join(differing)} differed then; restore that, name another --output, or remove "
        "the folder to start again"
    )


def _remove_temporary_files(folder: Path) -> None:
    for name in (PLAN, DOCUMENTS):
        (folder / name).unlink(missing_ok=True)
    flush_folder(folder)

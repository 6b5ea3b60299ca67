"""`megaspeed tokenize`: converts text of any size to a folder of token files.

    DIR/plan.json                                input, settings and progress
    DIR/tokenizer.json, tokenizer_config.json    for the worker processes, and for training
    DIR/tokens-00000.bin ...                     the ids, in shards that end with a document
    DIR/documents.jsonl                          a line for each document, for the fingerprint
    DIR/skipped.jsonl                            a line for each bad record
    DIR/index.json                               written last: the folder can be trained on

The plan is saved after each input file, or after several if they are small. If the process is
killed, the same command truncates all files to the lengths in the plan and continues with the next
input file. plan.json and documents.jsonl are removed at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray

from megaspeed.data.documents import (
    DocumentHash,
    changed_while_read,
    document_line,
    no_text,
)
from megaspeed.data.encode import Packed, encode_in_processes, worker_pool
from megaspeed.data.errors import DataError
from megaspeed.data.pieces import HOW_CUT, BadRecord, OnBad, Piece, refuse
from megaspeed.data.sources import SourceFile
from megaspeed.data.token_file import id_type
from megaspeed.data.token_folder import INDEX, PLAN, SHARDS, Shard, TokenFolderIndex, write_index
from megaspeed.data.tokenizer import CONFIG_FILE, TOKENIZER_FILE, TextTokenizer
from megaspeed.files.durable import TEMPORARY, flush_folder
from megaspeed.files.json_values import read_sealed, write_sealed
from megaspeed.files.lock import Locked, lock
from megaspeed.files.reading import sha256_of

DEFAULT_SHARD_TOKENS = 1 << 29
"""1 GiB of ids of 2 bytes."""

# Increment it if the code changes so that the same plan gives other files.
_FORMAT = 2
_DOCUMENTS, _SKIPPED, _LOCK = "documents.jsonl", "skipped.jsonl", ".lock"
_PROGRESS = "progress"
_TEMPORARY_FILES = (PLAN, _DOCUMENTS)
_FILES_OF_VERSION_0_1 = ("progress.json",)
_ALL = (INDEX, *_TEMPORARY_FILES, _SKIPPED, SHARDS, TOKENIZER_FILE, CONFIG_FILE)
# The plan is saved after input files of at least this size, because saving makes the processes
# idle.
_SAVED_AT_ONCE_BYTES = 1 << 26
_OR_SKIP = ", or skip bad records with --skip-bad"


@dataclass(frozen=True)
class Standing:
    """The progress of a tokenization.

    Attributes:
        tokens, documents: number of written tokens and documents.
        skipped: number of bad records.
        read_bytes: bytes of the input that were read.
    """

    tokens: int
    documents: int
    skipped: int
    read_bytes: int


class Watch(Protocol):
    """Receives the progress of a tokenization."""

    def begins(self, standing: Standing, total_bytes: int) -> None:
        """Called once, with the progress of earlier calls and the size of the input."""

    def passes_over(self, record: BadRecord) -> None:
        """Called for every bad record that is skipped."""

    def reaches(self, standing: Standing) -> None:
        """Called many times a second."""


@dataclass(frozen=True)
class _Progress:
    """What has been written after some complete input files.

    Attributes:
        files: number of complete input files.
        shards: the complete shards.
        open_tokens, open_documents: their number in the shard that is not complete.
        skipped: number of bad records.
        documents_bytes, skipped_bytes: lengths of the two files of lines.
        largest_id: the largest id in any shard.
    """

    files: int = 0
    shards: tuple[Shard, ...] = ()
    open_tokens: int = 0
    open_documents: int = 0
    skipped: int = 0
    documents_bytes: int = 0
    skipped_bytes: int = 0
    largest_id: int = 0

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards) + self.open_tokens

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards) + self.open_documents


def tokenize(
    files: Sequence[SourceFile],
    tokenizer: TextTokenizer,
    folder: Path,
    watch: Watch,
    *,
    processes: int,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    skip_bad: bool = False,
    fresh: bool = False,
) -> TokenFolderIndex:
    """Writes a token folder. After an interruption, the same call continues.

    Args:
        files: the text.
        tokenizer: the tokenizer, which is also saved in the folder.
        folder: a folder that is new, empty, or was written by an interrupted call.
        watch: receives the progress.
        processes: number of processes that encode. The files do not depend on it.
        shard_tokens: a shard ends with the document that makes it at least this long.
        skip_bad: whether bad records are skipped. Otherwise the first one raises DataError.
        fresh: whether files of an earlier call are removed first.

    Raises:
        DataError: a record is bad; or the folder is finished, in use, or contains other files, such
            as those of a call with another input or tokenizer.
        WorkerDied: a process was killed.
        OSError: a file cannot be read or written.
    """
    with _lock_folder(folder):
        if fresh and _is_ours(folder):
            _remove(folder, (*_ALL, *_FILES_OF_VERSION_0_1))
        states = [file.state() for file in files]
        plan = _plan(files, states, tokenizer, shard_tokens)
        progress = _begin(folder, plan, skip_bad=skip_bad)
        tokenizer.save(folder)
        sizes = [size for _, size, _, _ in states]
        on_bad = watch.passes_over if skip_bad else partial(refuse, otherwise=_OR_SKIP)
        dtype = id_type(tokenizer.vocab_size)
        with (
            closing(_Shards(folder, np.dtype(dtype).str, shard_tokens, progress)) as shards,
            closing(_Reader(folder, files, sizes, progress, on_bad)) as reader,
            worker_pool(processes) as pool,
        ):
            watch.begins(_standing(shards, reader), sum(sizes))
            for _ in reader.groups():
                for packed in encode_in_processes(reader.pieces(), folder, pool, processes):
                    shards.write(packed)
                    watch.reaches(_standing(shards, reader))
                shards.flush()
                _save(folder, plan, reader.progress(shards.progress))
            progress = shards.finish()
        for file, state in zip(files, states, strict=True):
            if file.state() != state:
                raise changed_while_read(f"{file.path}")
        if not progress.shards:
            raise no_text(files)
        index = TokenFolderIndex(
            dtype=dtype,
            documents=progress.documents,
            tokens=progress.tokens,
            vocab_size=tokenizer.vocab_size,
            end_of_text=tokenizer.end_of_text,
            tokenizer_fingerprint=tokenizer.fingerprint,
            # The fingerprint of a corpus is the hash of these lines.
            corpus_fingerprint=sha256_of(folder / _DOCUMENTS),
            largest_id=progress.largest_id,
            shards=progress.shards,
        )
        flush_folder(folder)
        write_index(folder, index)
        _remove(folder, _TEMPORARY_FILES)
        return index


def _standing(shards: _Shards, reader: _Reader) -> Standing:
    written = shards.progress
    return Standing(written.tokens, written.documents, reader.skipped, reader.read_bytes)


class _Reader:
    """Reads the input, and writes a line for each document and for each bad record.

    Attributes:
        skipped: number of bad records so far.
        read_bytes: bytes of the input that were read so far.
    """

    def __init__(
        self,
        folder: Path,
        files: Sequence[SourceFile],
        sizes: Sequence[int],
        progress: _Progress,
        on_bad: OnBad,
    ) -> None:
        self._files, self._sizes, self._on_bad = files, sizes, on_bad
        self._group = range(progress.files, progress.files)
        self._documents = _continued(folder / _DOCUMENTS, progress.documents_bytes)
        self._bad = _continued(folder / _SKIPPED, progress.skipped_bytes)
        self.skipped = progress.skipped
        self.read_bytes = sum(sizes[: progress.files])

    def groups(self) -> Iterator[range]:
        """The numbers of the input files that are read before the plan is saved again."""
        while self._group.stop < len(self._files):
            first, size = self._group.stop, 0
            self._group = range(first, first)
            while self._group.stop < len(self._files) and size < max(1, _SAVED_AT_ONCE_BYTES):
                size += max(1, self._sizes[self._group.stop])
                self._group = range(first, self._group.stop + 1)
            yield self._group

    def pieces(self) -> Iterator[Piece]:
        """The text of the input files of this group."""
        for number in self._group:
            file, before, document = self._files[number], self.read_bytes, DocumentHash()
            for piece in file.pieces(self._skip):
                document.update(piece)
                if piece.ends_document:
                    line = document_line(file.name, document.size_bytes, document.content)
                    self._documents.write(line)
                    document = DocumentHash()
                self.read_bytes = before + piece.read_bytes
                yield piece
            self.read_bytes = before + self._sizes[number]

    def progress(self, written: _Progress) -> _Progress:
        """Flushes the lines to the disk. Returns the progress after a group."""
        _flush(self._documents)
        _flush(self._bad)
        return replace(
            written,
            files=self._group.stop,
            skipped=self.skipped,
            documents_bytes=self._documents.tell(),
            skipped_bytes=self._bad.tell(),
        )

    def close(self) -> None:
        """Closes both files, and removes the list of bad records if there are none."""
        self._documents.close()
        self._bad.close()
        if not self.skipped:
            Path(self._bad.name).unlink()

    def _skip(self, record: BadRecord) -> None:
        self._on_bad(record)
        facts = {"file": str(record.path), "where": record.where, "problem": record.problem}
        self._bad.write(json.dumps(facts).encode("utf-8") + b"\n")
        self.skipped += 1


class _Shards:
    """Appends ids to shards.

    Attributes:
        progress: the shards and their tokens so far.
    """

    def __init__(self, folder: Path, dtype: str, shard_tokens: int, progress: _Progress) -> None:
        """Truncates the open shard to `progress`, and removes later shards.

        Raises:
            DataError: a shard is shorter than `progress` states.
        """
        self._folder, self._dtype, self._shard_tokens = folder, np.dtype(dtype), shard_tokens
        self.progress = progress
        for shard in progress.shards:
            _check_length(folder / shard.file, shard.tokens * self._dtype.itemsize)
        kept = {*(shard.file for shard in progress.shards), self._open_path.name}
        for path in folder.glob(SHARDS):
            if path.name not in kept:
                path.unlink()
        self._open = _continued(self._open_path, progress.open_tokens * self._dtype.itemsize)

    @property
    def _open_path(self) -> Path:
        return self._folder / f"tokens-{len(self.progress.shards):05}.bin"

    def write(self, packed: Packed) -> None:
        """Appends ids. A shard ends with the document that fills it."""
        largest_id = max(self.progress.largest_id, int(packed.ids.max(initial=0)))
        self.progress = replace(self.progress, largest_id=largest_id)
        start = documents = 0
        while True:
            room = self._shard_tokens - self.progress.open_tokens
            last = int(np.searchsorted(packed.document_ends, start + room))
            if last == len(packed.document_ends):
                break
            stop = int(packed.document_ends[last])
            self._append(packed.ids[start:stop], last + 1 - documents)
            self._complete_shard()
            start, documents = stop, last + 1
        self._append(packed.ids[start:], len(packed.document_ends) - documents)

    def flush(self) -> None:
        """Flushes everything to the disk."""
        _flush(self._open)

    def finish(self) -> _Progress:
        """Completes the last shard."""
        if self.progress.open_tokens:
            self._complete_shard()
        return self.progress

    def close(self) -> None:
        """Closes the open shard, and removes it if it is empty."""
        self._open.close()
        if not self.progress.open_tokens:
            self._open_path.unlink()

    def _append(self, ids: NDArray[np.unsignedinteger], documents: int) -> None:
        self._open.write(ids.astype(self._dtype, copy=False).tobytes())
        self.progress = replace(
            self.progress,
            open_tokens=self.progress.open_tokens + len(ids),
            open_documents=self.progress.open_documents + documents,
        )

    def _complete_shard(self) -> None:
        _flush(self._open)
        self._open.close()
        path, now = self._open_path, self.progress
        shard = Shard(path.name, now.open_tokens, now.open_documents, sha256_of(path))
        self.progress = replace(now, shards=(*now.shards, shard), open_tokens=0, open_documents=0)
        self._open = _continued(self._open_path, 0)


def _continued(path: Path, size_bytes: int) -> BinaryIO:
    """Truncates the file to `size_bytes` and opens it to append."""
    stream = path.open("ab")
    try:
        _check_length(path, size_bytes)
        stream.truncate(size_bytes)
        stream.seek(0, os.SEEK_END)
    except BaseException:
        stream.close()
        raise
    return stream


def _check_length(path: Path, size_bytes: int) -> None:
    found = path.stat().st_size if path.exists() else 0
    if found < size_bytes:
        raise DataError(
            f"{path} must have the {size_bytes:,} bytes that {PLAN} states, and has {found:,}; "
            "start again with --fresh"
        )


def _flush(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Creates the folder if necessary, and locks it.

    Raises:
        DataError: another process writes to it, or it cannot be written to.
    """
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock(folder / _LOCK))
        except Locked as error:
            raise DataError(
                f"only one process at a time writes to a folder, and another one writes to "
                f"{folder}; wait until it has ended, or name another --output"
            ) from error
        except OSError as error:
            raise DataError(
                f"tokens are written to a folder, and {folder} cannot be created or written to "
                f"({error.strerror}); name another --output"
            ) from error
        yield


def _plan(
    files: Sequence[SourceFile],
    states: Sequence[tuple[str, int, int, int]],
    tokenizer: TextTokenizer,
    shard_tokens: int,
) -> dict[str, Any]:
    """Everything that determines the ids and the shards."""
    listed = [
        [file.name, repr(file.format), path, size, mtime]
        for file, (path, size, mtime, _) in zip(files, states, strict=True)
    ]
    # An unfinished folder is recognized by three of these keys. All are shown in messages.
    return {
        "format": _FORMAT,
        "tokenizer": [tokenizer.fingerprint, tokenizer.end_of_text],
        "shard_tokens": shard_tokens,
        "version of tokenizers": tokenizers.__version__,
        "cutting of long documents": HOW_CUT,
        "number of input files": len(files),
        "input": hashlib.sha256(json.dumps(listed).encode()).hexdigest(),
    }


def _save(folder: Path, plan: dict[str, Any], progress: _Progress) -> None:
    flush_folder(folder)
    write_sealed(folder / PLAN, plan | {_PROGRESS: asdict(progress)})


def _begin(folder: Path, plan: dict[str, Any], *, skip_bad: bool) -> _Progress:
    """The progress of an earlier call with this plan. Saves the plan if there was none.

    Raises:
        DataError: the folder is finished, or holds something that cannot be continued.
    """
    if (folder / INDEX).exists():
        _remove(folder, _TEMPORARY_FILES)  # left if an earlier call was killed at its end
        raise DataError(
            f"{folder} is finished and holds tokens; name another --output, or replace it with "
            "--fresh"
        )
    before = read_sealed(folder / PLAN)
    if before is None:
        _refuse_others(folder)
    else:
        # Version 0.1 saved its progress elsewhere; its plan differs in the format.
        stored = before.pop(_PROGRESS, {"shards": [None]})
        differing = [key for key, value in plan.items() if before.get(key) != value]
        has_tokens = stored["shards"] or stored["open_tokens"]
        if has_tokens and differing:
            raise DataError(
                f"the tokenization in {folder} can only be continued as it was started, and its "
                f"{' and '.join(differing)} differed then; restore that, name another --output, or "
                "start again with --fresh"
            )
        if has_tokens and stored["skipped"] and not skip_bad:
            raise DataError(
                f"the tokenization in {folder} has skipped {stored['skipped']} bad records under "
                f"--skip-bad (listed in {folder / _SKIPPED}); state it again, or start again with "
                "--fresh"
            )
        if has_tokens:
            return _Progress(**{**stored, "shards": tuple(Shard(**s) for s in stored["shards"])})
    _save(folder, plan, _Progress())
    return _Progress()


def _refuse_others(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    others = [name for name in names if name != _LOCK and not name.endswith(TEMPORARY)]
    if others:
        mend = ", or replace them with --fresh" if _is_ours(folder) else ""
        raise DataError(
            f"tokens are written to a new or empty folder, and {folder} has {len(others)} entries "
            f"that cannot be continued, the first {others[0]}; name another --output{mend}"
        )


def _is_ours(folder: Path) -> bool:
    return any(any(folder.glob(name)) for name in (PLAN, INDEX, SHARDS))


def _remove(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        for path in folder.glob(name):
            path.unlink()
    flush_folder(folder)

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

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import tokenizers
from pydantic import TypeAdapter

from megaspeed.data.documents import DocumentHash, changed_while_read, no_text
from megaspeed.data.encode import encode
from megaspeed.data.errors import DataError
from megaspeed.data.pieces import CUT_RULE, BadRecord, OnBad, Piece, refuse
from megaspeed.data.sources import SourceFile
from megaspeed.data.token_file import id_type
from megaspeed.data.token_folder import (
    DOCUMENTS,
    INDEX,
    PLAN,
    SHARDS,
    SKIPPED,
    Progress,
    TokenFolderIndex,
    TokenFolderWriter,
    write_index,
)
from megaspeed.data.tokenizer import CONFIG_FILE, TOKENIZER_FILE, TextTokenizer
from megaspeed.files.durable import TEMPORARY, Locked, flush_folder, lock
from megaspeed.files.json_values import Facts, read_sealed, write_sealed
from megaspeed.files.paths import FileState, sha256_of

DEFAULT_SHARD_TOKENS = 1 << 29
"""1 GiB of ids of 2 bytes."""

# Increment it if the code changes so that the same plan gives other files.
_FORMAT = 3
_LOCK = ".lock"
_PROGRESS = "progress"
_TEMPORARY_FILES = (PLAN, DOCUMENTS)
_ALL = (INDEX, *_TEMPORARY_FILES, SKIPPED, SHARDS, TOKENIZER_FILE, CONFIG_FILE)
# The plan is saved after input files of at least this size, because saving flushes all files.
_SAVED_AT_ONCE_BYTES = 1 << 26
_OR_SKIP = ", or skip bad records with --skip-bad"


def tokenize(
    files: Sequence[SourceFile],
    tokenizer: TextTokenizer,
    folder: Path,
    report: Callable[[Progress], None],
    *,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    skip: OnBad | None = None,
    fresh: bool = False,
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
        fresh: whether files of an earlier call are removed first.

    Raises:
        DataError: a record is bad; or the folder is finished, in use, or contains other files, such
            as those of a call with another input or tokenizer.
        OSError: a file cannot be read or written.
    """
    with _lock_folder(folder):
        if fresh and _is_ours(folder):
            _remove(folder, _ALL)
        states = [file.state() for file in files]
        plan = _plan(files, states, tokenizer, shard_tokens)
        progress = _earlier_progress(folder, plan, skips=skip is not None)
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
            refuse(record, _OR_SKIP)
        else:
            skip(record)
            writer.add_skipped(record)

    for file, (_, size, _, _) in zip(files, states, strict=True):
        bytes_before, document = writer.progress.read_bytes, DocumentHash()
        for piece in file.pieces(on_bad):
            document.update(piece)
            if piece.ends_document:
                writer.add_document(file.name, document)
                document = DocumentHash()
            writer.progress.read_bytes = bytes_before + piece.read_bytes
            yield piece
        writer.progress.read_bytes = bytes_before + size


def _finish(folder: Path, tokenizer: TextTokenizer, progress: Progress) -> TokenFolderIndex:
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
    _remove(folder, _TEMPORARY_FILES)
    return index


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Create the folder if necessary, and lock it.

    Raises:
        DataError: another process writes to it, or it cannot be written to.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(lock(folder / _LOCK))
        except Locked as error:
            raise DataError(
                f"only one process at a time may write to a folder, but another one writes to "
                f"{folder}; wait until it has ended, or name another --output"
            ) from error
        except OSError as error:
            raise DataError(
                f"tokens must be written to a folder, but {folder} cannot be created or written to "
                f"({error.strerror}); name another --output"
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
    # An unfinished folder is recognized by three of these keys. All are shown in messages.
    return {
        "format": _FORMAT,
        "tokenizer": [tokenizer.fingerprint, tokenizer.end_of_text],
        "shard_tokens": shard_tokens,
        "version of tokenizers": tokenizers.__version__,
        "cutting of long documents": CUT_RULE,
        "number of input files": len(files),
        "input": hashlib.sha256(json.dumps(listed).encode()).hexdigest(),
    }


def _save(folder: Path, plan: Facts, progress: Progress) -> None:
    flush_folder(folder)
    write_sealed(folder / PLAN, plan | {_PROGRESS: asdict(progress)})


def _earlier_progress(folder: Path, plan: Facts, *, skips: bool) -> Progress:
    """Return the progress of an earlier call with this plan; an empty one if there was none.

    Raises:
        DataError: the folder is finished, or holds something that cannot be continued.
    """
    if (folder / INDEX).exists():
        _remove(folder, _TEMPORARY_FILES)  # they remain if an earlier call was killed at its end
        raise DataError(
            f"{folder} is finished and holds tokens; name another --output, or replace it with "
            "--fresh"
        )
    before = read_sealed(folder / PLAN)
    if before is None:
        _refuse_others(folder)
        return Progress()
    stored = before.pop(_PROGRESS, None)
    differing = [key for key, value in plan.items() if before.get(key) != value]
    is_readable = "format" not in differing
    progress = TypeAdapter(Progress).validate_python(stored) if is_readable else Progress()
    if is_readable and not progress.tokens:
        return Progress()
    if differing:
        raise DataError(
            f"the tokenization in {folder} can only be continued as it was started, but its "
            f"{' and '.join(differing)} differed then; restore that, name another --output, or "
            "start again with --fresh"
        )
    if progress.skipped and not skips:
        raise DataError(
            f"the tokenization in {folder} has skipped {progress.skipped} bad records with "
            f"--skip-bad (listed in {folder / SKIPPED}); state it again, or start again with "
            "--fresh"
        )
    return progress


def _refuse_others(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    others = [name for name in names if name != _LOCK and not name.endswith(TEMPORARY)]
    if others:
        mend = ", or replace them with --fresh" if _is_ours(folder) else ""
        raise DataError(
            f"tokens must be written to a new or empty folder, but {folder} has {len(others)} "
            f"entries that cannot be continued, the first {others[0]}; name another --output{mend}"
        )


def _is_ours(folder: Path) -> bool:
    return any(any(folder.glob(name)) for name in (PLAN, INDEX, SHARDS))


def _remove(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        for path in folder.glob(name):
            path.unlink()
    flush_folder(folder)

"""One tokenization, from the first text to the index; or the rest of one that was cut off."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from megaspeed.data.errors import DataError
from megaspeed.data.text.pieces import BadRecord, refuse
from megaspeed.data.text.sources import SourceFile
from megaspeed.data.tokenizer.text_tokenizer import TextTokenizer
from megaspeed.data.tokenizing.batches import Position, read_batches
from megaspeed.data.tokenizing.folder import begin, clear, remove_scaffolding, sole_use
from megaspeed.data.tokenizing.output import Output, Standing
from megaspeed.data.tokenizing.plan import Plan, differences
from megaspeed.data.tokenizing.workers import encode_in_order, worker_pool
from megaspeed.data.tokens.packing import id_type
from megaspeed.data.tokens.token_folder import TokenFolderIndex, write_index
from megaspeed.files.durable import flush_folder

DEFAULT_SHARD_TOKENS = 1 << 29
"""1 GiB of ids of 2 bytes."""

_OR_SKIP = ", or pass over bad records with --skip-bad"


class Watch(Protocol):
    """Who is told how the work goes on."""

    def begins(self, standing: Standing, total_bytes: int) -> None:
        """Once, before anything is read: what was done before, and the size of the input."""

    def passes_over(self, record: BadRecord) -> None:
        """For every bad record, as it is read."""

    def reaches(self, standing: Standing) -> None:
        """Many times a second."""


@dataclass(frozen=True, kw_only=True)
class How:
    """How the work is done; of all this, only the size of shards shows in the result.

    Attributes:
        processes: that encode.
        shard_tokens: how many fill a shard; it ends with the document that fills it.
        skip_bad: whether bad records are passed over; else the first one ends the work.
        fresh: whether what an earlier tokenization left in the folder is removed first.
        save_interval_seconds: about as much work is lost in a kill. What is done of a long document
            counts, too; it is read again, and is not encoded again.
    """

    processes: int
    shard_tokens: int = DEFAULT_SHARD_TOKENS
    skip_bad: bool = False
    fresh: bool = False
    save_interval_seconds: float = 5.0


def tokenize(
    files: Sequence[SourceFile], tokenizer: TextTokenizer, folder: Path, how: How, watch: Watch
) -> TokenFolderIndex:
    """Writes a token folder. However it ends, the same call goes on with what is done.

    Args:
        files: the text.
        tokenizer: is saved in the folder.
        folder: new, empty, or left by a call that was cut off.

    Raises:
        DataError: a record is bad; or the folder is finished, in use, or holds something else, such
            as work that was begun with another input or tokenizer.
        WorkerDied: a process was killed.
        OSError: a file cannot be read or written.
    """
    with sole_use(folder):
        if how.fresh:
            clear(folder)
        plan = Plan.of(files, tokenizer, how.shard_tokens)
        journal = begin(folder, plan, skip_bad=how.skip_bad)
        tokenizer.save(folder)
        dtype = id_type(tokenizer.vocab_size)
        output = Output(folder, dtype, how.shard_tokens, journal, watch.passes_over)
        with closing(output):
            watch.begins(output.standing, sum(file.size_bytes for file in plan.input))
            _encode_all(files, journal.position, folder, output, how, watch)
            _check_unchanged(plan, Plan.of(files, tokenizer, how.shard_tokens))
            shards, corpus_fingerprint = output.finish()
        if not shards.closed:
            raise DataError(
                f"a corpus must have text, and its {len(files)} files, starting with "
                f"{files[0].path}, have none; name files with text"
            )
        index = TokenFolderIndex(
            dtype=dtype,
            documents=shards.documents,
            tokens=shards.tokens,
            vocab_size=tokenizer.vocab_size,
            end_of_text=tokenizer.end_of_text,
            tokenizer_fingerprint=tokenizer.fingerprint,
            corpus_fingerprint=corpus_fingerprint,
            largest_id=output.largest_id,
            shards=shards.closed,
        )
        _finish(folder, index)
        return index


def _encode_all(
    files: Sequence[SourceFile],
    start: Position,
    folder: Path,
    output: Output,
    how: How,
    watch: Watch,
) -> None:
    """Everything from `start` on; whatever cuts it off, what is done is saved."""
    on_bad = output.passed_over.add if how.skip_bad else partial(refuse, otherwise=_OR_SKIP)
    batches = read_batches(files, start, on_bad, lambda: output.passed_over.so_far)
    saved_at = time.monotonic()
    try:
        with worker_pool(how.processes) as pool:
            for packed, reached in encode_in_order(pool, batches, folder, processes=how.processes):
                output.append(packed, reached)
                watch.reaches(output.standing)
                if time.monotonic() - saved_at >= how.save_interval_seconds:
                    output.save()
                    saved_at = time.monotonic()
    except OSError:
        raise  # what the disk holds is not known any more: the last journal counts
    except BaseException:
        with suppress(OSError):
            output.save()
        raise


def _check_unchanged(plan: Plan, now: Plan) -> None:
    differing = "; ".join(differences(plan, now))
    if differing:
        raise DataError(
            f"a corpus must not change while it is read, and {differing}. Once it is complete, "
            "begin anew with --fresh"
        )


def _finish(folder: Path, index: TokenFolderIndex) -> None:
    """The index last, when all that it speaks of is on the disk."""
    flush_folder(folder)
    write_index(folder, index)
    flush_folder(folder)
    remove_scaffolding(folder)

"""Encode pieces of documents as token ids, with an end-of-text token after each document.

    pieces   "The sun"  " rose." |  "It rained." |
    ids      464 4252   8278 13    1026 33697 13
    packed   464 4252 8278 13 END 1026 33697 13 END
                                 ^                 ^  document_ends 5, 9

Every piece is encoded separately, so the ids do not depend on the batches or on the number of
processes.

    batches      5 6 7 8 9 ...                      read when a batch in flight is done
    in flight    [4 3 2 1]     at most 4 x processes
    ids          0                                  in the order of the text

Memory is bounded by the batches in flight, however long the input is.
"""

import errno
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megaspeed.data.pieces import Piece
from megaspeed.data.token_file import id_type
from megaspeed.data.tokenizer import TextTokenizer, load_tokenizer
from megaspeed.supervision.process_end import end_with_starter

BATCH_CHARACTERS = 1 << 18
"""Characters in a batch. Encoding one takes a fraction of a second and about 25 MB of memory."""

_THREADS_BATCH_CHARACTERS = 1 << 22  # enough work for all threads of a process
_IN_FLIGHT_PER_PROCESS = 4


class WorkerDied(RuntimeError):
    """A worker process ended while it worked, for example because it was killed for its memory."""


@dataclass(frozen=True)
class Packed:
    """The ids of some pieces.

    Attributes:
        ids: shape (tokens,), including end-of-text tokens.
        document_ends: shape (documents that end here,). For each, the number of ids up to its end.
    """

    ids: NDArray[np.unsignedinteger]
    document_ends: NDArray[np.int64]


def pack(pieces: Sequence[Piece], tokenizer: TextTokenizer, is_continued: bool = False) -> Packed:
    """Return the ids of consecutive pieces. ``is_continued``: the first continues a document."""
    continued = [is_continued, *(not piece.ends_document for piece in pieces)][: len(pieces)]
    texts: dict[bool, list[str]] = {False: [], True: []}
    for piece, continues in zip(pieces, continued, strict=True):
        texts[continues].append(piece.text)
    encoded = {
        False: iter(tokenizer.encode(texts[False])),
        True: iter(tokenizer.encode_continued(texts[True])),
    }
    ids: list[int] = []
    document_ends: list[int] = []
    for piece, continues in zip(pieces, continued, strict=True):
        ids.extend(next(encoded[continues]))
        if piece.ends_document:
            ids.append(tokenizer.end_of_text)
            document_ends.append(len(ids))
    return Packed(
        np.asarray(ids, dtype=id_type(tokenizer.vocab_size)),
        np.asarray(document_ends, dtype=np.int64),
    )


Encode = Callable[[Iterable[Piece]], Iterator[Packed]]
"""Encodes pieces, in the order of the text."""


@contextmanager
def encoder(tokenizer: TextTokenizer, folder: Path, processes: int | None) -> Iterator[Encode]:
    """Encode pieces in several processes, or in the threads of this process.

    Args:
        tokenizer: the tokenizer.
        folder: the folder that it is saved in, from which each process loads it.
        processes: their number; None for threads.

    Raises:
        WorkerDied: a process was killed.
    """
    if processes is None:
        yield partial(encode, tokenizer=tokenizer)
        return
    with worker_pool(processes) as pool:
        yield partial(encode_in_processes, tokenizer=folder, pool=pool, processes=processes)


def encode(pieces: Iterable[Piece], tokenizer: TextTokenizer) -> Iterator[Packed]:
    """Encode all pieces with the threads of this process."""
    for batch, is_continued in read_batches(pieces, _THREADS_BATCH_CHARACTERS):
        yield pack(batch, tokenizer, is_continued)


def read_batches(pieces: Iterable[Piece], characters: int) -> Iterator[tuple[list[Piece], bool]]:
    """Yield all pieces, in batches of about ``characters`` characters.

    Yields:
        (consecutive pieces, whether the first one continues a document of the previous batch)
    """
    filling: list[Piece] = []
    size, is_continued = 0, False
    for piece in pieces:
        filling.append(piece)
        size += len(piece.text)
        if size >= characters:
            yield filling, is_continued
            filling, size, is_continued = [], 0, not piece.ends_document
    if filling:
        yield filling, is_continued


def encode_in_processes(
    pieces: Iterable[Piece], tokenizer: Path, pool: Executor, processes: int
) -> Iterator[Packed]:
    """Yield the ids of all pieces, in the order of the text.

    Args:
        pieces: the text. It is read ahead, up to the limit of batches in flight.
        tokenizer: the folder of a tokenizer, which each process loads.
        pool: a pool from ``worker_pool``.
        processes: number of processes of the pool.
    """
    in_flight: deque[Future[Packed]] = deque()
    for batch, is_continued in read_batches(pieces, BATCH_CHARACTERS):
        with _interrupts_blocked():  # a worker may be started
            in_flight.append(_submit(pool, batch, tokenizer, is_continued))
        del batch  # so that its text is freed once it is encoded
        if len(in_flight) == _IN_FLIGHT_PER_PROCESS * processes:
            yield in_flight.popleft().result()
    while in_flight:
        yield in_flight.popleft().result()


def _submit(
    pool: Executor, batch: Sequence[Piece], tokenizer: Path, is_continued: bool
) -> Future[Packed]:
    try:
        return pool.submit(_pack_in_worker, batch, tokenizer, is_continued)
    except OSError as error:
        # If a worker has just died, the pool closes the pipe to which ``submit`` writes.
        if error.errno not in (None, errno.EBADF):
            raise
        raise BrokenProcessPool("a worker died while a batch was submitted") from error


def _pack_in_worker(pieces: Sequence[Piece], tokenizer: Path, is_continued: bool) -> Packed:
    return pack(pieces, _loaded(tokenizer), is_continued)


@cache
def _loaded(folder: Path) -> TextTokenizer:
    return load_tokenizer(str(folder))


@contextmanager
def worker_pool(processes: int) -> Iterator[Executor]:
    """Start a pool of processes that end when the ``with`` block ends.

    Raises:
        WorkerDied: a process ended earlier.
    """
    # Not forked, because a fork copies the reader's memory and its locks in any state.
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=_start_worker)
    try:
        yield pool
    except BrokenProcessPool as error:
        if sys.version_info < (3, 11, 5):
            # Older Pythons wait forever for dead workers to read their tasks (gh-94777).
            pool._call_queue._reader.close()  # type: ignore[attr-defined]  # private
        raise WorkerDied(
            f"one of {processes} worker processes died; the system kills a process that needs too "
            "much memory"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C in processes that are started in the block, because they inherit it.

    A terminal sends the signal to all processes, and each would print its stack. This process
    receives it after the block.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _start_worker() -> None:
    # One thread each: the processes share the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    end_with_starter()  # otherwise it would wait for work forever

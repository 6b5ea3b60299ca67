"""Processes that encode batches side by side, and hand the ids back in order.

    batches      5 6 7 8 9 ...                      read only when there is room
    under way    [4 3 2 1]     at most 4 x processes
    ids          0                                  the oldest is waited for

So memory is bounded by the batches under way, however long the input is, and a batch that takes
long holds up the others only when all of them are done.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread

from megaspeed.data.text.pieces import Piece
from megaspeed.data.tokenizer.text_tokenizer import TextTokenizer, load_tokenizer
from megaspeed.data.tokenizing.batches import Batch, Reached
from megaspeed.data.tokenizing.interrupts import interrupts_held
from megaspeed.data.tokens.packing import Packed, pack

_UNDER_WAY_PER_PROCESS = 4


class WorkerDied(RuntimeError):
    """A worker process ended in the middle of its work, as one that is killed for its memory."""


@contextmanager
def worker_pool(processes: int) -> Iterator[Executor]:
    """The processes; whatever ends the block ends them, too."""
    # Not forked: a fork copies the reader's threads in any state, and its memory.
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=_begin_worker)
    try:
        yield pool
    except BrokenProcessPool as error:
        _stop_writing_to_the_dead(pool)
        raise WorkerDied(
            f"one of {processes} worker processes died, as a process that is killed for its memory"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _stop_writing_to_the_dead(pool: ProcessPoolExecutor) -> None:
    """Python before 3.11.5 waits for ever until workers that are gone have read what is for them.

    Its thread that writes to them goes on once nobody can read, and later Pythons see to that
    themselves (gh-94777).
    """
    if sys.version_info < (3, 11, 5):
        pool._call_queue._reader.close()  # type: ignore[attr-defined]  # private, as in gh-94777


def encode_in_order(
    pool: Executor, batches: Iterable[Batch], tokenizer: Path, *, processes: int
) -> Iterator[tuple[Packed, Reached]]:
    """The ids of each batch and what it reaches, in the order of the batches.

    Args:
        pool: of `worker_pool`.
        batches: read as far ahead as there is room.
        tokenizer: a folder with a tokenizer, that each worker loads once.
        processes: of the pool.
    """
    under_way: deque[tuple[Future[Packed], Reached]] = deque()
    for batch in batches:
        with interrupts_held():  # a worker may be begun
            encoded = pool.submit(_encode, batch.pieces, batch.within_document, tokenizer)
        under_way.append((encoded, batch.reached))
        del batch  # the text is the pool's now, and is let go once it is encoded
        if len(under_way) == _UNDER_WAY_PER_PROCESS * processes:
            yield _oldest(under_way)
    while under_way:
        yield _oldest(under_way)


def _oldest(under_way: deque[tuple[Future[Packed], Reached]]) -> tuple[Packed, Reached]:
    encoded, reached = under_way.popleft()
    return encoded.result(), reached


def _encode(pieces: tuple[Piece, ...], within_document: bool, tokenizer: Path) -> Packed:
    return pack(pieces, _loaded(tokenizer), within_document=within_document)


@cache
def _loaded(folder: Path) -> TextTokenizer:
    return load_tokenizer(str(folder))


def _begin_worker() -> None:
    # One thread each: the processes share the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)

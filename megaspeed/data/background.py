"""Tokenizes each stream in its own process while a run trains on the shards that exist."""

import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from threading import Event, Thread

from megaspeed.data.errors import DataError
from megaspeed.data.token_stream import TokenStream
from megaspeed.supervision.process_end import STOP_SIGNALS, end_with_starter


@contextmanager
def tokenized_meanwhile(
    streams: Iterable[TokenStream], on_failure: Callable[[str], None]
) -> Iterator[None]:
    """Make the shards of each stream in another process, until the block or this process ends.

    If a stream cannot be tokenized, its process prints the reason and ends. If it ends early for
    any reason, ``on_failure`` is called from another thread.
    """
    closing = Event()

    def watch(process: BaseProcess, stream: TokenStream) -> None:
        process.join()
        if process.exitcode and not closing.is_set():
            on_failure(
                f"the process that tokenizes {stream.source} must run until it is done, but ended "
                f"with exit code {process.exitcode} (unless it was killed, it printed the reason); "
                "start again: complete shards are kept"
            )

    processes: list[BaseProcess] = []
    try:
        for stream in streams:
            processes.append(get_context("spawn").Process(target=_make_all, args=(stream,)))
            processes[-1].start()
            Thread(target=watch, args=(processes[-1], stream), daemon=True).start()
        yield
    finally:
        closing.set()
        for process in processes:
            process.kill()


def _make_all(stream: TokenStream) -> None:
    for number in STOP_SIGNALS:  # a rank that saves after a signal may need a shard
        signal.signal(number, signal.SIG_IGN)
    end_with_starter()
    os.nice(10)  # training runs first
    try:
        stream.make(wait_seconds=math.inf)
    except (DataError, OSError) as error:
        raise SystemExit(str(error)) from error  # prints it

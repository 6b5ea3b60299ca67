"""Tokenizes each stream in its own process while a run trains on the shards that exist."""

import math
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import RLock
from typing import Self

from tqdm import tqdm

from megaspeed.data.errors import DataError, StreamEnded, StreamInterrupted
from megaspeed.data.token_stream import TokenStream
from megaspeed.supervision.answers import RankFailed, describe
from megaspeed.supervision.process_end import EXIT_FAILED, STOP_SIGNALS, end_with_starter

_LONGEST_REASON = 4000
"""Characters; they must fit into a pipe, which is read only after the process has ended."""


class Tokenization:
    """Makes the shards of each stream in another process, until the block or this process ends."""

    def __init__(self, streams: Sequence[TokenStream]) -> None:
        self._streams = streams
        self._failure: Exception | None = None

    def __enter__(self) -> Self:
        spawn = get_context("spawn")
        pipes = [spawn.Pipe(duplex=False) for _ in self._streams]
        self._errors = [receiving for receiving, _ in pipes]
        self._processes = [
            spawn.Process(target=_make_all, args=(stream, sending))
            for stream, (_, sending) in zip(self._streams, pipes, strict=True)
        ]
        for process, (_, sending) in zip(self._processes, pipes, strict=True):
            process.start()
            sending.close()  # so that the end of the process closes the pipe
        return self

    def __exit__(self, *_: object) -> None:
        for process, errors in zip(self._processes, self._errors, strict=True):
            process.kill()
            process.join()
            errors.close()

    def failure(self) -> Exception | None:
        """Return why a stream gets no more shards; None if all get them, or are complete.

        It is a StreamEnded if the data, or what the run states about them, must be changed. After
        a RankFailed, the same command may succeed.
        """
        all_of_each = zip(self._streams, self._processes, self._errors, strict=True)
        for stream, process, errors in all_of_each if self._failure is None else ():
            if not process.exitcode:  # it runs, or has made all shards
                continue
            try:
                self._failure = errors.recv()
            except EOFError:
                how = f"ended with exit code {process.exitcode}"
                self._failure = RankFailed(
                    f"the process that tokenizes {stream.source} must run until it is done, but "
                    f"{how}; start again: complete shards are kept"
                )
        return self._failure


def _make_all(stream: TokenStream, errors: Connection) -> None:
    for number in STOP_SIGNALS:  # a rank that saves after a signal may need a shard
        signal.signal(number, signal.SIG_IGN)
    end_with_starter()
    os.nice(10)  # training runs first
    tqdm.set_lock(RLock())  # Python would warn of its default, a semaphore, if this were killed
    try:
        stream.make(wait_seconds=math.inf)
    except (DataError, OSError) as error:
        reason = " ".join(describe(error).split())[:_LONGEST_REASON]
        is_lasting = isinstance(error, DataError) and not isinstance(error, StreamInterrupted)
        errors.send(StreamEnded(reason) if is_lasting else RankFailed(reason))
        sys.stderr.write(
            f"{reason}\nThe run trains on what is left of the complete shards, and saves.\n"
        )
        sys.exit(EXIT_FAILED)

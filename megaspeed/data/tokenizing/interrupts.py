"""Ctrl-C is for the first process: the terminal sends it to all, and each would show its stack.

first process    Ctrl-C held |-- a worker is begun --| Ctrl-C comes through
worker           Ctrl-C blocked from its first instruction on, because it inherits that
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C comes through behind the block, and never to processes that are begun in it."""
    came: list[int] = []
    is_main = current_thread() is main_thread()  # no other thread may set, or meets, a handler
    if is_main:
        # The mask is this thread's alone: the signal may come by way of another one.
        handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if is_main:
            signal.signal(signal.SIGINT, handler)
    if came:
        signal.raise_signal(signal.SIGINT)

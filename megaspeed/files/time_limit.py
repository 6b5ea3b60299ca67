"""A block that ends when its time is over, wherever it is: in a walk through folders, an import."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _TimeOver(BaseException):
    """Not an Exception, so that no handler inside the block takes it for one of its own."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Leaves the block after ``seconds``, without an error.

    Only the main thread can be interrupted. In another thread there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(*_: Any) -> None:
        raise _TimeOver

    previous = signal.signal(signal.SIGALRM, leave)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _TimeOver:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, *timer)

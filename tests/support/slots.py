"""Tests that mostly wait run beside the others, so that the processors do not wait with them.

    make test       7 workers, 4 slots
    a test          holds a slot while it runs
    one that waits  needs none: it has the marker ``waits``

Some tests wait for a limit of time, such as the hang timeout of a run, for tens of seconds with two
processor seconds of work. With as many workers as slots, the processors would be idle meanwhile.
With more workers and no slots, too many tests would compute at once, and miss their limits.
"""

import fcntl
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, TypeVar

T = TypeVar("T")

_POLL_SECONDS = 0.02
_SPREAD = 0.9
"""Tests that wait begin in this part of the run, so that none is left alone at the end."""


@cache
def slots_file() -> IO[bytes]:
    """Make the file whose bytes are the slots. It is deleted when this process ends."""
    return tempfile.NamedTemporaryFile(prefix="slots-")


@contextmanager
def slot(file: Path, number: int) -> Iterator[None]:
    """Hold one of ``number`` slots, which all processes with this file share.

    The system frees the slot of a process that ends.
    """
    with file.open("wb") as slots:
        while not any(_is_locked(slots, place) for place in range(number)):
            time.sleep(_POLL_SECONDS)
        yield  # the end of the block closes the file, which frees the slot


def _is_locked(slots: IO[bytes], place: int) -> bool:
    try:
        fcntl.lockf(slots, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except OSError:
        return False
    return True


def spread(
    items: Sequence[T], waits: Callable[[T], bool], module: Callable[[T], object]
) -> list[T]:
    """Return the tests with those that wait at even distances, and never inside a module.

    A worker gets a part of this list. A module's fixtures are made once for a run of its tests.
    """
    waiting, others = [one for one in items if waits(one)], [one for one in items if not waits(one)]
    result: list[T] = []
    placed = 0
    for number, item in enumerate(others):
        if number == 0 or module(item) != module(others[number - 1]):
            due = round(len(waiting) * (number + 1) / len(others) / _SPREAD)
            result += waiting[placed:due]
            placed = max(placed, due)
        result.append(item)
    return result + waiting[placed:]

"""What a rank reports when it fails: where it stands, what it was doing, and the traceback.

    [gpu17, rank 5 (pp 1, dp 0, tp 1), step 12, Backward(micro_batch=3)] RuntimeError: ...
    Traceback (most recent call last):
      ...

The report is written while the exception propagates, before anything waits. Other ranks may wait
for this rank, and objects that close after the exception may wait for them.
"""

import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from megaspeed.topology.grid import Grid

_DURING = "during "
_REPORTED = "_megaspeed_reported"


@contextmanager
def during(phase: object) -> Iterator[None]:
    """Adds the phase, as a note, to an exception that leaves this block."""
    try:
        yield
    except Exception as error:
        note_phase(error, phase)
        raise


def note_phase(error: Exception, phase: object) -> None:
    """Adds the phase to an exception, as ``during`` does, but without a context manager."""
    error.add_note(f"{_DURING}{phase}")


@contextmanager
def failures_reported(
    grid: Grid, rank: int, *, expected: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Writes an exception that leaves this block to standard error. Nested blocks write it once.

    Args:
        grid: the layout.
        rank: this process's.
        expected: exceptions that the caller reports in its own words.
    """
    try:
        yield
    except expected:
        raise
    except Exception as error:
        if not hasattr(error, _REPORTED):
            setattr(error, _REPORTED, True)
            sys.stderr.write(describe_failure(error, grid, rank))
            sys.stderr.flush()
        raise


def describe_failure(error: Exception, grid: Grid, rank: int) -> str:
    """The header line, then the traceback."""
    place = grid.coordinates_of(rank)
    notes: list[str] = getattr(error, "__notes__", [])
    # The innermost phase was noted first.
    phases = [note.removeprefix(_DURING) for note in reversed(notes) if note.startswith(_DURING)]
    where = f"rank {rank} (pp {place.pp}, dp {place.dp}, tp {place.tp})"
    header = ", ".join([socket.gethostname(), where, *phases])
    lines = str(error).strip().splitlines() or [""]
    trace = "".join(traceback.format_exception(error))
    return f"[{header}] {type(error).__name__}: {lines[0]}\n{trace}"

"""What a rank reports when it fails: where it stands, what it was doing, and the traceback.

    [gpu17, rank 5 (pp 1, dp 0, tp 1), step 12, Backward(micro_batch=3)] RuntimeError: ...
    Traceback (most recent call last):
      ...

The report is written while the exception propagates, before anything waits. Other ranks may wait
for this rank, and objects that close after the exception may wait for them.
"""

import socket
import traceback

from megaspeed.topology.grid import Grid

_DURING = "during "


def note_phase(error: Exception, phase: object) -> None:
    """Adds the phase, as a note, to an exception that leaves it."""
    error.add_note(f"{_DURING}{phase}")


def place_of(grid: Grid, rank: int, doing: str = "", host: str | None = None) -> str:
    """Such as "[gpu17, rank 5 (pp 1, dp 0, tp 1), step 12]"; without a host, this one."""
    if rank < grid.world_size:
        at = grid.coordinates_of(rank)
        where = f"rank {rank} (pp {at.pp}, dp {at.dp}, tp {at.tp})"
    else:
        where = f"rank {rank} (spare)"
    return f"[{', '.join(part for part in (host or socket.gethostname(), where, doing) if part)}]"


def describe_failure(error: Exception, grid: Grid, rank: int) -> str:
    """The header line, then the traceback."""
    notes: list[str] = getattr(error, "__notes__", [])
    # The innermost phase was noted first.
    phases = [note.removeprefix(_DURING) for note in reversed(notes) if note.startswith(_DURING)]
    lines = str(error).strip().splitlines() or [""]
    trace = "".join(traceback.format_exception(error))
    return f"{place_of(grid, rank, ', '.join(phases))} {type(error).__name__}: {lines[0]}\n{trace}"

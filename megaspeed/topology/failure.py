"""What a rank reports when it fails: its coordinates, what it was doing, and the traceback.

    [gpu17, rank 5 (pp 1, dp 0, tp 1), step 12, Backward(micro_batch=3)] RuntimeError: ...
    Traceback (most recent call last):
      ...

The report is written while the exception propagates, before anything waits. Other ranks may wait
for this rank, and objects that close after the exception may wait for them.
"""

import contextlib
import json
import socket
import time
import traceback
from pathlib import Path
from typing import Any

from megaspeed.topology.grid import Grid

_DURING = "during "


def note_phase(error: Exception, phase: object) -> None:
    """Adds the phase as a note to an exception that propagates out of it."""
    error.add_note(f"{_DURING}{phase}")


def place_of(grid: Grid, rank: int, doing: str = "", host: str | None = None) -> str:
    """Such as "[gpu17, rank 5 (pp 1, dp 0, tp 1), step 12]"; without ``host``, this host."""
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


def write_error_file(error_file: str | None, text: str) -> None:
    """Write the file in which torchrun looks for the reason why a rank has ended.

    Args:
        error_file: where torchrun looks; None if another launcher started the rank.
        text: the report. Its first line becomes the message.
    """
    if error_file is None or Path(error_file).exists():
        return
    extra: dict[str, Any] = {"py_callstack": text, "timestamp": str(int(time.time()))}
    message = {"message": text.splitlines()[0], "extraInfo": extra}
    with contextlib.suppress(OSError):
        Path(error_file).write_text(json.dumps({"message": message}))


def processes_killed_for_memory() -> int:
    """How many processes the kernel has killed on this host because memory ran out."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("oom_kill ")).split()[1])
    return 0

"""The memory of this process, as Linux counts it, in bytes.

``ru_maxrss`` is no substitute. After a fork and an exec, it begins at the peak of the process that
forked, which is a worker of pytest here.
"""

import gc
from collections.abc import Callable
from pathlib import Path


def peak() -> int:
    """Return the largest memory since the start of the program, or since ``added`` began."""
    return _counted("VmHWM")


def added(action: Callable[[], object]) -> int:
    """Return the largest growth of the memory during ``action``."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is held now
    before = _counted("VmRSS")
    action()
    return peak() - before


def _counted(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10

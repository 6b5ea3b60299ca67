"""Whether disk and memory hold what is about to be made, asked before it is begun."""

import shutil
from pathlib import Path

from megaspeed.files.paths import nearest_existing
from megaspeed.hugging_face.errors import HuggingFaceError

_MEMORY = Path("/proc/meminfo")


def check_disk(folder: Path, needed_bytes: int) -> None:
    """Raises HuggingFaceError where the disk of ``folder`` has less room, or it cannot be made."""
    above = nearest_existing(folder)
    if not above.is_dir():
        raise HuggingFaceError(
            f"{folder} cannot be made, because {above} is a file; name a place below a folder"
        )
    free = free_bytes(folder)
    if free < needed_bytes:
        raise HuggingFaceError(
            f"{folder} will take {needed_bytes:,} bytes, and its disk has {free:,} free; make "
            "room, or name a folder on another disk"
        )


def free_bytes(folder: Path) -> int:
    """On the disk of ``folder``, which need not be there yet."""
    return shutil.disk_usage(nearest_existing(folder)).free


def check_memory(needed_bytes: int, mend: str) -> None:
    """Raises HuggingFaceError where less memory is free; says nothing where that is not known."""
    free = available_memory_bytes()
    if free is not None and free < needed_bytes:
        raise HuggingFaceError(
            f"comparing both implementations takes about {needed_bytes:,} bytes of memory, and "
            f"{free:,} are available; {mend}"
        )


def available_memory_bytes() -> int | None:
    """What processes can still get without swapping; None where the system is no Linux."""
    if not _MEMORY.exists():
        return None
    lines = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) << 10

"""The manifest: size and checksum of every other file of a checkpoint, written after all of them.

    manifest.json    {"format": 1, "files": {"__0_0.distcp": {"size_bytes": ..., "checksum": ...},
                                             ".metadata": ..., "run_state.json": ...}}

A folder without a manifest is a save that did not end. With a manifest, every changed byte is
found.
"""

import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash
from typing_extensions import Buffer  # collections.abc has it from Python 3.12

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.files.durable import write_file
from megaspeed.files.json_values import unsealed, write_sealed
from megaspeed.files.reading import read_file

MANIFEST = "manifest.json"

_FORMAT = 1
_BLOCK_BYTES = 1 << 22


class Checksum:
    """The checksum of checkpoint files, fed block by block: XXH3 of 128 bits.

    It finds accidental damage, at the speed of memory. It does not protect against deliberate
    changes.
    """

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, buffer: Buffer) -> None:
        """Adds the next bytes of the file."""
        self._state.update(memoryview(buffer))

    def hexdigest(self) -> str:
        """The checksum of all bytes so far: 32 hexadecimal digits."""
        return self._state.hexdigest()


@dataclass(frozen=True)
class FileSeal:
    """Size and checksum of a file when it was written."""

    size_bytes: int
    checksum: str

    @classmethod
    def of(cls, content: bytes) -> "FileSeal":
        """The seal of a file with this content."""
        checksum = Checksum()
        checksum.update(content)
        return cls(len(content), checksum.hexdigest())

    @classmethod
    def of_file(cls, path: Path) -> "FileSeal":
        """The seal of an existing file, read in blocks."""
        checksum, size_bytes = Checksum(), 0
        block = memoryview(bytearray(_BLOCK_BYTES))
        with path.open("rb", buffering=0) as stream:
            while count := stream.readinto(block):
                checksum.update(block[:count])
                size_bytes += count
        return cls(size_bytes, checksum.hexdigest())


def write_files(folder: Path, files: Mapping[str, bytes]) -> dict[str, FileSeal]:
    """Writes small files, name -> content, into ``folder``; returns the seal of each."""
    for name, content in files.items():
        _write(folder / name, content)
    return {name: FileSeal.of(content) for name, content in files.items()}


def write_manifest(folder: Path, files: Mapping[str, FileSeal]) -> None:
    """Writes the manifest of ``folder``; ``files`` has the name and seal of every other file."""
    seals = {name: asdict(files[name]) for name in sorted(files)}
    write_sealed(folder / MANIFEST, {"format": _FORMAT, "files": seals})


def read_manifest(folder: Path) -> dict[str, FileSeal]:
    """Name -> seal of every other file of the checkpoint in ``folder``.

    Raises:
        CheckpointError: the manifest is missing, damaged, or of another version.
    """
    try:
        facts = unsealed(read_file(folder / MANIFEST))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{MANIFEST} is missing; it is written last, so the save did not end"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be read ({error.strerror})") from error
    if facts is None:
        raise CheckpointError(f"{MANIFEST} is damaged: it was cut short or changed")
    if facts.get("format") != _FORMAT:
        raise CheckpointError(
            f"{MANIFEST} has format {facts.get('format')!r}, and this version reads {_FORMAT}; "
            "use the version of megaspeed that wrote it"
        )
    try:
        return {_plain_name(name): _seal(seal) for name, seal in facts["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{MANIFEST} does not contain names, sizes and checksums of files"
        ) from error


def file_problems(folder: Path, files: Mapping[str, FileSeal]) -> dict[str, str]:
    """Name -> problem of each file that is not as it was written. Reads every byte of ``files``."""
    found = size_problems(folder, files)
    for name, written in files.items():
        if name not in found:
            problem = _content_problem(folder / name, written)
            if problem is not None:
                found[name] = f"{name} {problem}"
    return found


def size_problems(folder: Path, files: Mapping[str, FileSeal]) -> dict[str, str]:
    """Name -> problem of each file that is missing or has another size. Reads no file."""
    problems = ((name, _size_problem(folder / name, files[name].size_bytes)) for name in files)
    return {name: f"{name} {problem}" for name, problem in problems if problem is not None}


def _write(file: Path, content: bytes) -> None:
    write_file(file, lambda stream: stream.write(content))


def _size_problem(path: Path, size_bytes: int) -> str | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if not stat.S_ISREG(found.st_mode):
        return "is not a file"
    if found.st_size < size_bytes:
        return f"is cut short: {found.st_size:,} bytes of the {size_bytes:,} written"
    if found.st_size > size_bytes:
        return f"has grown: {found.st_size:,} bytes, but {size_bytes:,} were written"
    return None


def _content_problem(path: Path, written: FileSeal) -> str | None:
    try:
        found = FileSeal.of_file(path)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if found == written:
        return None
    return f"has other bytes than were written: checksum {found.checksum}, not {written.checksum}"


def _plain_name(name: str) -> str:
    """The name, if it is the name of a file in the folder itself."""
    if Path(name).name != name:
        raise ValueError(f"{name} is not the name of a file")
    return name


def _seal(facts: Any) -> FileSeal:
    seal = FileSeal(**facts)
    if type(seal.size_bytes) is not int or type(seal.checksum) is not str:
        raise TypeError("a size is an integer and a checksum is a string")
    return seal

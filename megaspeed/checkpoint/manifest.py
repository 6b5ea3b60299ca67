"""The manifest: size and checksum of every other file of a checkpoint, written after all of them.

    manifest.json    {"format": 1, "files": {"__0_0.distcp": {"size_bytes": ..., "checksum": ...},
                                             ".metadata": ..., "run_state.json": ...}}

A folder without it is a save that did not end. With it, every byte can be told from what was
written.
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
from megaspeed.files.json_values import unsealed, write_sealed
from megaspeed.files.reading import read_file

MANIFEST = "manifest.json"

_FORMAT = 1
_BLOCK_BYTES = 1 << 22


class Checksum:
    """The checksum of checkpoint files, fed block by block: XXH3 of 128 bits.

    It finds every damage that chance does, at the speed of memory; it is no defence against an
    author who means harm.
    """

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, buffer: Buffer) -> None:
        """Takes the next bytes of the file."""
        self._state.update(memoryview(buffer))

    def hexdigest(self) -> str:
        """32 hexadecimal digits, of all bytes so far."""
        return self._state.hexdigest()


@dataclass(frozen=True)
class FileSeal:
    """What a file was when it was written."""

    size_bytes: int
    checksum: str

    @classmethod
    def of(cls, content: bytes) -> "FileSeal":
        """The seal of a file that holds ``content``."""
        checksum = Checksum()
        checksum.update(content)
        return cls(len(content), checksum.hexdigest())

    @classmethod
    def of_file(cls, path: Path) -> "FileSeal":
        """The seal of the file as it is, read in blocks."""
        checksum, size_bytes = Checksum(), 0
        block = memoryview(bytearray(_BLOCK_BYTES))
        with path.open("rb", buffering=0) as stream:
            while count := stream.readinto(block):
                checksum.update(block[:count])
                size_bytes += count
        return cls(size_bytes, checksum.hexdigest())


def write_manifest(folder: Path, files: Mapping[str, FileSeal]) -> None:
    """Writes the manifest of ``folder``, whose other files are ``files``: name -> seal."""
    seals = {name: asdict(files[name]) for name in sorted(files)}
    write_sealed(folder / MANIFEST, {"format": _FORMAT, "files": seals})


def read_manifest(folder: Path) -> dict[str, FileSeal]:
    """The other files of the checkpoint in ``folder``: name -> what it was when it was written.

    Raises:
        CheckpointError: there is no manifest, or it cannot be read, or is not as it was written.
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
        raise CheckpointError(f"{MANIFEST} is not as it was written: cut short or altered")
    if facts.get("format") != _FORMAT:
        raise CheckpointError(
            f"{MANIFEST} is of format {facts.get('format')!r}, and this version reads {_FORMAT}; "
            "take the version of megaspeed that wrote it"
        )
    try:
        return {_plain_name(name): _seal(seal) for name, seal in facts["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST} does not name files, sizes and checksums") from error


def file_problems(folder: Path, files: Mapping[str, FileSeal]) -> list[str]:
    """What is wrong with ``files`` of ``folder``, a sentence each; reads every byte of them."""
    return list(problems_by_file(folder, files).values())


def problems_by_file(folder: Path, files: Mapping[str, FileSeal]) -> dict[str, str]:
    """Name -> what is wrong with it, of those files that are not as they were written."""
    found = size_problems(folder, files)
    for name, written in files.items():
        if name not in found:
            problem = _content_problem(folder / name, written)
            if problem is not None:
                found[name] = f"{name} {problem}"
    return found


def size_problems(folder: Path, files: Mapping[str, FileSeal]) -> dict[str, str]:
    """Name -> what is wrong with it, of those that are missing or of another size; reads none."""
    problems = ((name, _size_problem(folder / name, files[name].size_bytes)) for name in files)
    return {name: f"{name} {problem}" for name, problem in problems if problem is not None}


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
        return f"has grown: {found.st_size:,} bytes where {size_bytes:,} were written"
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
    """Of a file in the folder itself; a manifest cannot point anywhere else."""
    if Path(name).name != name:
        raise ValueError(f"{name} is not the name of a file")
    return name


def _seal(facts: Any) -> FileSeal:
    seal = FileSeal(**facts)
    if type(seal.size_bytes) is not int or type(seal.checksum) is not str:
        raise TypeError("a size is a whole number and a checksum is text")
    return seal

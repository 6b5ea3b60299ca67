"""The manifest: size and checksum of every other file of a checkpoint, written after all of them.

    manifest.json    {"format": 1, "files": {"__0_0.distcp": {"size_bytes": ..., "checksum": ...},
                                             ".metadata": ..., "run_state.json": ...}}

A folder without a manifest is a save that did not end. The manifest reveals every changed byte.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any

import xxhash

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.files.durable import write_file
from megaspeed.files.json_values import unsealed, write_sealed
from megaspeed.files.paths import file_problem, read_file

MANIFEST = "manifest.json"

INDEX = ".metadata"
"""torch's index of the tensors."""

TOKENIZER = "tokenizer.json"
"""If a checkpoint has this file, it has a tokenizer."""

TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""The files of a tokenizer, as transformers' save_pretrained writes them. A checkpoint has a copy,
so that the model can be exported and can generate text."""

GENERATION = "generation_config.json"
"""The settings of transformers' ``generate``, which a checkpoint of an imported model may have."""

_FORMAT = 1
_BLOCK_BYTES = 1 << 22


Checksum = xxhash.xxh3_128
"""Finds accidental damage, at the speed of memory. Does not protect against deliberate changes."""


@dataclass(frozen=True)
class FileDigest:
    """Size and checksum of a file when it was written."""

    size_bytes: int
    checksum: str

    @classmethod
    def of(cls, content: bytes) -> "FileDigest":
        """The digest of a file with this content."""
        return cls(len(content), Checksum(content).hexdigest())

    @classmethod
    def of_file(cls, path: Path) -> "FileDigest":
        """The digest of an existing file, read in blocks."""
        checksum, size_bytes = Checksum(), 0
        block = memoryview(bytearray(_BLOCK_BYTES))
        with path.open("rb", buffering=0) as stream:
            while count := stream.readinto(block):
                checksum.update(block[:count])
                size_bytes += count
        return cls(size_bytes, checksum.hexdigest())


def read_tokenizer_files(folder: Path | None) -> dict[str, bytes]:
    """Name -> content of each tokenizer file in ``folder``; nothing if there is no folder."""
    if folder is None:
        return {}
    files = {name: folder / name for name in TOKENIZER_FILES}
    return {name: file.read_bytes() for name, file in files.items() if file.is_file()}


def write_files(folder: Path, files: Mapping[str, bytes]) -> dict[str, FileDigest]:
    """Write small files, name -> content, into ``folder``; return the digest of each."""
    for name, content in files.items():
        write_file(folder / name, methodcaller("write", content))
    return {name: FileDigest.of(content) for name, content in files.items()}


def write_manifest(folder: Path, files: Mapping[str, FileDigest]) -> None:
    """Write the manifest of ``folder``; ``files`` has the name and digest of every other file."""
    digests = {name: asdict(files[name]) for name in sorted(files)}
    write_sealed(folder / MANIFEST, {"format": _FORMAT, "files": digests})


def read_manifest(folder: Path) -> dict[str, FileDigest]:
    """Name -> digest of every other file of the checkpoint in ``folder``.

    Raises CheckpointError if the manifest is missing, damaged, or of another version.
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
            f"{MANIFEST} has format {facts.get('format')!r}, but this version reads {_FORMAT}; "
            "use the version of megaspeed that wrote it"
        )
    try:
        return {name: _digest(name, digest) for name, digest in facts["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{MANIFEST} does not contain names, sizes and checksums of files"
        ) from error


def file_problems(folder: Path, files: Mapping[str, FileDigest]) -> dict[str, str]:
    """Name -> problem of each file that is not as it was written. Reads every byte of ``files``."""
    problems = size_problems(folder, files)
    for name in [name for name in files if name not in problems]:
        try:
            found = FileDigest.of_file(folder / name)
        except OSError as error:
            problems[name] = f"{name} cannot be read ({error.strerror})"
            continue
        if found != files[name]:
            problems[name] = (
                f"{name} has changed since it was written: checksum {found.checksum}, not "
                f"{files[name].checksum}"
            )
    return problems


def size_problems(folder: Path, files: Mapping[str, FileDigest]) -> dict[str, str]:
    """Name -> problem of each file that is missing or has another size. Reads no file."""
    problems = ((name, _size_problem(folder / name, files[name].size_bytes)) for name in files)
    return {name: f"{name} {problem}" for name, problem in problems if problem is not None}


def _size_problem(path: Path, size_bytes: int) -> str | None:
    problem = file_problem(path)
    if problem is None and (found_bytes := path.stat().st_size) != size_bytes:
        return f"has {found_bytes:,} bytes, but {size_bytes:,} were written"
    return problem


def _digest(name: str, facts: Any) -> FileDigest:
    digest = FileDigest(**facts)
    if Path(name).name != name or (type(digest.size_bytes), type(digest.checksum)) != (int, str):
        raise ValueError(f"{name} is not the name of a file in the folder, or has no valid digest")
    return digest

"""The folder of a run's checkpoints, and the files of each. A name states how far a save is.

    step-00000100.writing     begin      being written, or the remains of a killed save
            |                 commit     flushed to the disk, then renamed in one step
    step-00000100             a checkpoint
            |                 prune      only after a newer checkpoint has its name
    step-00000100.deleting    being deleted, or the remains of a killed removal

A process may be killed at any point. A folder with the name of a checkpoint was complete when it
got this name. The manifest has the size and the checksum of every other file, and is written last:

    manifest.json    {"format": 1, "files": {"__0_0.distcp": {"size_bytes": ..., "checksum": ...},
                                             ".metadata": ..., "run_state.json": ...}}
"""

import contextlib
import hashlib
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.files.durable import TEMPORARY, flush_folder, write_bytes
from megaspeed.files.json_values import unsealed, write_sealed
from megaspeed.files.paths import file_problem, read_file

CHECKPOINTS, METRICS = "checkpoints", "metrics.jsonl"
"""The folder of checkpoints and the file of losses in a run's folder."""

_DELETING = ".deleting"
_STEP = re.compile(r"step-([0-9]{8,})")

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


def checkpoint_name(step: int) -> str:
    """The name of the folder of a step's checkpoint.

    >>> checkpoint_name(100)
    'step-00000100'
    """
    return f"step-{step:08d}"


def step_named(name: str) -> int | None:
    """The step in a checkpoint's name; None if it is not such a name.

    >>> step_named("step-00000100"), step_named("step-00000100.writing"), step_named("step-7")
    (100, None, None)
    """
    match = _STEP.fullmatch(name)
    if match is None or checkpoint_name(int(match[1])) != name:
        return None
    return int(match[1])


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints of one run. One process changes them; any number of processes may read them.

    Links to folders count as checkpoints, because a user may move one to another disk. Files with
    such names are ignored.
    """

    root: Path

    def path(self, step: int) -> Path:
        return self.root / checkpoint_name(step)

    def begin(self, step: int) -> Path:
        """An empty folder for the save of ``step``. Removes the remains of an earlier attempt."""
        self.root.mkdir(parents=True, exist_ok=True)
        flush_folder(self.root.parent)  # else a loss of power may remove the new folder's name
        writing = self.root / (checkpoint_name(step) + TEMPORARY)
        _remove(writing)
        _remove(self.root / (checkpoint_name(step) + _DELETING))
        writing.mkdir()
        return writing

    def commit(self, writing: Path) -> Path:
        """Rename a save to its final name, and return it. All its files must be flushed.

        Replaces an older checkpoint of the same step. Raises OSError if it cannot be renamed.
        """
        checkpoint = writing.with_name(writing.name.removesuffix(TEMPORARY))
        flush_folder(writing)
        replaced = _set_aside(checkpoint)  # a folder cannot be renamed onto one that has files
        try:
            writing.rename(checkpoint)
        except OSError:
            if replaced is not None:
                replaced.rename(checkpoint)
            raise
        flush_folder(self.root)
        if replaced is not None:
            discard(replaced)  # only now, because the new name is on the disk
        return checkpoint

    def newest_first(self) -> list[Path]:
        """All checkpoints, judged by name only; the highest step first."""
        steps = {folder: step_named(folder.name) for folder in self._folders()}
        found = [(step, folder) for folder, step in steps.items() if step is not None]
        return [folder for _, folder in sorted(found, reverse=True)]

    def prune(self, newest: Path, keep_last: int, keep_every: int = 0) -> list[Path]:
        """Keep ``keep_last`` checkpoints, ``newest`` and those before it, and all milestones.

        The step of a milestone is a multiple of ``keep_every``. Remove other checkpoints before
        ``newest`` and return them. If one cannot be removed, it stays until the next call. Those
        of later steps are neither counted nor removed: the run has skipped them because they were
        not complete.
        """
        assert keep_last >= 1, "the checkpoint just written would be removed"
        checkpoints = self.newest_first()
        removed = []
        for checkpoint in checkpoints[checkpoints.index(newest) + keep_last :]:
            if keep_every > 0 and (step_named(checkpoint.name) or 0) % keep_every == 0:
                continue
            with contextlib.suppress(OSError):
                # A killed removal must not leave a part of a folder with the name of a checkpoint.
                aside = _set_aside(checkpoint)
                removed.append(checkpoint)
                if aside is not None:
                    _remove(aside)
        return removed

    def leftovers(self) -> list[Path]:
        """The remains of killed saves and removals, and a save that is in progress."""
        return sorted(
            folder
            for folder in self._folders()
            if folder.suffix in (TEMPORARY, _DELETING) and step_named(folder.stem) is not None
        )

    def clear_leftovers(self) -> list[Path]:
        """Remove the remains of killed saves and removals. No save may be in progress.

        Call it before ``newest_first``, because it also renames a complete save whose process was
        killed before the rename. Returns the removed paths.
        """
        for writing in self.leftovers():
            checkpoint = writing.with_name(writing.stem)
            if writing.suffix == TEMPORARY and not checkpoint.exists() and _is_complete(writing):
                writing.rename(checkpoint)
                flush_folder(self.root)
        removed = self.leftovers()
        for leftover in removed:
            discard(leftover)
        return removed

    def remains(self) -> list[str]:
        """Names that look like those of saves, for the error message if there is no checkpoint."""
        if self.root.is_symlink() and not self.root.exists():
            return [str(self.root)]
        if not self.root.is_dir():
            return []
        return sorted(path.name for path in self.root.iterdir() if path.name.startswith("step-"))

    def _folders(self) -> list[Path]:
        if not self.root.is_dir():
            return []
        return [path for path in self.root.iterdir() if path.is_dir()]


def locate(path: Path) -> list[Path]:
    """The checkpoints at a path that a user names, newest first, complete or not.

    Raises CheckpointError if it is not a checkpoint, a folder of checkpoints or a run folder.
    """
    try:
        return [path] if _is_checkpoint(path) else _folder_of_checkpoints(path).newest_first()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error


def _is_checkpoint(path: Path) -> bool:
    """Whether ``path`` is one checkpoint, complete or not. It may have been renamed."""
    if not path.is_dir():
        return False
    return (path / MANIFEST).is_file() or step_named(path.resolve().name) is not None


def _folder_of_checkpoints(path: Path) -> CheckpointFolder:
    """The folder of checkpoints at ``path``, or of the run in ``path``.

    Raises CheckpointError if there is none.
    """
    here, inner = CheckpointFolder(path), CheckpointFolder(path / CHECKPOINTS)
    if inner.root.is_dir() and not here.newest_first():
        return inner
    if here.newest_first() or here.leftovers() or path.resolve().name == CHECKPOINTS:
        return here
    what = file_problem(path) or "is a file"
    if path.is_dir():
        what = f"has no {MANIFEST}, no step-... folder and no folder {CHECKPOINTS}"
    raise CheckpointError(
        f"{path} must be a checkpoint, a folder of checkpoints or the folder of a run, but it "
        f"{what}; name another"
    )


def discard(path: Path) -> None:
    """Remove a save that failed or was replaced. What cannot be removed now is a leftover."""
    # A partial removal does no harm, because the name is not that of a checkpoint.
    with contextlib.suppress(OSError):
        _remove(path)


def _remove(path: Path) -> None:
    """Remove a file, a folder or a link, but not what a link points to."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    elif path.exists():
        shutil.rmtree(path)


def _set_aside(checkpoint: Path) -> Path | None:
    """Rename what exists at a checkpoint's path; return None if nothing exists there."""
    if not checkpoint.exists() and not checkpoint.is_symlink():
        return None
    aside = checkpoint.with_name(checkpoint.name + _DELETING)
    _remove(aside)
    checkpoint.rename(aside)
    return aside


def _is_complete(writing: Path) -> bool:
    """Whether only the rename of a save is missing. Its manifest is written last."""
    try:
        return not size_problems(writing, read_manifest(writing))
    except CheckpointError:
        return False


Checksum = xxhash.xxh3_128
"""Finds accidental damage, at the speed of memory. Does not protect against deliberate changes."""


@dataclass(frozen=True)
class FileDigest:
    """Size and checksum of a file when it was written."""

    size_bytes: int
    checksum: str

    @classmethod
    def of(cls, content: bytes) -> "FileDigest":
        return cls(len(content), Checksum(content).hexdigest())

    @classmethod
    def of_file(cls, path: Path) -> "FileDigest":
        """The digest of an existing file, read in blocks."""
        with path.open("rb", buffering=0) as stream:
            checksum = hashlib.file_digest(stream, Checksum)
            return cls(stream.tell(), checksum.hexdigest())


def read_tokenizer_files(folder: Path | None) -> dict[str, bytes]:
    """Name -> content of each tokenizer file in ``folder``; nothing if there is no folder."""
    if folder is None:
        return {}
    files = {name: folder / name for name in TOKENIZER_FILES}
    return {name: file.read_bytes() for name, file in files.items() if file.is_file()}


def write_files(folder: Path, files: Mapping[str, bytes]) -> dict[str, FileDigest]:
    """Write small files, name -> content, into ``folder``; return the digest of each."""
    for name, content in files.items():
        write_bytes(folder / name, content)
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

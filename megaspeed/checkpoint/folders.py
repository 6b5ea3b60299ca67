"""The folder of a run's checkpoints. The name of each folder in it states how far a save is.

    step-00000100.writing     begin      being written, or the remains of a killed save
            |                 commit     flushed to the disk, then renamed in one step
    step-00000100             a checkpoint; ``latest`` contains the name of the newest one
            |                 prune      only after a newer checkpoint has its name
    step-00000100.deleting    being deleted, or the remains of a killed removal

A process may be killed at any point. A folder with the name of a checkpoint was complete when it
got this name.
"""

import contextlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.manifest import MANIFEST, read_manifest, size_problems
from megaspeed.files.durable import TEMPORARY, flush_folder, write_file
from megaspeed.files.paths import free_bytes
from megaspeed.files.reading import read_file

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run's folder."""

LATEST = "latest"
"""The file that contains the name of the newest checkpoint, for people and scripts."""

_DELETING = ".deleting"
_STEP = re.compile(r"step-([0-9]{8,})")


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
        """The path of the checkpoint of ``step``."""
        return self.root / checkpoint_name(step)

    def begin(self, step: int) -> Path:
        """An empty folder for the save of ``step``. Removes the remains of an earlier attempt."""
        self.root.mkdir(parents=True, exist_ok=True)
        flush_folder(self.root.parent)
        writing = self.root / (checkpoint_name(step) + TEMPORARY)
        _remove(writing)
        _remove(self.root / (checkpoint_name(step) + _DELETING))
        writing.mkdir()
        return writing

    def commit(self, writing: Path) -> Path:
        """Rename a save to its final name. All its files must be written and flushed.

        Replaces an older checkpoint of the same step.

        Returns:
            The checkpoint.

        Raises:
            OSError: the save could not be renamed.
        """
        checkpoint = _without(TEMPORARY, writing)
        flush_folder(writing)
        replaced = self._set_aside(checkpoint)
        try:
            writing.rename(checkpoint)
        except OSError:
            if replaced is not None:
                replaced.rename(checkpoint)
            raise
        flush_folder(self.root)
        # The checkpoint exists, even if the disk has no room for the file with its name.
        with contextlib.suppress(OSError):
            self.point_latest_to(checkpoint)
        if replaced is not None:
            _remove_if_possible(replaced)
        return checkpoint

    def point_latest_to(self, checkpoint: Path) -> None:
        """Write the name of a checkpoint into ``latest``."""
        write_file(self.root / LATEST, lambda file: file.write(f"{checkpoint.name}\n".encode()))
        flush_folder(self.root)

    def discard(self, writing: Path) -> None:
        """Remove a failed save. What cannot be removed now is left for ``clear_leftovers``."""
        _remove_if_possible(writing)

    def newest_first(self) -> list[Path]:
        """All checkpoints, judged by name only; the highest step first."""
        steps = {folder: step_named(folder.name) for folder in self._folders()}
        found = [(step, folder) for folder, step in steps.items() if step is not None]
        return [folder for _, folder in sorted(found, reverse=True)]

    def prune(self, keep_last: int) -> list[Path]:
        """Keep ``keep_last`` checkpoints: the one named in ``latest`` and those before it.

        Remove older checkpoints and return them. A checkpoint that cannot be removed stays until
        the next call. Checkpoints of later steps than ``latest`` are neither counted nor removed:
        the run has skipped them because they were not complete.
        """
        assert keep_last >= 1, "the checkpoint just written would be removed"
        latest = self._latest()
        checkpoints = self.newest_first()
        if latest in checkpoints:
            checkpoints = checkpoints[checkpoints.index(latest) :]
        removed = []
        for checkpoint in checkpoints[keep_last:]:
            with contextlib.suppress(OSError):
                aside = self._set_aside(checkpoint)
                removed.append(checkpoint)
                if aside is not None:
                    _remove(aside)
        return removed

    def leftovers(self) -> list[Path]:
        """The remains of killed saves and removals, and a save that is in progress."""
        folders = (path for path in self._folders() if is_leftover(path.name))
        pointer = self.root / (LATEST + TEMPORARY)
        return sorted([*folders, *([pointer] if pointer.is_file() else [])])

    def clear_leftovers(self) -> list[Path]:
        """Remove the remains of killed saves and removals. No save may be in progress.

        Call it before ``newest_first``, because it also renames a complete save whose process was
        killed before the rename. Returns the removed paths.
        """
        for writing in self.leftovers():
            if writing.name.endswith(TEMPORARY) and self._is_complete_save(writing):
                writing.rename(_without(TEMPORARY, writing))
                flush_folder(self.root)
        removed = self.leftovers()
        for leftover in removed:
            _remove_if_possible(leftover)
        return removed

    def remains(self) -> list[str]:
        """Names that look like those of saves, for the error message if there is no checkpoint."""
        if self.root.is_symlink() and not self.root.exists():
            return [str(self.root)]
        if not self.root.is_dir():
            return []
        names = (path.name for path in self.root.iterdir())
        return sorted(name for name in names if name == LATEST or name.startswith("step-"))

    def free_bytes(self) -> int:
        """Free space of the file system, in bytes."""
        return free_bytes(self.root)

    def _folders(self) -> list[Path]:
        if not self.root.is_dir():
            return []
        return [path for path in self.root.iterdir() if path.is_dir()]

    def _latest(self) -> Path | None:
        try:
            return self.root / read_file(self.root / LATEST).decode("utf-8").strip()
        except (OSError, ValueError):
            return None

    def _set_aside(self, checkpoint: Path) -> Path | None:
        """Rename what exists at a checkpoint's path; return None if nothing exists there."""
        if not checkpoint.exists() and not checkpoint.is_symlink():
            return None
        aside = checkpoint.with_name(checkpoint.name + _DELETING)
        _remove(aside)
        checkpoint.rename(aside)
        return aside

    def _is_complete_save(self, writing: Path) -> bool:
        """Whether only the rename of a save is missing. Its manifest is written last."""
        if _without(TEMPORARY, writing).exists():
            return False
        try:
            return not size_problems(writing, read_manifest(writing))
        except CheckpointError:
            return False


def locate(path: Path) -> list[Path]:
    """The checkpoints at a path that a user names, newest first, complete or not.

    Returns:
        The checkpoints; an empty list if a folder of checkpoints has none.

    Raises:
        CheckpointError: ``path`` is not a checkpoint, a folder of checkpoints or a run folder.
    """
    try:
        return [path] if is_checkpoint(path) else folder_of_checkpoints(path).newest_first()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` is one checkpoint, complete or not. It may have been renamed."""
    if not path.is_dir():
        return False
    return (path / MANIFEST).is_file() or step_named(path.resolve().name) is not None


def folder_of_checkpoints(path: Path) -> CheckpointFolder:
    """The folder of checkpoints at ``path``, or of the run in ``path``.

    Raises CheckpointError if there is none.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; name the folder of a checkpoint or of a run")
    inner = CheckpointFolder(path / CHECKPOINTS)
    here = CheckpointFolder(path)
    if here.newest_first() or (here.leftovers() and not inner.root.is_dir()):
        return here
    if inner.root.is_dir():
        return inner
    if path.resolve().name == CHECKPOINTS:
        return here
    raise CheckpointError(
        f"{path} must be a checkpoint, a folder of checkpoints or the folder of a run, but it has "
        f"no {MANIFEST}, no step-... folder and no {CHECKPOINTS}/; name another folder"
    )


def is_leftover(name: str) -> bool:
    """Whether this is the name of a save or a removal that did not end."""
    stem = name.removesuffix(TEMPORARY).removesuffix(_DELETING)
    return stem != name and step_named(stem) is not None


def _without(suffix: str, path: Path) -> Path:
    assert path.name.endswith(suffix), f"{path} is not a save in progress"
    return path.with_name(path.name.removesuffix(suffix))


def _remove(path: Path) -> None:
    """Remove a file, a folder or a link, but not what a link points to."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    elif path.exists():
        shutil.rmtree(path)


def _remove_if_possible(path: Path) -> None:
    # A partial removal does no harm, because the name is not that of a checkpoint.
    with contextlib.suppress(OSError):
        _remove(path)

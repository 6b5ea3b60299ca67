"""Where checkpoints are, and the names they go through: a name says how far a save has come.

    step-00000100.writing     begin      being written, or left by a save that died
            |                 commit     flushed, then renamed in one stroke
    step-00000100             a checkpoint; ``latest`` names the newest one
            |                 prune      only after a newer one has its name
    step-00000100.deleting    on its way out, or left by a removal that died

A process may be killed at any point: what bears a checkpoint's name was whole when it got it.
"""

import contextlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from megaspeed.checkpoint.errors import CheckpointError
from megaspeed.checkpoint.manifest import MANIFEST, read_manifest, size_problems
from megaspeed.files.durable import TEMPORARY, flush_folder, write_file
from megaspeed.files.paths import nearest_existing
from megaspeed.files.reading import read_file

CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run's folder."""

LATEST = "latest"
"""The file that holds the name of the newest checkpoint, for people and scripts."""

_DELETING = ".deleting"
_STEP = re.compile(r"step-([0-9]{8,})")


def checkpoint_name(step: int) -> str:
    """The folder's name of the checkpoint of a step.

    >>> checkpoint_name(100)
    'step-00000100'
    """
    return f"step-{step:08d}"


def step_named(name: str) -> int | None:
    """The step of a checkpoint's name; None where it is not one.

    >>> step_named("step-00000100"), step_named("step-00000100.writing"), step_named("step-7")
    (100, None, None)
    """
    match = _STEP.fullmatch(name)
    if match is None or checkpoint_name(int(match[1])) != name:
        return None
    return int(match[1])


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints of one run. One process changes them; any number may look.

    Folders with such names count, and links to folders: where a disk was full, one was moved. Files
    with such names are passed by.
    """

    root: Path

    def path(self, step: int) -> Path:
        """Where the checkpoint of ``step`` is, once it is whole."""
        return self.root / checkpoint_name(step)

    def begin(self, step: int) -> Path:
        """An empty folder for the save of ``step``; what an earlier try left of it is removed."""
        self.root.mkdir(parents=True, exist_ok=True)
        flush_folder(self.root.parent)
        writing = self.root / (checkpoint_name(step) + TEMPORARY)
        _remove(writing)
        _remove(self.root / (checkpoint_name(step) + _DELETING))
        writing.mkdir()
        return writing

    def commit(self, writing: Path) -> Path:
        """Gives a save its name, once all its files were written and flushed.

        An older checkpoint of the same step goes.

        Returns:
            The checkpoint.

        Raises:
            OSError: it has not got its name.
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
        # The checkpoint is there, whether or not there is room for its name in another file.
        with contextlib.suppress(OSError):
            self.point_latest_to(checkpoint)
        if replaced is not None:
            _remove_if_possible(replaced)
        return checkpoint

    def point_latest_to(self, checkpoint: Path) -> None:
        """Lets ``latest`` name one of the checkpoints here."""
        write_file(self.root / LATEST, lambda file: file.write(f"{checkpoint.name}\n".encode()))
        flush_folder(self.root)

    def discard(self, writing: Path) -> None:
        """Removes a save that failed; what cannot be removed is left to `clear_leftovers`."""
        _remove_if_possible(writing)

    def newest_first(self) -> list[Path]:
        """Every checkpoint by its name, that of the highest step first."""
        steps = {folder: step_named(folder.name) for folder in self._folders()}
        found = [(step, folder) for folder, step in steps.items() if step is not None]
        return [folder for _, folder in sorted(found, reverse=True)]

    def prune(self, keep_last: int) -> list[Path]:
        """Removes all but the newest ``keep_last`` (at least 1) up to the one `latest` names.

        Those of higher steps were there before the newest save: the run went back behind them,
        because they were not whole. They do not count and stay as they are.

        Returns:
            The checkpoints that went; one that cannot be removed stays, for the next time.
        """
        assert keep_last >= 1, "the checkpoint just written would go"
        latest = self._latest()
        checkpoints = self.newest_first()
        if latest in checkpoints:
            checkpoints = checkpoints[checkpoints.index(latest) :]
        went = []
        for checkpoint in checkpoints[keep_last:]:
            with contextlib.suppress(OSError):
                aside = self._set_aside(checkpoint)
                went.append(checkpoint)
                if aside is not None:
                    _remove(aside)
        return went

    def leftovers(self) -> list[Path]:
        """What saves and removals that died have left, and one that is under way."""
        folders = (path for path in self._folders() if is_leftover(path.name))
        pointer = self.root / (LATEST + TEMPORARY)
        return sorted([*folders, *([pointer] if pointer.is_file() else [])])

    def clear_leftovers(self) -> list[Path]:
        """Removes what saves and removals that died have left; while none is under way.

        To be called before `newest_first`, because a save that was whole and died before it got
        its name gets it here.

        Returns:
            What went.
        """
        for writing in self.leftovers():
            if writing.name.endswith(TEMPORARY) and self._lacks_only_its_name(writing):
                writing.rename(_without(TEMPORARY, writing))
                flush_folder(self.root)
        went = self.leftovers()
        for leftover in went:
            _remove_if_possible(leftover)
        return went

    def remains(self) -> list[str]:
        """Names that speak of checkpoints, for where there is none that could be taken."""
        if self.root.is_symlink() and not self.root.exists():
            return [str(self.root)]
        if not self.root.is_dir():
            return []
        names = (path.name for path in self.root.iterdir())
        return sorted(name for name in names if name == LATEST or name.startswith("step-"))

    def free_bytes(self) -> int:
        """Room for files here, in bytes."""
        return shutil.disk_usage(nearest_existing(self.root)).free

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
        """Takes the name from what has it; None where nothing has."""
        if not checkpoint.exists() and not checkpoint.is_symlink():
            return None
        aside = checkpoint.with_name(checkpoint.name + _DELETING)
        _remove(aside)
        checkpoint.rename(aside)
        return aside

    def _lacks_only_its_name(self, writing: Path) -> bool:
        """The manifest is written last, when every other file is on the disk."""
        if _without(TEMPORARY, writing).exists():
            return False
        try:
            return not size_problems(writing, read_manifest(writing))
        except CheckpointError:
            return False


def locate(path: Path) -> list[Path]:
    """The checkpoints, newest first, of what a user names.

    Args:
        path: a checkpoint, a folder of checkpoints, or the folder of a run.

    Returns:
        Those that bear the name, whole or not; empty where the folder is one for checkpoints and
        has none.

    Raises:
        CheckpointError: it is none of the three.
    """
    try:
        return [path] if is_checkpoint(path) else folder_of_checkpoints(path).newest_first()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be looked into ({error.strerror})") from error


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` is one checkpoint, whole or not, whatever it was renamed to."""
    if not path.is_dir():
        return False
    return (path / MANIFEST).is_file() or step_named(path.resolve().name) is not None


def folder_of_checkpoints(path: Path) -> CheckpointFolder:
    """The folder of checkpoints that ``path`` is, or that the run of folder ``path`` has.

    Raises:
        CheckpointError: there is none.
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
        f"{path} is neither a checkpoint nor a folder of them nor the folder of a run: it has no "
        f"{MANIFEST}, no step-... and no {CHECKPOINTS}/; name one of the three"
    )


def is_leftover(name: str) -> bool:
    """Whether a folder of this name is a save or a removal that did not end."""
    stem = name.removesuffix(TEMPORARY).removesuffix(_DELETING)
    return stem != name and step_named(stem) is not None


def _without(suffix: str, path: Path) -> Path:
    assert path.name.endswith(suffix), f"{path} is not a save under way"
    return path.with_name(path.name.removesuffix(suffix))


def _remove(path: Path) -> None:
    """What is there goes, of whatever kind; a symbolic link goes and not what it points to."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    elif path.exists():
        shutil.rmtree(path)


def _remove_if_possible(path: Path) -> None:
    # A removal in part is no harm: the name already says that it is no checkpoint.
    with contextlib.suppress(OSError):
        _remove(path)

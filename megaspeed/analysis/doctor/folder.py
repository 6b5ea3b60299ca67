"""Checks that all ranks share training.run_dir: all read rank 0's file, and rank 0 reads theirs.

    rank 0       writes .doctor-<random>                            looks for the others' files
    every rank                   reads it, writes .doctor-<random>-<rank>

All files and folders that the check creates are removed.
"""

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megaspeed.analysis.doctor.deadline import within
from megaspeed.analysis.doctor.messages import Messages

# A network file system may show a new file to other nodes a little later.
_SECONDS_TO_BE_SEEN = 5.0
_POLL_SECONDS = 0.05


class SharedFolderCheck:
    """The steps of one rank, in order: `leave` (rank 0), `look`, `judge` (rank 0)."""

    def __init__(self, run_dir: Path, messages: Messages, seconds: float) -> None:
        self._run_dir = run_dir
        self._messages = messages
        self._seconds = seconds
        self._made: list[Path] = []
        self._name = ""

    def leave(self) -> None:
        """Writes the token file and sends its name to all ranks."""
        self._name = f".doctor-{secrets.token_hex(8)}"
        problem = _tried(self._seconds, self._write_token)
        self._messages.tell("token", {"name": self._name, "problem": problem})

    def look(self) -> None:
        """Reads the token, leaves this rank's mark, and reports what went wrong to rank 0."""
        token = self._messages.hear("token", self._seconds)
        self._name = token["name"]
        problem = token["problem"] or _tried(
            self._seconds + _SECONDS_TO_BE_SEEN, self._read_token_and_mark
        )
        self._messages.put("folder", {"problem": problem})

    def judge(self) -> dict[int, str]:
        """What is wrong with the folder, by rank. Removes all files of the check."""
        answers = self._messages.everyones("folder", self._seconds + 2 * _SECONDS_TO_BE_SEEN)
        problems = {
            rank: "did not answer when it was asked for the file"
            if answer is None
            else answer["problem"]
            for rank, answer in enumerate(answers)
            if answer is None or answer["problem"] is not None
        }
        marks = {
            rank: self._mark(rank)
            for rank in range(self._messages.world_size)
            if rank not in problems
        }
        _tried(self._seconds + _SECONDS_TO_BE_SEEN, lambda: _wait_for(*marks.values()))
        unseen = [rank for rank, mark in marks.items() if _tried(1.0, mark.stat) is not None]
        _tried(self._seconds, self._clean)
        text = f"rank 0 does not see what it writes to {self._run_dir}: the folder is not shared"
        return problems | dict.fromkeys(unseen, text)

    def _write_token(self) -> None:
        above = (self._run_dir.absolute(), *self._run_dir.absolute().parents)
        self._made = [folder for folder in above if not folder.exists()]
        self._run_dir.mkdir(parents=True, exist_ok=True)
        (self._run_dir / self._name).write_text(self._name)

    def _read_token_and_mark(self) -> None:
        token = self._run_dir / self._name
        _wait_for(token)
        if token.read_text() != self._name:
            raise OSError(f"{token} does not contain what rank 0 wrote there")
        self._mark(self._messages.rank).touch()

    def _mark(self, rank: int) -> Path:
        return self._run_dir / f"{self._name}-{rank}"

    def _clean(self) -> None:
        for file in self._run_dir.glob(f"{self._name}*"):
            file.unlink(missing_ok=True)
        with suppress(OSError):
            for folder in self._made:
                folder.rmdir()


def _wait_for(*files: Path) -> None:
    deadline = time.monotonic() + _SECONDS_TO_BE_SEEN
    for file in files:
        while not file.exists():
            if time.monotonic() > deadline:
                raise OSError(f"{file} of rank 0 is not visible here: the folder is not shared")
            time.sleep(_POLL_SECONDS)


def _tried(seconds: float, step: Callable[[], object]) -> str | None:
    """What went wrong; None if nothing did."""
    try:
        within(seconds, step)
    except TimeoutError:
        return f"the file system of training.run_dir did not answer within {seconds:g} s"
    except OSError as error:
        return str(error)
    return None

"""Other processes of this host: the launchers of this one, and how to wait until one ends.

    deepspeed (runner)  ->  python -m deepspeed.launcher.launch  ->  this rank
    torchrun, megaspeed train                                    ->  this rank
    any of them, or none  ->  supervisor (training/restarts.py)  ->  this rank

DeepSpeed's runner does not forward signals to a launcher on the same host. If the runner is
stopped, only the runner ends, and this process continues without it.
"""

import os
import select
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

SUPERVISOR = "MEGASPEED_SUPERVISOR"
"""The variable with the process number of the supervisor that has started this process."""

_PROGRAMS = {"deepspeed", "torchrun", "megaspeed"}
_MODULES = {
    "deepspeed.launcher.launch",
    "deepspeed.launcher.runner",
    "megaspeed.cli",
    "torch.distributed.run",
    "torch.distributed.launch",
}


def launcher_processes() -> list[int]:
    """Process numbers, from the parent upwards, as far as they are launchers."""
    found: list[int] = []
    process = os.getppid()
    try:
        while process > 0 and (_supervises(process) or _is_launcher(_command_of(process))):
            found.append(process)
            process = _parent_of(process)
    except OSError:  # the process has ended, or this user may not read its files
        pass
    return found


def _supervises(process: int) -> bool:
    return os.environ.get(SUPERVISOR) == str(process)


def _command_of(process: int) -> list[str]:
    words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    return [os.fsdecode(word) for word in words if word]


def _parent_of(process: int) -> int:
    # The state and the parent follow the program's name, which is in brackets and may contain any
    # characters.
    return int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])


def _is_launcher(command: list[str]) -> bool:
    """Whether a command line is a launcher's, such as ``python -m torch.distributed.run ...``."""
    program = [Path(word).name for word in command[:3] if not word.startswith("-")]
    # The interpreter and its script, or the script alone; never the argument of a shell's -c.
    if any(name in _PROGRAMS for name in program[:2]):
        return True
    return any(flag == "-m" and module in _MODULES for flag, module in pairwise(command))


class ProcessesAndPipe:
    """Waits until a process ends, or until something is written to a pipe.

    The processes need not be children of this one. On Linux a descriptor reports their end at
    once. On other systems they are polled.

    Args:
        processes: their numbers.
        pipe: the end to read from.
    """

    def __init__(self, processes: Iterable[int], pipe: int) -> None:
        self._pipe = pipe
        self._poller = select.poll()
        self._poller.register(pipe, select.POLLIN)
        self._descriptors: dict[int, int] = {}
        self._looked_for: set[int] = set()
        for process in processes:
            try:
                descriptor = os.pidfd_open(process)
            except (OSError, AttributeError):  # it has ended, or the system has no such call
                self._looked_for.add(process)
            else:
                self._descriptors[descriptor] = process
                self._poller.register(descriptor, select.POLLIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    def wait(self, seconds: float) -> tuple[list[int], bytes]:
        """The processes that have ended, each once, and what was written to the pipe; both may be
        empty after ``seconds``.
        """
        told = b""
        ended = [process for process in self._looked_for if not _lives(process)]
        self._looked_for -= set(ended)
        for descriptor, _ in self._poller.poll(0 if ended else seconds * 1000):
            if descriptor == self._pipe:
                told = os.read(self._pipe, 64)
            else:
                self._poller.unregister(descriptor)
                ended.append(self._descriptors[descriptor])
        return ended, told


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

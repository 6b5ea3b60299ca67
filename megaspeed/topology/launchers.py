"""The launcher processes above this one: without them nobody waits for this process any more.

    deepspeed (runner)  ->  python -m deepspeed.launcher.launch  ->  this rank
    torchrun                                                     ->  this rank
    any of them, or none  ->  supervisor (training/supervisor.py)  ->  this rank

DeepSpeed's runner hands no signal on to a launch on the same host: if it is told to end, only it
ends.
"""

import os
from itertools import pairwise
from pathlib import Path

SUPERVISOR = "MEGASPEED_SUPERVISOR"
"""The variable with the process number of the supervisor that has started this process."""

_PROGRAMS = {"deepspeed", "torchrun"}
_MODULES = {
    "deepspeed.launcher.launch",
    "deepspeed.launcher.runner",
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
    except OSError:  # it has ended, or this user may not look at it
        pass
    return found


def _supervises(process: int) -> bool:
    return os.environ.get(SUPERVISOR) == str(process)


def _command_of(process: int) -> list[str]:
    words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    return [os.fsdecode(word) for word in words if word]


def _parent_of(process: int) -> int:
    # After the program's name, which stands in brackets and may hold anything: state, parent.
    return int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])


def _is_launcher(command: list[str]) -> bool:
    """Of a command line such as ``python -u -m torch.distributed.run ...``."""
    program = [Path(word).name for word in command[:3] if not word.startswith("-")]
    # The interpreter and its script, or the script alone; never the argument of a shell's -c.
    if any(name in _PROGRAMS for name in program[:2]):
        return True
    return any(flag == "-m" and module in _MODULES for flag, module in pairwise(command))

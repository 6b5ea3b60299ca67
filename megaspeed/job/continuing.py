"""The command that continues a run which has ended before its last step."""

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from megaspeed.checkpoint.folders import step_named
from megaspeed.job.job import Job
from megaspeed.job.resume import Restarts
from megaspeed.job.run_folder import checkpoint_folder
from megaspeed.supervision.process_end import EXIT_DONE, EXIT_WRONG_INPUT, LAUNCHER_PROGRAMS

_STARTS_OVER = re.compile("\0--(fre[^\0]*|res[^\0=]*[\0=][^\0]*)")
"""``--fresh`` and ``--resume DIR``, also abbreviated, in words that are joined by null characters.
Without them, a run continues from the newest checkpoint in its folder."""


def command_line(launchers: Sequence[int]) -> list[str]:
    """Return the command line of the outermost launcher, or if there is none, of this process."""
    words = sys.orig_argv
    with suppress(psutil.Error):  # it has ended, and so will this process
        words = psutil.Process(launchers[-1]).cmdline() if launchers else words
    program = Path(words[1]).name if len(words) > 1 else ""
    if program in LAUNCHER_PROGRAMS:  # a script, after the interpreter that the system has added
        words = [program if shutil.which(program) == words[1] else words[1], *words[2:]]
    return words


def how_to_continue(job: Job, code: int, command: Sequence[str]) -> str | None:
    """Return a line about an ended run; None if it is complete, restarts or cannot continue.

    ``command`` is the command line that has started it.
    """
    checkpoints = checkpoint_folder(job.run).newest_first() if job.opened else []
    step = step_named(checkpoints[0].name) if checkpoints else None
    restarts = code != EXIT_DONE and Restarts(job.meeting).is_left
    if step is None or step >= job.run.steps or restarts or code == EXIT_WRONG_INPUT:
        return None
    launch = job.meeting.launch
    starts_all = bool(job.launchers) and launch.local_world_size == launch.world_size
    starts_all = starts_all or launch.source == "single process"  # not one node, or a rank of srun
    which = "" if starts_all else ", start all ranks again. This one was started with"
    words = _STARTS_OVER.sub("", "\0".join(command)).split("\0")
    return f"To continue{which}: {shlex.join(words)}"

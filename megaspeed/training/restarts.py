"""The information that an attempt of a launch has about earlier attempts.

    attempt 0    --fresh: step 0 ... 63, fails
    restart 1    auto: from the checkpoint of step 60 ... 61, fails for another reason
    restart 2    auto: from the checkpoint of step 60 ... 63, fails
    restart 3    auto: from the checkpoint of step 60 ... 63, fails
    restart 4    restarts 2 and 3 have failed after the same step: it ends at once

torchrun's agent or the supervisor of rank 0 counts the attempts. It also keeps the store in which
an attempt leaves information for the next one.
"""

import dataclasses
import os

import torch.distributed as dist

from megaspeed.config.resolve import Run
from megaspeed.topology.meeting import Meeting
from megaspeed.training.metrics import last_step
from megaspeed.training.resume import AUTO, ResumeOptions, restart_number
from megaspeed.training.run_folder import METRICS, checkpoint_folder

_OPENED, _REACHED, GIVEN_UP = "opened by attempt", "reached", "given up"


class NoProgress(RuntimeError):
    """The last two attempts failed at the same point, so another would fail there, too."""


class Restarts:
    """The earlier attempts, for the ranks of one attempt.

    Args:
        meeting: with the store that outlives the attempt, if there is one.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._store: dist.Store | None = meeting.between_attempts
        self.number = restart_number()
        self._limit = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
        self.opened = self.number > 0 and (self._store is None or self._store.check([_OPENED]))
        """Whether an earlier attempt has opened the run folder, so this one continues in it."""

    @property
    def given_up(self) -> bool:
        """Whether an earlier attempt has found that restarts do not help."""
        return self.number > 0 and self._store is not None and self._store.check([GIVEN_UP])

    def options(self, stated: ResumeOptions, run: Run) -> ResumeOptions:
        """The options of this attempt, which resumes from this launch's checkpoints, if any."""
        if self.opened and checkpoint_folder(run).newest_first():
            return dataclasses.replace(stated, source=AUTO, fresh=False)
        return stated

    def note_opened(self) -> None:
        """Store that this launch has opened the run folder."""
        if self._store is not None:
            self._store.set(_OPENED, str(self.number))

    def describe(self, step: int) -> list[str]:
        """A line for the console; none in the first attempt.

        Args:
            step: the step after which this attempt continues.
        """
        if not self.number:
            return []
        return [f"restart {self.number} of {self._limit}: the run continues after step {step}"]

    def problem(self, run: Run) -> str | None:
        """Why a restart does not help, if it does not; for rank 0, before it changes the folder."""
        if not self.number or self._store is None:
            return None
        opened = int(self._store.get(_OPENED)) if self.opened else -1
        where = None
        if opened == self.number - 1:
            step = str(last_step(run.run_dir / METRICS))
            if self._store.check([_REACHED]) and self._store.get(_REACHED).decode() == step:
                where = f"after step {step}"
            self._store.set(_REACHED, step)
        elif opened < self.number - 2:
            where = "before training began"
        if where is None:
            return None
        self._store.set(GIVEN_UP, "")
        return (
            f"two attempts in a row have failed {where}, so another restart would "
            "not help. The messages above and the ranks' log files state the cause. Fix it and "
            f"start the run again; it continues from the newest checkpoint of {run.run_dir}"
        )

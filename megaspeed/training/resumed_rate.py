"""Detects whether the learning rate jumps when a run resumes.

A schedule without ``total_num_steps`` ends with ``training.steps``. If a resumed run has more
steps, the schedule is stretched, and the rate of the next step differs from the saved schedule.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from megaspeed.checkpoint.run_state import RunState
from megaspeed.config.optimizer import OptimizerConfig
from megaspeed.config.resolve import Run
from megaspeed.config.scheduler import SchedulerConfig
from megaspeed.config.section import Section
from megaspeed.training.learning_rate import learning_rate

_RELATIVE_DIFFERENCE = 1e-9


class _Schedule(Section):
    """The sections of a configuration that determine the rate."""

    optimizer: OptimizerConfig
    scheduler: SchedulerConfig | None = None


def rate_change(saved: RunState, run: Run) -> str | None:
    """A warning with both rates of the next step and the settings that keep the saved schedule.

    Returns:
        None if the rates are equal, or if the checkpoint was imported.
    """
    if saved.imported_from is not None:
        return None
    try:
        before = _Schedule.model_validate(
            {name: saved.config[name] for name in _Schedule.model_fields if name in saved.config}
        )
    except ValidationError:  # saved by a version whose schedules this version cannot read
        return None
    now = _Schedule(optimizer=run.config.optimizer, scheduler=run.config.scheduler)
    taken = saved.progress.steps_taken
    # Both are resolved, so total_num_steps is set, and training.steps is not used.
    due, rate = (
        learning_rate(each.optimizer, each.scheduler, step=taken, steps=run.config.training.steps)
        for each in (before, now)
    )
    if math.isclose(due, rate, rel_tol=_RELATIVE_DIFFERENCE):
        return None
    return (
        f"the learning rate of step {saved.progress.step + 1} is {rate:.3e}, but the saved "
        f"schedule has {due:.3e}; {_mend(before, now)}"
    )


def _mend(before: _Schedule, now: _Schedule) -> str:
    """The differences, as ``--set`` takes them."""
    stated, current = _values(before), _values(now)
    back = [
        f"{key}={json.dumps(value)}" for key, value in stated.items() if current.get(key) != value
    ]
    if before.scheduler is None:
        away = ["scheduler=null"] if now.scheduler is not None else []
    else:
        away = [f"{key}=null" for key in current if key not in stated]
    return f"to keep the saved schedule, pass --set {' '.join([*back, *away])}"


def _values(config: _Schedule) -> Mapping[str, Any]:
    """The keys that determine the rate, in the form of the configuration."""
    values: dict[str, Any] = {"optimizer.params.lr": config.optimizer.params.lr}
    if config.scheduler is not None:
        values["scheduler.type"] = config.scheduler.type
        for name, value in config.scheduler.params.model_dump(mode="json").items():
            if value is not None:
                values[f"scheduler.params.{name}"] = value
    return values

"""Whether the learning rate continues where the saved run left it, or jumps.

A schedule without ``total_num_steps`` ends with ``training.steps``. If a resumed run has more
steps, the schedule is stretched, and the rate of the next step is not the one that was due.
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
    """A sentence with both rates of the next step and what keeps the saved one.

    Returns:
        None if the rates are equal, or no run saved the checkpoint.
    """
    if saved.imported_from is not None:
        return None
    try:
        before = _Schedule.model_validate(
            {name: saved.config[name] for name in _Schedule.model_fields if name in saved.config}
        )
    except ValidationError:  # of a version whose schedules this one does not read
        return None
    now = _Schedule(optimizer=run.config.optimizer, scheduler=run.config.scheduler)
    taken = saved.progress.steps_taken
    # Both are definite: no schedule takes its length from training.steps.
    due, rate = (
        learning_rate(each.optimizer, each.scheduler, step=taken, steps=run.config.training.steps)
        for each in (before, now)
    )
    if math.isclose(due, rate, rel_tol=_RELATIVE_DIFFERENCE):
        return None
    return (
        f"the learning rate of step {saved.progress.step + 1} was to be {due:.3e}, and is "
        f"{rate:.3e}; {_mend(before, now)}"
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
    """The keys that the rate follows from, as one states them."""
    values: dict[str, Any] = {"optimizer.params.lr": config.optimizer.params.lr}
    if config.scheduler is not None:
        values["scheduler.type"] = config.scheduler.type
        for name, value in config.scheduler.params.model_dump(mode="json").items():
            if value is not None:
                values[f"scheduler.params.{name}"] = value
    return values

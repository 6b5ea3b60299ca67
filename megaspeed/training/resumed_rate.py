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
from megaspeed.config.resolve import Run
from megaspeed.config.run import RunConfig
from megaspeed.training.learning_rate import learning_rate

_RELATIVE_DIFFERENCE = 1e-9
_KEYS = ("optimizer.params.lr", "scheduler")


def rate_change(saved: RunState, run: Run) -> str | None:
    """A sentence with both rates of the next step and what keeps the saved one.

    Returns:
        None if the rates are equal, or no run saved the checkpoint.
    """
    if saved.imported_from is not None:
        return None
    try:
        before = RunConfig.model_validate(
            {
                name: saved.config[name]
                for name in ("model", "data", "training", "optimizer", "scheduler")
                if name in saved.config
            }
        )
    except ValidationError:  # of a version whose keys this one does not read
        return None
    taken = saved.progress.steps_taken
    due, now = (
        learning_rate(config.optimizer, config.scheduler, step=taken, steps=config.training.steps)
        for config in (before, run.config)
    )
    if math.isclose(due, now, rel_tol=_RELATIVE_DIFFERENCE):
        return None
    return (
        f"the learning rate of step {saved.progress.step + 1} was to be {due:.3e}, and is "
        f"{now:.3e}; {_mend(before, run.config)}"
    )


def _mend(before: RunConfig, now: RunConfig) -> str:
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


def _values(config: RunConfig) -> Mapping[str, Any]:
    """The keys that the rate follows from, as one states them."""
    values: dict[str, Any] = {"optimizer.params.lr": config.optimizer.params.lr}
    if config.scheduler is not None:
        values["scheduler.type"] = config.scheduler.type
        for name, value in config.scheduler.params.model_dump(mode="json").items():
            if value is not None:
                values[f"scheduler.params.{name}"] = value
    return values

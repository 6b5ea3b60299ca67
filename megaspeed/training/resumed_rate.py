"""Detects whether the learning rate jumps when a run resumes.

A schedule without ``total_num_steps`` ends with ``training.steps``. If a resumed run has more
steps, the schedule is stretched, and the rate of the next step differs from the saved schedule.
"""

import json
import math
import shlex
from typing import Any

from pydantic import ValidationError

from megaspeed.checkpoint.run_state import RunState
from megaspeed.config.deepspeed_keys import OptimizerConfig
from megaspeed.config.resolve import Run
from megaspeed.config.rules import CONFIG_RULES
from megaspeed.config.scheduler import SchedulerConfig
from megaspeed.config.section import Section
from megaspeed.training.step_inputs import learning_rate

_RELATIVE_DIFFERENCE = 1e-9
_RATES = {
    "optimizer.params.lr",
    "scheduler",
    "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr",
}
"""The keys that ``training.lr_scaling`` multiplies, or that contain such a key."""


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
        f"schedule has {due:.3e}; {_mend(before, now, run)}"
    )


def _mend(before: _Schedule, now: _Schedule, run: Run) -> str:
    """The words of ``--set`` that give the saved rates again, quoted for a shell."""
    problems = CONFIG_RULES.violations(run.config.model_copy(update=dict(before)))
    if problems:
        return f"the saved schedule cannot be kept: {problems[0]}"
    # Each type has its own keys, so a scheduler of another type is replaced as a whole.
    whole = _type_of(before) != _type_of(now)
    saved, current = _values(before, whole), _values(now, whole)
    changed = {key for key, value in saved.items() if value != current.get(key)}
    words: list[str] = []
    if run.config.training.lr_scaling != "none" and changed & _RATES:
        # The saved rates are scaled already.
        words += ["training.lr_scaling=none", "training.base_batch_size=null"]
        changed |= saved.keys() & _RATES
    for key in (key for key in saved if key in changed):
        if whole and key == "scheduler" and current[key] is not None:
            words.append("scheduler=null")
        if saved[key] is not None:
            words.append(shlex.quote(f"{key}={json.dumps(saved[key])}"))
    return f"to keep the saved schedule, pass --set {' '.join(words)}"


def _type_of(config: _Schedule) -> str | None:
    return None if config.scheduler is None else config.scheduler.type


def _values(config: _Schedule, whole: bool) -> dict[str, Any]:
    """The keys that determine the rate; ``whole``: the scheduler is one of them."""
    scheduler = config.model_dump(mode="json", exclude_none=True).get("scheduler")
    values: dict[str, Any] = {"optimizer.params.lr": config.optimizer.params.lr}
    if whole:
        return {**values, "scheduler": scheduler}
    params = {} if scheduler is None else scheduler["params"]
    return values | {f"scheduler.params.{name}": value for name, value in params.items()}

"""The learning rate of every step is the one that DeepSpeed's scheduler of that name gives."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules
from pydantic import TypeAdapter

from megaspeed.config.optimizer import OptimizerConfig
from megaspeed.config.scheduler import SchedulerConfig
from megaspeed.training.learning_rate import learning_rate

STEPS = 40
OPTIMIZER = OptimizerConfig.model_validate({"type": "AdamW", "params": {"lr": 3e-4}})
TAKEN = [False] * STEPS


def deepspeed_rates(kind: str, params: dict[str, Any], skipped: Sequence[bool]) -> list[float]:
    """What DeepSpeed's engine would step with: skipped steps leave its scheduler where it is."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=OPTIMIZER.params.lr)
    scheduler = getattr(lr_schedules, kind)(optimizer, **params)
    rates = []
    for is_skipped in skipped:
        rates.append(optimizer.param_groups[0]["lr"])
        if not is_skipped:  # engine.py:3540-3545
            scheduler.step()
    return rates


def our_rates(kind: str, params: dict[str, Any], skipped: Sequence[bool]) -> list[float]:
    adapter: TypeAdapter[Any] = TypeAdapter(SchedulerConfig)
    scheduler = adapter.validate_python({"type": kind, "params": params})
    rates, steps_taken = [], 0
    for is_skipped in skipped:
        rates.append(learning_rate(OPTIMIZER, scheduler, step=steps_taken, steps=len(skipped)))
        steps_taken += not is_skipped
    return rates


CASES = [
    ("WarmupLR", {"warmup_num_steps": 10}),
    ("WarmupLR", {"warmup_num_steps": 10, "warmup_min_lr": 1e-5, "warmup_max_lr": 2e-3}),
    ("WarmupLR", {"warmup_num_steps": 1}),
    ("WarmupDecayLR", {"warmup_num_steps": 10, "warmup_max_lr": 3e-4, "total_num_steps": 30}),
    ("WarmupDecayLR", {"warmup_num_steps": 1, "warmup_max_lr": 3e-4, "total_num_steps": 40}),
    ("WarmupDecayLR", {"warmup_num_steps": 20, "warmup_max_lr": 1e-3, "total_num_steps": 9}),
    ("WarmupCosineLR", {"warmup_num_steps": 10, "total_num_steps": 30}),
    ("WarmupCosineLR", {"warmup_num_steps": 1, "total_num_steps": 40, "cos_min_ratio": 0.1}),
    ("WarmupCosineLR", {"warmup_num_steps": 9, "total_num_steps": 40, "warmup_min_ratio": 0.2}),
    ("WarmupCosineLR", {"warmup_num_steps": 20, "total_num_steps": 9, "cos_min_ratio": 0.0}),
]


@pytest.mark.parametrize("warmup_type", ["log", "linear"])
@pytest.mark.parametrize(("kind", "params"), CASES)
def test_every_step_has_deepspeeds_rate(
    kind: str, params: dict[str, Any], warmup_type: str
) -> None:
    params = {**params, "warmup_type": warmup_type}
    rates = our_rates(kind, params, TAKEN)
    assert rates == pytest.approx(deepspeed_rates(kind, params, TAKEN), rel=1e-12, abs=1e-20)
    assert len(set(rates)) > 1, "the rate moves, so there is something to compare"


@pytest.mark.parametrize(("kind", "params"), CASES[::3])
def test_skipped_steps_do_not_advance_the_rate(kind: str, params: dict[str, Any]) -> None:
    skipped = [step in (0, 1, 4, 5, 17, 30) for step in range(STEPS)]
    rates = our_rates(kind, params, skipped)
    assert rates == pytest.approx(deepspeed_rates(kind, params, skipped), rel=1e-12, abs=1e-20)
    assert rates[4] == rates[5] == rates[6]


def test_a_run_without_a_scheduler_has_a_constant_rate() -> None:
    rates = {learning_rate(OPTIMIZER, None, step=step, steps=STEPS) for step in range(STEPS)}
    assert rates == {3e-4}


@pytest.mark.parametrize("kind", ["WarmupDecayLR", "WarmupCosineLR"])
def test_a_decay_without_a_length_lasts_as_long_as_the_run(kind: str) -> None:
    params = {"warmup_num_steps": 5}
    with_length = {**params, "total_num_steps": STEPS}
    assert our_rates(kind, params, TAKEN) == our_rates(kind, with_length, TAKEN)


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR"])
def test_a_warmup_without_a_goal_leads_to_the_optimizers_rate(kind: str) -> None:
    assert max(our_rates(kind, {"warmup_num_steps": 5}, TAKEN)) == OPTIMIZER.params.lr

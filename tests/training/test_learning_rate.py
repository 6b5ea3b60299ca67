"""Our schedules are checked by hand, DeepSpeed's against its own schedulers."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules
from pydantic import TypeAdapter

from megaspeed.config.deepspeed_keys import AdamConfig, SchedulerConfig
from megaspeed.training.learning_rate import learning_rate

STEPS = 40
OPTIMIZER = AdamConfig.model_validate({"type": "AdamW", "params": {"lr": 3e-4}})
TAKEN = [False] * STEPS


def deepspeed_rates(kind: str, params: dict[str, Any], skipped: Sequence[bool]) -> list[float]:
    """Return the rates of DeepSpeed's own scheduler. Skipped steps do not advance it."""
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


def test_a_cosine_starts_at_once_peaks_when_warmup_ends_and_ends_at_its_floor() -> None:
    rates = our_rates("cosine", {"warmup_num_steps": 4, "min_ratio": 0.1}, TAKEN)
    peak = OPTIMIZER.params.lr
    assert rates[:4] == pytest.approx([peak / 4, peak / 2, 3 * peak / 4, peak], rel=1e-12)
    assert rates[4] < peak and rates == rates[:4] + sorted(rates[4:], reverse=True)
    # Step 22 is half way between step 4 and step 40.
    assert rates[21] == pytest.approx(peak * (0.1 + 1) / 2, rel=1e-12)
    assert rates[-1] == pytest.approx(0.1 * peak, rel=1e-12)


def test_a_linear_fall_is_a_straight_line() -> None:
    params = {"warmup_num_steps": 4, "min_ratio": 0.1, "total_num_steps": 22}
    rates = our_rates("linear", params, TAKEN)
    peak = OPTIMIZER.params.lr
    steps = [before - after for before, after in pairwise(rates[3:22])]
    assert steps == pytest.approx([0.9 * peak / 18] * 18, rel=1e-9)
    assert rates[21:] == pytest.approx([0.1 * peak] * 19, rel=1e-12), "it stays at its floor"


@pytest.mark.parametrize(
    ("shape", "fractions"),
    [
        ("1-sqrt", {31: 1 - 0.1**0.5, 34: 1 - 0.4**0.5, 39: 1 - 0.9**0.5}),
        ("linear", {31: 0.9, 34: 0.6, 39: 0.1}),
        ("cosine", {31: (1 + math.cos(0.1 * math.pi)) / 2, 35: 0.5}),
    ],
)
def test_wsd_decays_over_its_last_steps(shape: str, fractions: dict[int, float]) -> None:
    params = {"warmup_num_steps": 4, "decay_num_steps": 10, "decay_shape": shape}
    rates, peak = our_rates("wsd", params, TAKEN), OPTIMIZER.params.lr
    assert rates[:4] == pytest.approx([peak / 4, peak / 2, 3 * peak / 4, peak], rel=1e-12)
    assert rates[4:30] == [peak] * 26 and rates[39] == pytest.approx(0.1 * peak, rel=1e-12)
    for step, fraction in fractions.items():
        assert rates[step - 1] == pytest.approx(peak * (0.1 + 0.9 * fraction), rel=1e-12)
    longer = our_rates("wsd", {**params, "total_num_steps": 10**6}, TAKEN)
    assert longer[:30] == rates[:30], "before the decay, no rate depends on the total"


def test_wsd_decays_by_the_square_root_by_default() -> None:
    params = {"decay_num_steps": 10}
    assert our_rates("wsd", params, TAKEN) == our_rates(
        "wsd", {**params, "decay_shape": "1-sqrt"}, TAKEN
    )


def test_a_constant_rate_is_warmed_up_to() -> None:
    rates = our_rates("constant", {"warmup_num_steps": 2}, TAKEN)
    assert rates == pytest.approx([1.5e-4, *[3e-4] * 39], rel=1e-12)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_without_warmup_every_step_has_a_rate(kind: str) -> None:
    rates = our_rates(kind, {}, TAKEN)
    assert max(rates) <= OPTIMIZER.params.lr and min(rates) >= 0.1 * OPTIMIZER.params.lr * (
        1 - 1e-9
    )
    assert rates[0] == pytest.approx(OPTIMIZER.params.lr, rel=0.03)


def test_deepspeeds_warmup_starts_twice_at_its_lowest_rate_and_peaks_two_steps_late() -> None:
    params = {"warmup_num_steps": 4, "warmup_type": "linear"}
    rates = our_rates("WarmupLR", params, TAKEN)
    assert rates[:2] == [0.0, 0.0] and rates[4] < rates[5] == OPTIMIZER.params.lr

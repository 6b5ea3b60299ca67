"""Steps of very many micro-batches are not replayed to their end, and counted as if they were."""

from pathlib import Path
from typing import Any

import pytest

from megaspeed.analysis.costs import traffic_gathers
from megaspeed.analysis.costs.traffic_gathers import gathers_of_a_step
from tests.parallel.tiny import tiny_run

MICRO_BATCHES = 100


@pytest.mark.parametrize(
    "zero", [{}, {"stage3_max_reuse_distance": 5000}], ids=["default", "reuse"]
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("pp", [1, 2])
def test_what_follows_the_replayed_micro_batches_is_the_same_again(
    pp: int, schedule: str, zero: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(
        Path(__file__),
        pp=pp,
        dp=2,
        train_batch_size=2 * MICRO_BATCHES,
        gradient_accumulation_steps=MICRO_BATCHES,
        parallel={"schedule": schedule},
        zero_optimization={"stage": 3, **zero},
    )
    extrapolated = [gathers_of_a_step(run, stage) for stage in range(pp)]
    monkeypatch.setattr(traffic_gathers, "_REPLAYED_MICRO_BATCHES", MICRO_BATCHES)
    assert extrapolated == [gathers_of_a_step(run, stage) for stage in range(pp)]

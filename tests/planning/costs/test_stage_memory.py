"""The peak found from runs of equal layers is that of a walk over all layers and gradients."""

import sys
from random import Random
from types import FrameType

import pytest

from megaspeed.config.resolve import Run
from megaspeed.planning.costs.stage_memory import StageMemory
from tests.planning.costs.layer_walk import walked_peak
from tests.planning.costs.random_runs import random_runs
from tests.planning.tiny_runs import tiny

CONFIGURATIONS = 10
"""Random ones of each seed, without their variants."""


# With seed 25, a peak is at the last of several equal layers.
@pytest.mark.parametrize("seed", [0, 1, 2, 25])
def test_the_peak_is_that_of_a_walk(seed: int) -> None:
    """What is kept from one prediction to the next never gives another result."""
    for run, device_type in random_runs(Random(seed), CONFIGURATIONS):
        for stage in range(run.grid.pp):
            memory = StageMemory(run, stage, device_type)
            assert memory.least_bytes <= memory.peak.total
            assert memory.peak == walked_peak(run, stage, device_type), run.as_json()


def calls_of_a_prediction(blocks: int) -> int:
    """Return the number of Python calls of a prediction, after one with another micro-batch."""

    def run_of_size(size: int) -> Run:
        sizes = (f"model.num_hidden_layers={blocks}", f"train_micro_batch_size_per_gpu={size}")
        # No other test has this vocabulary, so nothing of these runs is in a cache.
        own = ("zero_optimization.stage=3", "model.vocab_size=302")
        return tiny(*own, *sizes, world_size=2).run

    calls = []

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls.append(frame.f_code)

    first, second = run_of_size(1), run_of_size(2)
    StageMemory(first, 0).peak  # noqa: B018
    sys.setprofile(count)
    StageMemory(second, 0).peak  # noqa: B018
    sys.setprofile(None)
    return len(calls)


def test_the_cost_of_a_prediction_does_not_grow_with_the_blocks() -> None:
    """All blocks of these runs are alike: their gradients are reduced together."""
    calls_of_a_prediction(8)  # After it, caches have what does not depend on the blocks.
    assert calls_of_a_prediction(4) == calls_of_a_prediction(64)

"""fp16: if a gradient overflows on any rank, all ranks skip the step and halve the loss scale.

If a rank kept its scale, it would then weigh its gradients twice as much. If a rank took the step,
its weights would differ from those of its replicas. Neither would raise an error.

A real fp16 run needs a GPU. Here DeepSpeed is made to accept fp16 on the CPU, as torch does.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.worker import Worker
from tests.support.rank_pool import RankPool
from tests.support.tiny import tiny_corpus
from tests.zero.one_rank import OneRank, one_rank, put_an_infinity, small_run, without_memory

POWER = 10
FP16 = {"enabled": True, "initial_scale_power": POWER, "hysteresis": 1, "loss_scale_window": 1000}


@dataclass(frozen=True)
class Turn:
    """A step in which one rank's gradient overflows. Each rank records it."""

    skipped: bool
    weights_changed: bool
    scale: float
    blamed: list[str | None]  # by rank, the first parameter that is not finite


@dataclass(frozen=True)
class Seen:
    """The record of one rank.

    Attributes:
        turns: the steps with an overflow, one for each rank that has it.
        poisoned: the parameter that got the infinity when this rank had the overflow.
        steps_equal: whether the good step after them gives the same result and weights, to the last
            bit, as a run that takes it first with the same loss scale.
        good_is_taken: whether this step changes the weights.
    """

    turns: list[Turn]
    poisoned: str
    steps_equal: bool
    good_is_taken: bool


def scale_of(rank: OneRank) -> float:
    counters = rank.engine.loss_scale()
    assert counters is not None, "the scale is dynamic"
    return float(counters["scale"])


def overflow_everywhere_in_turn(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> Seen:
    CPU_Accelerator.is_fp16_supported = lambda self: True
    with one_rank(launch, run, corpus) as rank:
        turns: list[Turn] = []
        poisoned: list[str] = []
        for bad in range(launch.world_size):

            def look(bad: int = bad) -> None:
                if launch.rank == bad:
                    poisoned.append(put_an_infinity(rank))

            before = rank.weights()
            result = rank.train_step(bad, look=look)
            changed = any(not torch.equal(before[name], w) for name, w in rank.weights().items())
            blamed = [found.parameter for found in rank.worker.non_finite()]
            turns.append(Turn(result.skipped, changed, scale_of(rank), blamed))

        # A refused step has no overflow, so it changes neither the scale nor the next step.
        assert rank.train_step(0, refuses=lambda loss, norm: norm > 0.0).skipped
        assert scale_of(rank) == turns[-1].scale
        before = rank.weights()
        good = rank.train_step(launch.world_size)
        fresh = OneRank(Worker(run, rank.context), rank.loader)
        saved = rank.engine.loss_scale()
        assert saved is not None
        fresh.engine.load_loss_scale({**saved, "scale": turns[-1].scale})
        first = fresh.train_step(launch.world_size)
        expected = fresh.weights()
        return Seen(
            turns,
            "".join(poisoned),
            steps_equal=without_memory(good) == without_memory(first)
            and all(torch.equal(expected[name], w) for name, w in rank.weights().items()),
            good_is_taken=not good.skipped
            and any(not torch.equal(before[name], w) for name, w in rank.weights().items()),
        )


INT8 = {"type": "int8"}
POWER_SGD = {"type": "powersgd", "rank": 2, "start_step": 1}


@pytest.mark.parametrize(
    ("layout", "stage", "compression"),
    [
        ((2, 1, 2), 0, "none"),
        ((2, 1, 2), 1, "none"),
        ((2, 2, 2), 2, "none"),
        ((2, 2, 2), 3, "none"),
        ((2, 2, 1), 1, INT8),
        ((2, 2, 1), 3, POWER_SGD),
    ],
)
def test_an_overflow_on_any_rank_is_one_of_all_ranks(
    pool: RankPool,
    text: Path,
    cache: Path,
    layout: tuple[int, int, int],
    stage: int,
    compression: Any,
) -> None:
    pp, dp, tp = layout
    changes: dict[str, Any] = {"fp16": FP16, "zero_optimization": {"stage": stage}}
    changes["parallel"] = {"gradient_compression": compression}
    run = small_run(text, pp=pp, dp=dp, tp=tp, device_type="cuda", **changes)
    ranks = run.grid.world_size
    seen = pool.run(ranks, overflow_everywhere_in_turn, run, tiny_corpus(run, cache))
    poisoned = [each.poisoned for each in seen]
    for each in seen:
        assert [turn.scale for turn in each.turns] == [2.0 ** (POWER - 1 - i) for i in range(ranks)]
        assert all(turn.skipped and not turn.weights_changed for turn in each.turns)
        for rank, name in enumerate(poisoned):
            assert each.turns[rank].blamed[rank] == name
        assert each.good_is_taken and each.steps_equal

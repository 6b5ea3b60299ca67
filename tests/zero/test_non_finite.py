"""If a value is infinite anywhere, no rank takes the step. The next step is not affected."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.tensor_parallel.loss import TokenLosses
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.training.worker import NonFinite, StepResult, Worker
from tests.support.rank_pool import RankPool
from tests.support.tiny import BF16, BF16_IN_FP32, merge, tiny_corpus
from tests.zero.one_rank import (
    OFFLOAD,
    OFFLOAD_ALL,
    OneRank,
    one_rank,
    put_an_infinity,
    small_run,
    without_memory,
)

BAD_RANK = 1  # on the first pipeline stage, with the second data index

INT8 = {"parallel": {"gradient_compression": {"type": "int8"}}}
POWER_SGD = {"parallel": {"gradient_compression": {"type": "powersgd", "start_step": 1}}}
PER_STEP = {"parallel": {"gradient_reduction": "per_step"}}


@dataclass(frozen=True)
class Skipped:
    """A step with an error in it. Each rank records it."""

    result: StepResult
    weights_changed: bool
    blamed: list[NonFinite]  # by rank


@dataclass(frozen=True)
class Outcome:
    """Steps 0 to 2 of one rank, and step 3, which has no error."""

    infinite_gradient: Skipped
    poisoned: str  # the parameter that got the infinity on the bad rank
    nan_loss_alone: Skipped
    nan_everywhere: Skipped
    good: StepResult
    good_if_it_were_the_first: StepResult
    weights_equal: bool


def skip(rank: OneRank, step: int, look: Callable[[], object] = lambda: None) -> Skipped:
    before = rank.weights()
    result = rank.train_step(step, look=look)
    changed = any(not torch.equal(before[name], w) for name, w in rank.weights().items())
    return Skipped(result, changed, rank.worker.non_finite())


def change_losses(rank: OneRank, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Replace the losses of data rank 1. ``change``: (losses, gradient of logits) -> losses."""
    loss = rank.engine.loss

    def changed(logits: Tensor, targets: Tensor, scales: Tensor | None) -> TokenLosses:
        found = loss.cross_entropy(logits, targets, scales)
        return found._replace(losses=change(found.losses, logits))

    if rank.context.dp_rank == 1:
        loss.chunk_losses = changed


def three_bad_steps_and_a_good_one(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> Outcome:
    with one_rank(launch, run, corpus) as rank:
        loss = rank.engine.loss
        poisoned: list[str] = []

        def poison() -> None:
            if launch.rank == BAD_RANK:
                poisoned.append(put_an_infinity(rank))

        infinite_gradient = skip(rank, 0, poison)

        change_losses(rank, lambda losses, _: losses + math.nan)
        nan_loss_alone = skip(rank, 1)
        loss.chunk_losses = loss.cross_entropy

        change_losses(rank, lambda losses, gradient: losses + gradient.mul_(math.nan).sum())
        nan_everywhere = skip(rank, 2)
        loss.chunk_losses = loss.cross_entropy

        good = without_memory(rank.train_step(3))
        fresh = OneRank(Worker(run, rank.context), rank.loader)
        first = without_memory(fresh.train_step(3))
        expected = fresh.weights()
        return Outcome(
            infinite_gradient=infinite_gradient,
            poisoned="".join(poisoned),
            nan_loss_alone=nan_loss_alone,
            nan_everywhere=nan_everywhere,
            good=good,
            good_if_it_were_the_first=first,
            weights_equal=all(torch.equal(expected[n], w) for n, w in rank.weights().items()),
        )


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        (0, {}),
        (0, BF16_IN_FP32),
        (1, BF16),
        (1, {"zero_optimization": OFFLOAD}),
        (3, {"zero_optimization": {"stage3_param_persistence_threshold": 1000}}),
        (2, PER_STEP),
        (0, INT8),
        (1, POWER_SGD),
        (2, BF16_IN_FP32),
        (2, {"bf16": {"enabled": True, "check_grad_overflow": False}}),
        (2, {"zero_optimization": OFFLOAD}),
        (3, {}),
        (3, {"zero_optimization": OFFLOAD_ALL} | BF16_IN_FP32),
    ],
)
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all_and_leaves_nothing_behind(
    pool: RankPool, text: Path, cache: Path, stage: int, changes: dict[str, Any]
) -> None:
    zero = {"zero_optimization": {"stage": stage}}
    run = small_run(text, pp=2, dp=2, **merge(zero, changes))
    outcomes = pool.run(4, three_bad_steps_and_a_good_one, run, tiny_corpus(run, cache))

    poisoned = outcomes[BAD_RANK].poisoned
    for outcome in outcomes:
        for bad in (outcome.infinite_gradient, outcome.nan_loss_alone, outcome.nan_everywhere):
            assert bad.result.skipped and not bad.weights_changed
            assert not math.isfinite(bad.result.grad_norm)
        blamed = [found.parameter for found in outcome.infinite_gradient.blamed]
        assert blamed == [poisoned if rank == BAD_RANK else None for rank in range(4)]
        assert not any(found.micro_batches for found in outcome.infinite_gradient.blamed)
        assert math.isfinite(outcome.infinite_gradient.result.loss)
        # Rank 3 is on the last pipeline stage, with the second data index.
        micro_batches = [found.micro_batches for found in outcome.nan_loss_alone.blamed]
        assert micro_batches == [(), (), (), tuple(range(run.batch.gradient_accumulation_steps))]
        assert not any(found.parameter for found in outcome.nan_loss_alone.blamed)
        assert math.isnan(outcome.nan_loss_alone.result.loss)
        assert outcome.nan_everywhere.blamed[3].micro_batches == micro_batches[3]
        assert outcome.nan_everywhere.blamed[0].parameter is not None
        assert not outcome.good.skipped
        assert outcome.good == outcome.good_if_it_were_the_first
        assert outcome.weights_equal

"""ZeRO's promise in bytes: if a stage partitions a value over dp ranks, each holds 1/dp of it.

between ...          parameters    gradients         optimizer state
steps                stage 3       -                 stages 1, 2, 3
micro-batches        stage 3       stages 2, 3       stages 1, 2, 3

At stages 2 and 3, a rank also holds the complete sum of the gradients of norms and biases. This is
small.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.topology.launch import LaunchEnvironment
from tests.support.rank_pool import RankPool
from tests.support.tiny import tiny_corpus
from tests.zero.held import (
    bytes_of,
    gradient_bytes_between_micro_batches,
    is_gathered,
    state_tensors,
)
from tests.zero.one_rank import one_rank, small_run

FP32_BYTES = 4


def partition_elements(parameters: Iterable[nn.Parameter], dp: int) -> int:
    """Return the elements of a rank's partition: dp parts of each parameter, rounded up."""
    return sum(-(-getattr(p, "ds_numel", p.numel()) // dp) for p in parameters)


# --- parameters -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """The bytes that one rank holds. ``whole_bytes`` would be its bytes with a data degree of 1."""

    part_bytes: int
    whole_bytes: int
    rounded_up_bytes: int
    gathered: int


def parameter_fragments(launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus) -> list[Held]:
    held = []
    with one_rank(launch, run, corpus) as rank:
        for step in range(3):
            parameters: list[Any] = list(rank.engine.module.parameters())
            held.append(
                Held(
                    part_bytes=bytes_of(p.ds_tensor for p in parameters),
                    whole_bytes=sum(p.ds_numel * p.element_size() for p in parameters),
                    rounded_up_bytes=FP32_BYTES * partition_elements(parameters, run.grid.dp),
                    gathered=sum(map(is_gathered, parameters)),
                )
            )
            rank.train_step(step)
    return held


@pytest.mark.parametrize(
    ("pp", "dp", "tp", "reduction"),
    [(1, 2, 1, "per_step"), (1, 3, 2, "per_micro_batch"), (2, 2, 2, "per_micro_batch")],
)
def test_zero3_holds_its_share_of_the_parameters_between_steps_and_no_more(
    pool: RankPool, text: Path, cache: Path, pp: int, dp: int, tp: int, reduction: str
) -> None:
    run = small_run(
        text,
        pp=pp,
        dp=dp,
        tp=tp,
        zero_optimization={"stage": 3},
        parallel={"gradient_reduction": reduction},
    )
    for ranks_steps in pool.run(pp * dp * tp, parameter_fragments, run, tiny_corpus(run, cache)):
        for held in ranks_steps:
            assert held.gathered == 0
            assert held.part_bytes == held.rounded_up_bytes
            assert held.part_bytes == pytest.approx(held.whole_bytes / dp, rel=0.01)


# --- gradients ------------------------------------------------------------------------------------


def gradient_bytes_of_two_steps(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> tuple[list[int], int, int]:
    """Return (bytes held after each backward except the last of a step, elements of this rank's
    module, elements of its norms and biases).
    """
    with one_rank(launch, run, corpus) as rank:
        shapes = [getattr(p, "ds_shape", p.shape) for p in rank.engine.module.parameters()]
        elements = sum(shape.numel() for shape in shapes)
        vectors = sum(shape.numel() for shape in shapes if len(shape) == 1)
        held = gradient_bytes_between_micro_batches(rank)
        rank.train_step(0)
        rank.train_step(1)
        return held, elements, vectors


@pytest.mark.parametrize(
    ("stage", "precision"),
    [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (2, "bf16")],
)
def test_zero2_and_3_hold_their_share_of_the_gradient_between_micro_batches(
    pool: RankPool, text: Path, cache: Path, stage: int, precision: str
) -> None:
    dp = 3
    run = small_run(
        text,
        pp=2,
        dp=dp,
        zero_optimization={"stage": stage},
        parallel={"gradient_reduction": "per_micro_batch"},
        bf16={"enabled": precision == "bf16"},
        data_types={"grad_accum_dtype": "fp32"},
    )
    for held, elements, vectors in pool.run(
        2 * dp, gradient_bytes_of_two_steps, run, tiny_corpus(run, cache)
    ):
        assert len(held) == 2, "one entry for each of two steps"
        share = elements / dp + vectors if stage >= 2 else elements
        assert held == pytest.approx([FP32_BYTES * share] * 2, rel=0.01)


# --- optimizer state ------------------------------------------------------------------------------


def optimizer_bytes(launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus) -> tuple[int, int]:
    with one_rank(launch, run, corpus) as rank:
        rank.train_step(0)
        parameters = rank.engine.module.parameters()
        elements = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
        return bytes_of(state_tensors(rank)), elements


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero1_2_and_3_hold_their_share_of_the_optimizer_state(
    pool: RankPool, text: Path, cache: Path, stage: int
) -> None:
    dp = 3
    run = small_run(text, dp=dp, tp=2, zero_optimization={"stage": stage})
    for held, elements in pool.run(2 * dp, optimizer_bytes, run, tiny_corpus(run, cache)):
        share = elements / dp if stage >= 1 else elements
        assert held == pytest.approx(2 * FP32_BYTES * share, rel=0.01)

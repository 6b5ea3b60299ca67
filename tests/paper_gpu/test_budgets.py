"""Budgets of one training step, in what a GPU would pay. They may only be lowered.

The host takes about 5 us to launch a kernel, whatever the size of the kernel. A collective of all
ranks takes as long as their slowest rank.
"""

from typing import Any

import pytest

from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.zero.buckets import GradientBucket, Reducer
from tests.paper_gpu.fake_world import GPT2, LLAMA, MOE
from tests.paper_gpu.paper_step import paper_step, step_of
from tests.support.rank_pool import RankPool


def _launches(
    launch: LaunchEnvironment, model: dict[str, Any], stage: int, dp: int, parallel: dict[str, Any]
) -> tuple[float, float]:
    """Return the kernels for each block: (in each micro-batch, once a step)."""
    by_block = []
    for micro_batches in (2, 4):
        one, three = (
            step_of(
                launch,
                0,
                {
                    "dp": dp,
                    "model": {**model, "num_hidden_layers": blocks},
                    "parallel": parallel,
                    "gradient_accumulation_steps": micro_batches,
                    # All gradients are in one message, because the number of messages depends on
                    # the model's size.
                    "zero_optimization": {"stage": stage, "reduce_bucket_size": 10**9},
                },
            ).launches
            for blocks in (1, 3)
        )
        by_block.append((three - one) / 2)
    each = (by_block[1] - by_block[0]) / 2
    return each, by_block[0] - 2 * each


# A GPT-2 block has 12 parameters, a Llama block 6.
@pytest.mark.parametrize(
    ("model", "stage", "dp", "each_micro_batch", "each_step"),
    [
        (GPT2, 1, 1, 37, 0),
        (GPT2, 3, 1, 37, 0),
        (GPT2, 3, 2, 29, 0),  # gathering copies nothing, neither before nor after it
        (LLAMA, 1, 1, 107, 0),
        (LLAMA, 3, 1, 107, 0),
        # With one feed-forward layer instead of experts, it is 159. The choice has 12 kernels.
        (MOE, 1, 1, 232, 0),
    ],
    ids=[
        "gpt2-zero1",
        "gpt2-zero3",
        "gpt2-zero3-gathered",
        "llama-zero1",
        "llama-zero3",
        "experts",
    ],
)
def test_kernels_of_a_block(
    pool: RankPool,
    model: dict[str, Any],
    stage: int,
    dp: int,
    each_micro_batch: int,
    each_step: int,
) -> None:
    ((each, once),) = pool.run(1, _launches, model, stage, dp, {})
    assert each <= each_micro_batch
    assert once <= each_step


@pytest.mark.parametrize(
    ("exchange", "recomputation", "each_micro_batch"),
    [
        ("all_to_all", "none", 250),
        ("all_gather", "none", 254),
        ("all_to_all", "full", 323),
        ("all_gather", "full", 327),
    ],
)
def test_kernels_of_a_block_whose_experts_are_shared(
    pool: RankPool, exchange: str, recomputation: str, each_micro_batch: int
) -> None:
    """A recomputation chooses and sorts nothing again."""
    shared = {"expert": 2, "expert_exchange": exchange, "activation_checkpointing": recomputation}
    ((each, once),) = pool.run(1, _launches, MOE, 1, 2, shared)
    assert each <= each_micro_batch
    assert once == 0


def _launches_of_compression(launch: LaunchEnvironment, how: Any, blocks: int, stage: int) -> int:
    """Return how many kernels a step with compressed gradients has more than one without."""
    with_and_without = [
        step_of(
            launch,
            0,
            {
                "dp": 2,
                "model": {**GPT2, "num_hidden_layers": blocks},
                "parallel": {"gradient_compression": compression},
                # All gradients are in one message, because the number of messages depends on the
                # model's size.
                "zero_optimization": {"stage": stage, "reduce_bucket_size": 10**9},
            },
        ).launches
        for compression in (how, "none")
    ]
    return with_and_without[0] - with_and_without[1]


@pytest.mark.parametrize(
    ("how", "stage", "launches"),
    [
        ({"type": "int8"}, 0, 33),
        ({"type": "int8"}, 1, 21),
        ({"type": "powersgd", "start_step": 1}, 1, 367),
    ],
)
def test_kernels_of_compression_do_not_depend_on_the_number_of_blocks(
    pool: RankPool, how: Any, stage: int, launches: int
) -> None:
    ((few, many),) = pool.run(1, _few_and_many, how, stage)
    assert few == many <= launches


def _few_and_many(launch: LaunchEnvironment, how: Any, stage: int) -> tuple[int, int]:
    two, six = (_launches_of_compression(launch, how, blocks, stage) for blocks in (2, 6))
    return two, six


def _launches_of_muon(launch: LaunchEnvironment, blocks: int, stage: int) -> tuple[int, int]:
    """Return how many (kernels, collectives) a step with Muon has more than one with AdamW."""
    muon, adamw = (
        step_of(
            launch,
            2,
            {
                "dp": 2,
                "tp": 2,
                "model": {**LLAMA, "num_hidden_layers": blocks},
                "optimizer": {"type": name},
                # All gradients of matrices are in one bucket.
                "zero_optimization": {"stage": stage, "reduce_bucket_size": 10**9},
            },
        )
        for name in ("Muon", "AdamW")
    )
    return muon.launches - adamw.launches, len(muon.messages) - len(adamw.messages)


@pytest.mark.parametrize(("stage", "launches", "collectives"), [(0, 67, 7), (1, 62, 6), (3, 65, 6)])
def test_kernels_of_muon_depend_on_the_batches_and_not_on_the_number_of_blocks(
    pool: RankPool, stage: int, launches: int, collectives: int
) -> None:
    """The sections of 2 blocks and those of 5 are in five batches, one for each shape. Of the four
    owners, rank 2 has two. A batch is 24 kernels, 15 of which are five Newton-Schulz steps.
    """
    ((few, many),) = pool.run(1, _few_and_many_with_muon, stage)
    assert few == many
    assert few[0] <= launches and few[1] <= collectives


def _few_and_many_with_muon(launch: LaunchEnvironment, stage: int) -> tuple[Any, Any]:
    two, five = (_launches_of_muon(launch, blocks, stage) for blocks in (2, 5))
    return two, five


@pytest.mark.parametrize(
    ("stage", "collectives", "event_waits"), [(0, 5, 0), (1, 9, 0), (2, 15, 0), (3, 20, 0)]
)
def test_collectives_of_a_step_of_two_blocks(
    pool: RankPool, stage: int, collectives: int, event_waits: int
) -> None:
    """At ZeRO-0, a step has one report and one collective for each of four buckets, for any number
    of data ranks. At ZeRO-1, it has two for each bucket.
    """
    step = paper_step(pool, dp=2, zero_optimization={"stage": stage})
    assert len(step.messages) <= collectives
    assert sum(step.event_waits.values()) <= event_waits


def test_small_blocks_are_gathered_once_a_step(pool: RankPool) -> None:
    """Embedding and head are gathered in each of 2 micro-batches. All 6 blocks, and the parameters
    that stay gathered, are gathered once.
    """
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 8 << 20}
    step = paper_step(pool, dp=2, model={"num_hidden_layers": 6}, zero_optimization=zero)
    assert sum("allgather" in message.operator for message in step.messages) == 2 * 2 + 1 + 1


def test_one_collective_of_a_step_spans_all_ranks(pool: RankPool) -> None:
    world = tuple(range(8))
    step = paper_step(pool, pp=2, dp=2, tp=2, zero_optimization={"stage": 3})
    assert sum(message.group == world for message in step.messages) == 1


def _most_messages(launch: LaunchEnvironment, stage: int, overlaps: bool) -> int:
    """Return the most buckets that are in flight when the next part of the step begins."""
    send, in_flight = Reducer.send, []

    def counted(reducer: Reducer, bucket: GradientBucket, *, last: bool) -> None:
        send(reducer, bucket, last=last)
        in_flight.append(len(reducer._in_flight))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reducer, "send", counted)
        zero = {"stage": stage, "overlap_comm": overlaps, "reduce_bucket_size": 2000}
        changes = {"zero_optimization": zero, "gradient_accumulation_steps": 2, "dp": 2}
        step_of(launch, 0, {**changes, "parallel": {"gradient_reduction": "per_micro_batch"}})
    return max(in_flight)


@pytest.mark.parametrize("stage", [2, 3])
def test_one_copy_of_a_bucket_is_in_memory_at_a_time(pool: RankPool, stage: int) -> None:
    """With overlap, it is the copy that is being sent. Without overlap, no copy is kept after a
    send.
    """
    assert pool.run(1, _most_messages, stage, True) == [1]
    assert pool.run(1, _most_messages, stage, False) == [0]

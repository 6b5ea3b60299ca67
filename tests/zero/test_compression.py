"""Compressed gradients: error bounds, feedback, equal copies, non-finite values, skipped steps."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.data_axis.axis import data_axis_of
from megaspeed.data_axis.buckets import Bucket
from megaspeed.data_axis.parameters import LocalParameter
from megaspeed.measurement.verification.verify import gather_gradients, gather_weights
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.zero.buckets import CompressedGradients
from megaspeed.zero.compression import (
    batches_of,
    make_compressor,
    orthogonalize,
    packed,
    quantized,
    unpacked,
)
from tests.support.machine import limit
from tests.support.rank_pool import RankPool
from tests.support.tiny import LLAMA, merge, tiny_corpus
from tests.zero.one_rank import OFFLOAD, OneRank, one_rank, small_run

BLOCK = 64
INT8: dict[str, Any] = {"type": "int8", "block": BLOCK}
POWER_SGD: dict[str, Any] = {"type": "powersgd", "rank": 4, "start_step": 1}
WITHOUT_FEEDBACK = {"error_feedback": False}


def compressed(how: Any, **changes: Any) -> dict[str, Any]:
    return merge({"parallel": {"gradient_compression": how}}, changes)


# --- blocks of 8-bit integers ---------------------------------------------------------------------


def test_a_rounded_element_differs_by_at_most_half_a_scale() -> None:
    values = torch.randn(50, BLOCK, generator=torch.Generator().manual_seed(1)) ** 5
    values[3] = 0.0
    values[4] *= 1e-43  # below the smallest normal number
    values[5] *= 1e36
    levels, scales = quantized(values)
    assert torch.equal(scales[:, 0], values.abs().amax(1) / 127)
    assert bool((levels.abs() <= 127).all()) and torch.equal(levels, levels.round())
    assert bool(((levels * scales - values).abs() <= scales * 0.50001 + 1.5e-36).all())
    assert torch.equal(levels[3], torch.zeros(BLOCK))


def test_a_message_has_every_bit_of_levels_and_scales() -> None:
    levels, scales = quantized(torch.randn(3, 7, BLOCK))
    message = packed(levels, scales)
    assert message.shape == (3, 7, BLOCK + 4) and message.dtype == torch.int8
    assert torch.equal(unpacked(message), levels * scales)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_an_element_that_is_not_finite_is_not_hidden(bad: float) -> None:
    for place in range(BLOCK):
        values = torch.ones(BLOCK)
        values[place] = bad
        assert not bool(unpacked(packed(*quantized(values))).isfinite().any())


# --- constructed gradients ------------------------------------------------------------------------

SHAPES = [(10, 24), (17, 24), (10, 24), (10, 24), (17, 24)]
Means = list[Tensor]


def compressed_bucket(
    run: Run,
    shapes: Sequence[tuple[int, ...]],
    sizes: list[int],
    flat: Tensor,
    partition: Tensor,
) -> CompressedGradients:
    """Return a bucket whose complete gradient, of these sizes with padding, is compressed."""
    plan = Bucket(
        parameters=[
            LocalParameter(name=str(n), layer="blocks.0", shape=shape, group="decaying")
            for n, shape in enumerate(shapes)
        ],
        sizes=sizes,
        elements=flat.numel(),
        shards=run.grid.shard,
        layout="rows" if run.zero_stage == 3 else "flat",
        reduction=data_axis_of(run, 0, "cpu").matrix_reduction,
        compression=run.compression,
    )
    ranges = [*plan.compressed_by(0)]
    return CompressedGradients(plan=plan, values=flat, partition=partition, ranges=ranges)


def means_of(
    launch: LaunchEnvironment, run: Run, gradient: Callable[[int, int], Tensor], steps: int
) -> Means:
    """Return the flat mean of ``gradient(step, data rank)`` that this rank receives in each step.

    At ZeRO-1 to 3, this is the mean of this rank's partition.
    """
    dp, stage = run.grid.dp, run.zero_stage
    sizes = [math.prod(shape) for shape in SHAPES]
    if stage == 3:
        sizes = [math.ceil(size / dp) * dp for size in sizes]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    whole = math.ceil(sum(sizes) / (2 * dp)) * 2 * dp if stage < 3 else sum(sizes)
    own = whole if stage == 0 else whole // dp
    with ParallelContext.create(run.grid, launch, timeout_seconds=limit(60)) as context:
        complete = torch.zeros(whole)
        bucket = compressed_bucket(run, SHAPES, sizes, complete, torch.zeros(own))
        compressor = make_compressor(run, context, [bucket])
        received = []
        for step in range(steps):
            if not run.compression or not run.compression.error_feedback:
                complete.zero_()
            flat = gradient(step, context.dp_rank)
            for start, part in zip(starts, flat.split([math.prod(s) for s in SHAPES]), strict=True):
                complete[start : start + part.numel()] += part
            compressor.reduce([bucket])
            compressor.keep()
            received.append(bucket.partition.clone())
        return received


def constructed_run(text: Path, dp: int, stage: int, how: Any, **changes: Any) -> Run:
    values = compressed(how, zero_optimization={"stage": stage, "reduce_bucket_size": 500})
    return small_run(text, dp=dp, train_batch_size=4 * dp, **merge(values, changes))


def whole_of(run: Run, ranks: list[Means], step: int) -> Tensor:
    """Join the partitions of all ranks to the complete mean of a step, without padding."""
    if run.zero_stage == 0:
        for rank in ranks:
            torch.testing.assert_close(rank[step], ranks[0][step], rtol=0, atol=0, equal_nan=True)
        return ranks[0][step][: sum(map(math.prod, SHAPES))]
    if run.zero_stage < 3:
        return torch.cat([rank[step] for rank in ranks])[: sum(map(math.prod, SHAPES))]
    sizes = [math.prod(shape) for shape in SHAPES]
    parts = [rank[step].split([-(-size // run.grid.dp) for size in sizes]) for rank in ranks]
    return torch.cat(
        [torch.cat([rank[i] for rank in parts])[:size] for i, size in enumerate(sizes)]
    )


def normal(step: int, rank: int) -> Tensor:
    elements = sum(map(math.prod, SHAPES))
    return torch.randn(elements, generator=torch.Generator().manual_seed(100 * step + rank))


@pytest.mark.parametrize("dp", [2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_int8_is_the_mean_within_half_a_scale(
    pool: RankPool, text: Path, dp: int, stage: int
) -> None:
    run = constructed_run(text, dp, stage, INT8)
    found = whole_of(run, pool.run(dp, means_of, run, normal, 1), 0)
    exact = torch.stack([normal(0, rank) for rank in range(dp)]).mean(0)
    # The error is at most half a scale of each rank's block. At ZeRO-0, the mean is rounded once
    # more.
    largest = max(float(normal(0, rank).abs().max()) for rank in range(dp))
    bound = (largest + (float(exact.abs().max()) if stage == 0 else 0.0)) / 127 / 2
    error = (found - exact).abs().max()
    assert bound / 10 < error <= 1.0001 * bound


def small_elements_beside_large_ones(step: int, rank: int) -> Tensor:
    """Return gradients. Data rank 0 has blocks with most elements below half of the scale."""
    values = torch.full((sum(map(math.prod, SHAPES)),), 0.2)
    if rank == 0:
        values[:: BLOCK // 2] = 127.0
    return values


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_without_feedback_small_elements_are_never_sent(
    pool: RankPool, text: Path, stage: int
) -> None:
    steps, worst = 20, []
    small = small_elements_beside_large_ones(0, 0) < 1
    for feedback in (True, False):
        run = constructed_run(text, 2, stage, {**INT8, "error_feedback": feedback})
        ranks = pool.run(2, means_of, run, small_elements_beside_large_ones, steps)
        sent = torch.stack([whole_of(run, ranks, step) for step in range(steps)]).sum(0)
        worst.append(float((sent[small] - steps * 0.2).abs().max()))
    assert worst[0] < 0.6, "half a scale of data rank 0 and of the sum, divided by 2"
    # At ZeRO-0 the sum is rounded, too, so the elements of data rank 1 are also lost.
    assert worst[1] == pytest.approx(steps * (0.2 if stage == 0 else 0.1), rel=0.01)


@pytest.mark.parametrize("how", [INT8, POWER_SGD], ids=lambda how: how["type"])
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_one_bad_element_of_one_rank_reaches_the_rank_that_owns_it(
    pool: RankPool, text: Path, how: Any, stage: int, bad: float
) -> None:
    run = constructed_run(text, 2, stage, how)

    for place in (0, 300, 1103):
        found = whole_of(run, pool.run(2, means_of, run, Poisoned(place, bad), 1), 0)
        assert not bool(found[place].isfinite())


class Poisoned:
    """Normal gradients, but one element of data rank 1 is not finite."""

    def __init__(self, place: int, value: float) -> None:
        self._place, self._value = place, value

    def __call__(self, step: int, rank: int) -> Tensor:
        gradient = normal(step, rank)
        if rank == 1:
            gradient[self._place] = self._value
        return gradient


def conserved(launch: LaunchEnvironment, run: Run, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a replica's sum over its shards, the mean of all, and what it has not sent."""
    with ParallelContext.create(run.grid, launch, timeout_seconds=limit(60)) as context:
        generator = torch.Generator().manual_seed(context.replica_rank)
        before = torch.randn(size, generator=generator)
        flat = before.clone()
        bucket = compressed_bucket(run, [(size // 24, 24)], [size], flat, torch.zeros(size))
        make_compressor(run, context, [bucket]).reduce([bucket])
        return before, bucket.partition, flat


@pytest.mark.parametrize("how", [{"type": "int8", "block": 32}, {"type": "powersgd", "rank": 2}])
def test_what_replicas_did_not_send_stays_in_their_sums(
    pool: RankPool, tmp_path: Path, how: dict[str, Any]
) -> None:
    """dp x mean + what was not sent = what there was. An earlier version subtracted the mean once
    from the sum of a replica, which is that of several shards. So a part that was sent stayed in
    it.
    """
    text = tmp_path / "text.txt"
    text.write_text("some words " * 2000)
    run = constructed_run(text, 4, 1, how, parallel={"replicate": 2})
    first, _, second, _ = pool.run(4, conserved, run, 20 * 24)
    (one, mean, kept), (other, _, left) = first, second
    torch.testing.assert_close(4 * mean + kept + left, one + other, rtol=1e-5, atol=1e-5)


# --- PowerSGD -------------------------------------------------------------------------------------


def test_matrices_at_equal_distances_are_one_batch(tmp_path: Path) -> None:
    shapes = [(9, 4), (6, 4), (4, 4), (6, 4), (4, 4), (6, 4), (4, 4), (4, 4)]
    sizes = [math.prod(shape) for shape in shapes]
    flat = torch.arange(float(sum(sizes)))
    run = constructed_run(tmp_path / "text.txt", 2, 1, POWER_SGD)
    bucket = compressed_bucket(run, shapes, sizes, flat, flat)
    batches, rest = batches_of([bucket], rank=1)
    assert rest == []
    assert [(b.shape, len(b.names)) for b in batches] == [
        ((9, 4), 1),
        ((6, 4), 3),
        ((4, 4), 3),
        ((4, 4), 1),  # at another distance
    ]
    seen = {name: m for b in batches for name, m in zip(b.names, b.of(flat), strict=True)}
    for index, part in enumerate(flat.split(sizes)):
        assert torch.equal(seen[str(index)].reshape(-1), part)


@pytest.mark.parametrize("rank_of_matrix", [0, 1, 2, 4])
def test_columns_become_orthonormal_even_if_some_depend_on_others(rank_of_matrix: int) -> None:
    generator = torch.Generator().manual_seed(3)
    left = torch.randn(5, 40, rank_of_matrix, generator=generator)
    matrices = left @ torch.randn(5, rank_of_matrix, 4, generator=generator)
    before = matrices.clone()
    orthogonalize(matrices)
    products = matrices.mT @ matrices
    if rank_of_matrix == 0:
        assert not bool(matrices.any())
        return
    torch.testing.assert_close(products, torch.eye(4).expand(5, 4, 4), rtol=0, atol=1e-5)
    torch.testing.assert_close(matrices @ (matrices.mT @ before), before, rtol=1e-4, atol=1e-5)


def of_rank_two(step: int, rank: int) -> Tensor:
    """Return matrices of rank 2 that have the same column space on all data ranks."""
    space = torch.Generator().manual_seed(step)
    lefts = [torch.randn(rows, 2, generator=space) for rows, _ in SHAPES]
    own = torch.Generator().manual_seed(1000 + rank)
    rights = [torch.randn(2, columns, generator=own) for _, columns in SHAPES]
    return torch.cat([(p @ q).reshape(-1) for p, q in zip(lefts, rights, strict=True)])


@pytest.mark.parametrize("dp", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_powersgd_is_the_mean_of_matrices_of_its_rank(
    pool: RankPool, text: Path, dp: int, stage: int
) -> None:
    run = constructed_run(text, dp, stage, {**POWER_SGD, **WITHOUT_FEEDBACK})
    ranks = pool.run(dp, means_of, run, of_rank_two, 2)
    for step in range(2):
        exact = sum(of_rank_two(step, rank) for rank in range(dp)) / dp
        torch.testing.assert_close(whole_of(run, ranks, step), exact, rtol=1e-3, atol=1e-4)


def constant(step: int, rank: int) -> Tensor:
    return normal(0, rank)


def test_the_warm_start_approaches_the_best_matrix_of_the_rank(pool: RankPool, text: Path) -> None:
    """The best matrix is the truncated singular value decomposition (Eckart and Young 1936)."""
    run = constructed_run(text, 2, 0, {**POWER_SGD, **WITHOUT_FEEDBACK})
    ranks = pool.run(2, means_of, run, constant, 30)
    exact = (normal(0, 0) + normal(0, 1)) / 2
    sizes = [math.prod(shape) for shape in SHAPES]
    best = math.sqrt(
        sum(
            float(torch.linalg.svdvals(part.view(shape))[4:].square().sum())
            for part, shape in zip(exact.split(sizes), SHAPES, strict=True)
        )
    )
    errors = [float((whole_of(run, ranks, step) - exact).norm()) for step in (0, 29)]
    assert best < errors[1] < 1.02 * best < 1.1 * best < errors[0]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_powersgd_sends_everything_over_time_only_with_feedback(
    pool: RankPool, text: Path, stage: int
) -> None:
    steps, exact = 40, (normal(0, 0) + normal(0, 1)) / 2
    left = []
    for feedback in (True, False):
        run = constructed_run(text, 2, stage, {**POWER_SGD, "error_feedback": feedback})
        ranks = pool.run(2, means_of, run, constant, steps)
        sent = sum(whole_of(run, ranks, step) for step in range(steps)) / steps
        left.append(float((sent - exact).norm() / exact.norm()))
    assert left[0] < 0.15 and left[1] > 0.5


def zero_at_first(step: int, rank: int) -> Tensor:
    return normal(step, rank) * (step > 0)


def test_powersgd_recovers_from_gradients_of_zeros(pool: RankPool, text: Path) -> None:
    run = constructed_run(text, 2, 1, POWER_SGD)
    ranks = pool.run(2, means_of, run, zero_at_first, 2)
    assert not bool(whole_of(run, ranks, 0).any())
    sizes = [math.prod(shape) for shape in SHAPES]
    assert all(bool(part.any()) for part in whole_of(run, ranks, 1).split(sizes))


def huge_at_first(step: int, rank: int) -> Tensor:
    return normal(step, rank) * (1e21 if step == 0 else 1.0)


def test_powersgd_sends_gradients_whose_squares_are_too_large_for_fp32(
    pool: RankPool, text: Path
) -> None:
    """In an earlier version, such a matrix was sent as zeros in this step and in all later ones."""
    run = constructed_run(text, 2, 1, {**POWER_SGD, **WITHOUT_FEEDBACK})
    ranks = pool.run(2, means_of, run, huge_at_first, 2)
    sizes = [math.prod(shape) for shape in SHAPES]
    for step, size in ((0, 1e21), (1, 1.0)):
        exact = (huge_at_first(step, 0) + huge_at_first(step, 1)) / 2
        sent = whole_of(run, ranks, step)
        assert bool(torch.isfinite(sent).all())
        for part, wanted in zip(sent.split(sizes), exact.split(sizes), strict=True):
            assert 0.1 < float((part / size).norm() / (wanted / size).norm()) < 1.1


# --- whole runs -----------------------------------------------------------------------------------


def copies_differ_by(launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus) -> list[float]:
    """Return how much ranks' copies of gradients and weights differ, in three steps."""
    found = []
    with one_rank(launch, run, corpus) as rank:
        for step in range(3):
            result = rank.train_step(step, look=lambda: found.append(gather_gradients(rank.worker)))
            assert not result.skipped
            found.append(gather_weights(rank.worker))
    return [each.copies_differ_by for each in found if each is not None]


@pytest.mark.parametrize(
    ("layout", "stage", "model"),
    [
        ((1, 4, 1), 0, {}),
        ((1, 2, 2), 0, {}),  # both tensor ranks have positions
        ((2, 2, 2), 0, {}),  # weights are tied across the pipeline
        ((2, 2, 2), 1, {}),
        ((2, 2, 2), 3, {**LLAMA, "num_hidden_layers": 2}),
    ],
)
# Such blocks contain elements of several matrices.
@pytest.mark.parametrize("how", [{**INT8, "block": 4096}, POWER_SGD], ids=lambda how: how["type"])
def test_all_copies_are_equal(
    pool: RankPool,
    text: Path,
    cache: Path,
    layout: tuple[int, int, int],
    stage: int,
    model: Any,
    how: Any,
) -> None:
    pp, dp, tp = layout
    sequence = {"sequence_parallel": tp > 1 and stage == 3}
    changes = compressed(
        how, zero_optimization={"stage": stage}, model=model, parallel=sequence, train_batch_size=8
    )
    run = small_run(text, pp=pp, dp=dp, tp=tp, **changes)
    ranks = pool.run(run.grid.world_size, copies_differ_by, run, tiny_corpus(run, cache))
    assert ranks[0] == [0.0] * 6


def weights_after(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, steps: int
) -> list[dict[str, Tensor]]:
    with one_rank(launch, run, corpus) as rank:
        found = []
        for step in range(steps):
            rank.train_step(step)
            found.append(rank.weights())
        return found


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_steps_before_the_start_step_are_those_without_compression(
    pool: RankPool, text: Path, cache: Path, stage: int
) -> None:
    changes = {
        "zero_optimization": {"stage": stage},
        "parallel": {"gradient_reduction": "per_step"},
    }
    plain = small_run(text, dp=2, **changes)
    run = small_run(text, dp=2, **compressed({**POWER_SGD, "start_step": 3}, **changes))
    corpus = tiny_corpus(run, cache)
    exact, *_ = pool.run(2, weights_after, plain, corpus, 3)
    found, *_ = pool.run(2, weights_after, run, corpus, 3)
    for step, equal in enumerate((True, True, False)):
        pairs = [(exact[step][name], value) for name, value in found[step].items()]
        assert all(torch.equal(one, other) for one, other in pairs) == equal


def test_offloaded_partitions_are_those_on_the_device(
    pool: RankPool, text: Path, cache: Path
) -> None:
    for how in (INT8, POWER_SGD):
        runs = [
            small_run(text, dp=2, **compressed(how, zero_optimization={"stage": 2, **offload}))
            for offload in ({}, OFFLOAD)
        ]
        one, other = (pool.run(2, weights_after, run, tiny_corpus(run, cache), 2) for run in runs)
        for name, value in one[0][-1].items():
            torch.testing.assert_close(other[0][-1][name], value, rtol=1e-5, atol=1e-6)


def feedback_of(rank: OneRank) -> dict[str, Tensor]:
    engine = rank.engine
    return {f.name: f.values.clone() for f in engine.gradients.feedback()}


def norms_and_feedback_in_fp16(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> tuple[list[float], dict[str, Tensor]]:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported = lambda self: True
    with one_rank(launch, run, corpus) as rank:
        steps = [rank.train_step(step) for step in range(2)]
        assert not any(step.skipped for step in steps)
        return [step.grad_norm for step in steps], feedback_of(rank)


@pytest.mark.parametrize("how", [INT8, POWER_SGD], ids=lambda how: how["type"])
def test_feedback_and_norms_have_no_loss_scale(
    pool: RankPool, text: Path, cache: Path, how: Any
) -> None:
    """The scale may change after a step. The feedback is added to gradients of the new scale."""
    doubling = {"initial_scale_power": 6, "loss_scale_window": 1}
    changing, constant = (
        small_run(
            text, dp=2, device_type="cuda", **compressed(how, fp16={"enabled": True, **scale})
        )
        for scale in (doubling, {"loss_scale": 1024.0})
    )
    corpus = tiny_corpus(constant, cache)
    (one, *_), (other, *_) = (
        pool.run(2, norms_and_feedback_in_fp16, r, corpus) for r in (changing, constant)
    )
    assert one[0] == pytest.approx(other[0], rel=0.05)
    for name, values in one[1].items():
        assert bool(values.any())
        assert 0.8 < float(other[1][name].norm() / values.norm()) < 1.25


def states_around_a_skipped_step(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> tuple[bool, bool, bool]:
    """Return (the step was skipped, it changed feedback and Q, the step after it changed them)."""
    with one_rank(launch, run, corpus) as rank:

        def states() -> list[Tensor]:
            factors = [factor.clone() for _, factor in rank.engine.gradients.factors()]
            return [*feedback_of(rank).values(), *factors]

        def differ(one: list[Tensor], other: list[Tensor]) -> bool:
            return not all(map(torch.equal, one, other))

        rank.train_step(0)
        before = states()
        reduce = rank.engine.gradients.reduce

        def poisoned() -> None:
            if rank.context.rank == 1:
                for group in rank.engine.gradients._compressed:
                    group.values[7] = math.inf
            reduce()

        rank.engine.gradients.reduce = poisoned  # type: ignore[method-assign]
        skipped = rank.train_step(1).skipped
        rank.engine.gradients.reduce = reduce  # type: ignore[method-assign]
        after = states()
        rank.train_step(2)
        return skipped, differ(before, after), differ(after, states())


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("how", [INT8, POWER_SGD], ids=lambda how: how["type"])
def test_a_skipped_step_changes_no_feedback(
    pool: RankPool, text: Path, cache: Path, how: Any, stage: int
) -> None:
    run = small_run(text, pp=2, dp=2, **compressed(how, zero_optimization={"stage": stage}))
    corpus = tiny_corpus(run, cache)
    assert pool.run(4, states_around_a_skipped_step, run, corpus) == 4 * [(True, False, True)]

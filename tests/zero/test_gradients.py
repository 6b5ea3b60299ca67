"""Gradients are exact for any accumulation and reduction, and exist once in memory."""

import dataclasses
import itertools
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaspeed.config.resolve import Run
from megaspeed.data.corpus import PreparedCorpus
from megaspeed.measurement.verification.comparison import TOLERANCES, compare_gradients
from megaspeed.measurement.verification.reference import ReferenceRun
from megaspeed.measurement.verification.verify import gather_gradients
from megaspeed.tensor_parallel.weight_gradients import MatrixLayer
from megaspeed.topology.context import ParallelContext
from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.zero.buckets import GradientBucket, Reducer
from tests.support.rank_pool import RankFailure, RankPool
from tests.support.tiny import BF16_IN_FP32, LLAMA, tiny_corpus
from tests.support.wide_product import products_on_cpu
from tests.zero.one_rank import OFFLOAD, OneRank, one_rank, reference_of, small_run


def first_step(rank: OneRank) -> tuple[dict[str, Tensor], float]:
    """Return (logical gradients of step 1 on rank 0, the norm that the step reports)."""
    gathered: list[Any] = []
    result = rank.train_step(0, look=lambda: gathered.append(gather_gradients(rank.worker)))
    return ({} if gathered[0] is None else dict(gathered[0].tensors)), result.grad_norm


def are_equal(
    gradients: dict[str, Tensor],
    reference: ReferenceRun,
    allowed: float = TOLERANCES["fp32"].gradient,
) -> bool:
    """Return whether the logical gradients of step 1 are those of the reference."""
    return all(d.equal for d in compare_gradients(gradients, reference.first_gradients, allowed))


def gradients_of_two_steps(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> tuple[dict[str, Tensor], list[float]]:
    """Return (logical gradients of step 1 on rank 0, the norms of both steps)."""
    with one_rank(launch, run, corpus) as rank:
        gradients, norm = first_step(rank)
        return gradients, [norm, rank.train_step(1).grad_norm]


PER_STEP, PER_MICRO_BATCH = "per_step", "per_micro_batch"
SMALL_BUCKETS = {"reduce_bucket_size": 3000}  # some parameters are larger, others share a bucket


@pytest.mark.parametrize(
    ("dp", "stage", "reduction", "zero"),
    [
        (2, 0, PER_STEP, {**SMALL_BUCKETS, "overlap_comm": True}),
        (3, 1, PER_STEP, {**SMALL_BUCKETS, "overlap_comm": True}),
        (2, 1, PER_STEP, {"use_multi_rank_bucket_allreduce": True}),
        (2, 1, PER_STEP, OFFLOAD),
        (3, 2, PER_MICRO_BATCH, {**SMALL_BUCKETS, "overlap_comm": True}),
        (2, 2, PER_MICRO_BATCH, {**SMALL_BUCKETS, "reduce_scatter": False}),
        (2, 2, PER_MICRO_BATCH, OFFLOAD),
        (3, 3, PER_MICRO_BATCH, SMALL_BUCKETS),
        (3, 3, PER_STEP, {**SMALL_BUCKETS, "overlap_comm": True}),
        (2, 3, PER_STEP, {"reduce_scatter": False, "overlap_comm": False}),
        (2, 3, PER_MICRO_BATCH, OFFLOAD),
        (1, 3, PER_MICRO_BATCH, OFFLOAD),
    ],
)
def test_gradients_equal_those_of_one_process(
    pool: RankPool,
    text: Path,
    cache: Path,
    dp: int,
    stage: int,
    reduction: str,
    zero: dict[str, Any],
) -> None:
    run = small_run(
        text,
        dp=dp,
        gradient_accumulation_steps=3,
        train_batch_size=3 * dp,
        zero_optimization={"stage": stage, **zero},
        parallel={"gradient_reduction": reduction},
    )
    corpus = tiny_corpus(run, cache)
    reference = reference_of(run, corpus, steps=2)
    (gradients, norms), *_ = pool.run(dp, gradients_of_two_steps, run, corpus)
    assert are_equal(gradients, reference)
    assert norms == pytest.approx(reference.grad_norms, rel=1e-5)


@pytest.mark.parametrize("zero", [{"stage": 2, **OFFLOAD}, {"stage": 3}])
def test_sums_that_are_sent_in_fp16_are_the_mean_of_the_data_ranks(
    pool: RankPool, text: Path, cache: Path, zero: dict[str, Any]
) -> None:
    """All sums are divided by dp first, also those of norms and biases over the micro-batches."""
    run = small_run(
        text,
        dp=2,
        gradient_accumulation_steps=3,
        train_batch_size=6,
        communication_data_type="fp16",
        zero_optimization=zero,
        parallel={"gradient_reduction": PER_MICRO_BATCH},
    )
    corpus = tiny_corpus(run, cache)
    (gradients, _), *_ = pool.run(2, gradients_of_two_steps, run, corpus)
    assert are_equal(gradients, reference_of(run, corpus), allowed=2e-3)


def gradients_beside_another_device(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> tuple[dict[str, Tensor], list[float]]:
    """Like ``gradients_of_two_steps``, but moving a tensor to this rank's device copies it."""
    create, device = ParallelContext.create, torch.device("cpu", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ParallelContext,
            "create",
            lambda *args, **options: dataclasses.replace(create(*args, **options), device=device),
        )
        return gradients_of_two_steps(launch, run, corpus)


def test_offloaded_sums_over_tensor_ranks_and_stages_return_to_the_host(
    pool: RankPool, text: Path, cache: Path
) -> None:
    run = small_run(
        text,
        pp=2,
        tp=2,
        parallel={"sequence_parallel": True},
        zero_optimization={"stage": 1, **OFFLOAD},
    )
    corpus = tiny_corpus(run, cache)
    reference = reference_of(run, corpus, steps=2)
    (gradients, norms), *_ = pool.run(4, gradients_beside_another_device, run, corpus)
    assert are_equal(gradients, reference)
    assert norms == pytest.approx(reference.grad_norms, rel=1e-5)


def step_without_positions(launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus) -> float:
    """Train a step whose second micro-batch does not use the learned positions."""
    with one_rank(launch, run, corpus) as rank:
        embedding: Any = rank.engine.module.embedding
        forward, calls = embedding.forward, itertools.count()

        def skipping(tokens: Tensor, *others: Any) -> Tensor:
            if next(calls) != 1:
                return forward(tokens, *others)
            found: Tensor = embedding.tokens(tokens)
            return found

        embedding.forward = skipping
        return rank.train_step(0).grad_norm


@pytest.mark.parametrize(
    ("stage", "reduction", "overlap"), [(1, PER_STEP, True), (2, PER_MICRO_BATCH, False)]
)
def test_a_parameter_without_a_gradient_is_named(
    pool: RankPool, text: Path, cache: Path, stage: int, reduction: str, overlap: bool
) -> None:
    """Otherwise its bucket would never be sent, and the bucket's other gradients would be lost."""
    run = small_run(
        text,
        dp=2,
        zero_optimization={"stage": stage, "overlap_comm": overlap},
        parallel={"gradient_reduction": reduction},
    )
    with pytest.raises(RankFailure, match=r"have none: embedding\.positions\.weight"):
        pool.run(2, step_without_positions, run, tiny_corpus(run, cache))


def share_of_rounded_elements(launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus) -> float:
    """Return the share of the reduced gradient's elements that are bf16 numbers."""
    rounded: list[Tensor] = []

    def look() -> None:
        for fragment in rank.engine.gradients.fragments:
            assert fragment.values.dtype == torch.float32
            rounded.append(fragment.values.bfloat16().float() == fragment.values)

    with one_rank(launch, run, corpus) as rank:
        rank.train_step(0, look=look)
    return float(torch.cat(rounded).float().mean())


@pytest.mark.parametrize("reduction", [PER_STEP, PER_MICRO_BATCH])
@pytest.mark.parametrize("stage", [2, 3])
def test_sums_in_fp32_are_not_rounded_to_bf16(
    pool: RankPool, text: Path, cache: Path, stage: int, reduction: str
) -> None:
    run = small_run(
        text,
        dp=2,
        zero_optimization={"stage": stage},
        parallel={"gradient_reduction": reduction},
        **BF16_IN_FP32,
    )
    corpus = tiny_corpus(run, cache)
    assert max(pool.run(2, share_of_rounded_elements, run, corpus)) < 0.5


def test_gradients_are_sent_in_the_stated_dtype(pool: RankPool, text: Path, cache: Path) -> None:
    run = small_run(
        text, dp=2, zero_optimization={"stage": 1}, communication_data_type="bf16", **BF16_IN_FP32
    )
    corpus = tiny_corpus(run, cache)
    assert pool.run(2, share_of_rounded_elements, run, corpus) == [1.0, 1.0]


def most_gradient_bytes_per_element(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> float:
    """Return the step's highest number of gradient bytes, divided by the elements of the model."""
    with one_rank(launch, run, corpus) as rank:
        elements = sum(p.numel() for p in rank.engine.module.parameters())
        return rank.measured_steps().peak.gradients / elements


@pytest.mark.parametrize("precision", [{}, BF16_IN_FP32])
def test_zero1_holds_one_fp32_gradient_of_every_parameter(
    pool: RankPool, text: Path, cache: Path, precision: dict[str, Any]
) -> None:
    # There are few tokens and many parameters, so gradients take most of the memory.
    run = small_run(
        text,
        dp=2,
        model={"hidden_size": 128},
        train_batch_size=4,
        zero_optimization={"stage": 1},
        **precision,
    )
    corpus = tiny_corpus(run, cache)
    assert max(pool.run(2, most_gradient_bytes_per_element, run, corpus)) < 1.15 * 4


def padding_and_messages(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus
) -> tuple[bool, int, int]:
    """Return (all of the partition is finite, elements of padding, most messages in flight)."""
    empty, send, in_flight = torch.empty, Reducer.send, []

    def counted(reducer: Reducer, bucket: GradientBucket, *, last: bool) -> None:
        send(reducer, bucket, last=last)
        in_flight.append(len(reducer._in_flight))

    with one_rank(launch, run, corpus) as rank, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *size, **how: empty(*size, **how).fill_(math.nan))
        patch.setattr(Reducer, "send", counted)
        rank.train_step(0)
        gradients = rank.engine.gradients
        held = sum(fragment.values.numel() for fragment in gradients.fragments)
        own = [bucket.partition for bucket in gradients._buckets]
        padding = sum(values.numel() for values in own) - held
        return all(bool(values.isfinite().all()) for values in own), padding, max(in_flight)


@pytest.mark.parametrize("stage", [1, 2])
def test_padding_is_zero_and_one_bucket_is_exchanged_at_a_time(
    pool: RankPool, text: Path, cache: Path, stage: int
) -> None:
    """Over gloo, the exchange of a bucket needs memory. The padding of a bucket is sent, too."""
    reduction = PER_STEP if stage == 1 else PER_MICRO_BATCH
    run = small_run(
        text, dp=3, zero_optimization={"stage": stage}, parallel={"gradient_reduction": reduction}
    )
    results = pool.run(3, padding_and_messages, run, tiny_corpus(run, cache))
    assert all(finite for finite, *_ in results) and sum(padding for _, padding, _ in results) > 0
    assert {messages for *_, messages in results} == {0}


OFFLOADED_INPUTS = {"activation_checkpointing": "full_offloaded"}
PER_VISIT = {"gradient_reduction": "per_visit", "virtual_stages": 2}


def gradients_and_adders(
    launch: LaunchEnvironment, run: Run, corpus: PreparedCorpus, by_hooks: bool
) -> tuple[dict[str, Tensor], set[str]]:
    """Return (logical gradients of step 1 on rank 0, the layers whose products add to sums)."""
    adds = nullcontext() if by_hooks else products_on_cpu()
    with adds, one_rank(launch, run, corpus) as rank:
        gradients, _ = first_step(rank)
        layers = (
            (name, layer)
            for name, layer in rank.engine.module.named_modules()
            if isinstance(layer, MatrixLayer) and layer.key is not None
        )
        adders = {name: layer.weight.grad is None for name, layer in layers}
        assert all(adders.values()), "autograd computes none of these gradients"
        return gradients, set(adders)


@pytest.mark.parametrize(
    ("layout", "zero", "parallel"),
    [
        ({"dp": 2}, {"stage": 0}, {}),
        ({"dp": 2}, {"stage": 1, "overlap_comm": True}, {"activation_checkpointing": "full"}),
        ({"dp": 2}, {"stage": 3, "overlap_comm": True}, {"gradient_reduction": PER_STEP}),
        ({"pp": 2, "dp": 2}, {"stage": 2, **SMALL_BUCKETS}, PER_VISIT),
        ({"pp": 2, "dp": 2}, {"stage": 3}, PER_VISIT),
        ({"dp": 2}, {"stage": 1, "overlap_comm": True}, OFFLOADED_INPUTS),
        ({"dp": 2}, {"stage": 1}, {"gradient_compression": {"type": "int8"}}),
        ({"pp": 2}, {"stage": 1}, {}),
        ({"tp": 2}, {"stage": 1}, {"sequence_parallel": True}),
        ({"tp": 2}, {"stage": 2}, {"activation_checkpointing": "selective"}),
    ],
    ids=lambda value: "-".join(f"{key}={each}" for key, each in value.items()),
)
def test_products_add_the_gradients_of_blocks_with_the_bits_of_hooks(
    pool: RankPool,
    text: Path,
    cache: Path,
    layout: dict[str, int],
    zero: dict[str, Any],
    parallel: dict[str, Any],
) -> None:
    """Embeddings, norms and key/value heads that tensor ranks share still have hooks. So has an MLP
    that is computed for some tokens at a time: its first product would complete a bucket.
    """
    changes: dict[str, Any] = {"zero_optimization": zero, "parallel": parallel, **BF16_IN_FP32}
    model = {**LLAMA, "num_key_value_heads": 1, "num_hidden_layers": 4}
    run = small_run(text, model=model, **layout, **changes)
    corpus = tiny_corpus(run, cache)
    ranks = math.prod(layout.values())
    (ours, adders), *_ = pool.run(ranks, gradients_and_adders, run, corpus, False)
    (hooked, none), *_ = pool.run(ranks, gradients_and_adders, run, corpus, True)
    assert not none and ours.keys() == hooked.keys()
    assert all(torch.equal(ours[name], hooked[name]) for name in ours)
    modules = {name.split(".", 2)[2] for name in adders}
    shared = {"attention.qkv"} if layout.get("tp") == 2 else set()
    products = {"attention.qkv", "attention.output", "mlp.gate_up", "mlp.down"} - shared
    assert modules == (set() if parallel is OFFLOADED_INPUTS else products)

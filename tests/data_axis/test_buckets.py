"""Which gradients are reduced together, when and how, by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaspeed.config.resolve import Run
from megaspeed.data_axis.axis import DataAxis, data_axis_of
from megaspeed.data_axis.buckets import Bucket, neighbours
from megaspeed.pipeline.schedules import pipeline_of
from tests.support.tiny import tiny_run

TEXT = Path(__file__).parents[2] / "LICENSE"
UNTIED = {"tie_word_embeddings": False}


def run_of_data_ranks(dp: int, zero: dict[str, Any] | None = None, **changes: Any) -> Run:
    values = {"gradient_accumulation_steps": 2, "train_batch_size": 2 * dp, **changes}
    return tiny_run(TEXT, dp=dp, zero_optimization=zero or {}, **values)


def plan_of(dp: int, zero: dict[str, Any], device: str = "cuda", **changes: Any) -> DataAxis:
    return data_axis_of(run_of_data_ranks(dp, zero, **changes), 0, device)


def names(bucket: Bucket) -> list[str]:
    return [parameter.name for parameter in bucket.parameters]


@pytest.mark.parametrize(
    ("most", "alone", "expected"),
    [
        (10, None, [[4], [3], [1, 2], [0]]),
        (1000, None, [[0, 1, 2, 3, 4]]),
        (1000, 3, [[4], [3], [0, 1, 2]]),
        (1000, 4, [[4], [0, 1, 2, 3]]),
    ],
)
def test_neighbours_share_a_bucket_from_the_last_to_the_first(
    most: int, alone: int | None, expected: list[list[int]]
) -> None:
    assert [list(each) for each in neighbours([8, 4, 4, 8, 40], most, alone)] == expected


def test_at_zero_3_a_part_of_several_parameters_is_at_most_a_sub_group() -> None:
    for stage, bounded in ((1, False), (3, True)):
        plan = plan_of(2, {"stage": stage, "reduce_bucket_size": 10**6, "sub_group_size": 3000})
        several = [bucket.part for bucket in plan.buckets if len(bucket.parameters) > 1]
        assert (max(several) <= 3000) is bounded


@pytest.mark.parametrize(("reduction", "alone"), [("per_micro_batch", True), ("per_step", False)])
def test_the_heads_weight_is_alone_unless_the_complete_gradient_is_kept(
    reduction: str, alone: bool
) -> None:
    zero = {"stage": 2, "reduce_bucket_size": 10**6}
    plan = plan_of(2, zero, parallel={"gradient_reduction": reduction}, model=UNTIED)
    bucket = plan.bucket_of["head.output.weight"]
    assert (names(bucket) == ["head.output.weight"]) is alone
    assert bucket.is_from_loss is alone


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dp", [1, 2, 3, 5])
def test_the_shards_own_each_element_once(stage: int, dp: int) -> None:
    plan = plan_of(dp, {"stage": stage, "reduce_bucket_size": 3000})
    shards = 1 if stage == 0 else dp
    for bucket in plan.buckets:
        owned = [own for shard in range(shards) for own in bucket.owned(shard)]
        for own in owned:
            assert own.offset >= 0 and own.offset + own.length <= bucket.part
        for parameter in bucket.parameters:
            ranges = [(own.start, own.length) for own in owned if own.parameter is parameter]
            places = [i for start, length in ranges for i in range(start, start + length)]
            assert places == list(range(parameter.elements))


PER_STEP = {"parallel": {"gradient_reduction": "per_step"}}
OVERLAP: dict[str, Any] = {"overlap_comm": True}
# keeps, when, collective, copies, times a step
KINDS: dict[str, tuple[Any, ...]] = {
    "one rank": (1, {"stage": 2}, {}, *[("complete", "after", None, False, 1)] * 2),
    "ZeRO-0": (2, {"stage": 0}, {}, *[("complete", "after", "all_reduce", False, 1)] * 2),
    "ZeRO-1": (2, {"stage": 1}, {}, *[("complete", "after", "reduce_scatter", False, 1)] * 2),
    "ZeRO-1, overlap": (
        *(2, {"stage": 1, **OVERLAP}, {}),
        *[("complete", "step", "reduce_scatter", False, 1)] * 2,
    ),
    "ZeRO-2": (
        *(2, {"stage": 2}, {}),
        ("partition", "micro_batch", "reduce_scatter", True, 2),
        ("packed", "step", "reduce_scatter", True, 1),
    ),
    "ZeRO-2, all-reduce": (
        *(2, {"stage": 2, "reduce_scatter": False}, {}),
        ("partition", "micro_batch", "all_reduce", True, 2),
        ("packed", "step", "all_reduce", True, 1),
    ),
    "ZeRO-3, one micro-batch": (
        *(2, {"stage": 3}, {"gradient_accumulation_steps": 1}),
        *[("partition", "micro_batch", "reduce_scatter", True, 1)] * 2,
    ),
    # It is copied from the order of the parameters to that of the rows.
    "ZeRO-3, each step": (
        *(2, {"stage": 3}, PER_STEP),
        *[("complete", "after", "reduce_scatter", True, 1)] * 2,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_when_and_how_gradients_are_reduced(kind: str) -> None:
    dp, zero, changes, matrix_reduction, vector_reduction = KINDS[kind]
    run = run_of_data_ranks(dp, {"overlap_comm": False, **zero}, **changes)
    plan, pipeline = data_axis_of(run, 0, "cuda"), pipeline_of(run)
    for bucket in plan.buckets:
        how, is_vector = bucket.reduction, len(bucket.parameters[0].shape) == 1
        found = (how.keeps, how.when, how.collective, how.copies, bucket.times(pipeline))
        assert found == (vector_reduction if is_vector else matrix_reduction)
    on_cpu = data_axis_of(run, 0, "cpu")
    for here, there in zip(plan.buckets, on_cpu.buckets, strict=True):
        if here.reduction.collective == "reduce_scatter":  # gloo's sends twice as many bytes
            assert there.reduction == replace(here.reduction, collective="all_to_all")
        else:
            assert there.reduction == here.reduction


def test_a_sum_that_is_too_large_for_fp16_is_divided_first() -> None:
    for sent, divides in (("fp16", "before"), ("bf16", "after")):
        how = plan_of(2, {"stage": 1}, communication_data_type=sent).matrix_reduction
        assert (how.divides, how.copies, how.total, how.sent) == (divides, True, "fp32", sent)


def test_a_visit_adds_up_its_gradients() -> None:
    """Matrices are reduced at the end of each visit, norms once a step."""
    run = tiny_run(
        TEXT,
        pp=2,
        dp=2,
        model={"num_hidden_layers": 4},
        parallel={"virtual_stages": 2, "micro_batch_groups": 2},
        gradient_accumulation_steps=4,
        train_batch_size=8,
        bf16={"enabled": True},
        data_types={"grad_accum_dtype": "fp32"},
        zero_optimization={"stage": 3},
    )
    plan, pipeline = data_axis_of(run, 1, "cuda"), pipeline_of(run)
    assert {bucket.chunk for bucket in plan.buckets} == {0, 1}
    how = plan.matrix_reduction
    assert (how.keeps, how.when, how.computed) == ("partition", "visit", "fp32")
    assert how.times(pipeline) == 2
    packed = [bucket for bucket in plan.buckets if bucket.reduction.keeps == "packed"]
    assert {(b.reduction.collected, b.reduction.when) for b in packed} == {("visit", "step")}


def test_what_is_sent_itself_needs_no_memory() -> None:
    """A matrix that is alone is sent as autograd computes it, and norms as they are added up."""
    zero = {"stage": 2, "reduce_bucket_size": 1}
    assert not any(bucket.message_bytes for bucket in plan_of(2, zero, model=UNTIED).buckets)
    in_bf16 = plan_of(2, zero, model=UNTIED, communication_data_type="bf16")
    assert all(b.message_bytes == 2 * b.elements for b in in_bf16.buckets)
    exchanged = plan_of(2, zero, "cpu", model=UNTIED)
    assert all(b.message_bytes == 4 * b.elements for b in exchanged.buckets)

"""The plan of a step agrees with the predicted traffic, and a plan with a mistake is refused."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from megaspeed.config.resolve import BYTES_OF, Run
from megaspeed.data_axis import axis as plan
from megaspeed.data_axis import buckets, gathers, orthogonalization
from megaspeed.data_axis.axis import DataAxis, data_axis_of
from megaspeed.data_axis.gathers import Gather
from megaspeed.data_axis.orthogonalization import Batch, Orthogonalization, Part
from megaspeed.data_axis.steps import check_data_axis, steps_of
from megaspeed.pipeline.schedules import ScheduleError, pipeline_of
from megaspeed.planning.costs.traffic import predict_traffic
from tests.planning.costs.random_runs import random_runs
from tests.support.tiny import LLAMA, MUON, tiny_run

TEXT = Path(__file__).parents[2] / "LICENSE"


@pytest.mark.parametrize("seed", range(3))
def test_gathers_and_reductions_over_shards_add_up_to_the_predicted_traffic(seed: int) -> None:
    for run, device in random_runs(Random(seed), 15):
        pipeline, shards = pipeline_of(run), run.grid.shard
        for stage in range(run.grid.pp):
            axis = data_axis_of(run, stage, device)
            check_data_axis(axis, pipeline, stage)
            works = list(steps_of(axis, pipeline, stage))
            times = Counter(bucket for work in works for bucket in work.reduces)
            assert times == {bucket: bucket.times(pipeline) for bucket in axis.buckets}
            sent = predict_traffic(run, stage, device)
            name: Any = "shard" if run.grid.is_hybrid else "dp"
            gathered = sum(each.message_bytes for work in works for each in work.gathers)
            if shards > 1:
                assert sent.get((name, "all_gather"), 0) == gathered * (shards - 1) // shards
            if shards > 1 and run.compression is None:
                size = sum(
                    count * bucket.elements * BYTES_OF[bucket.reduction.sent]
                    for bucket, count in times.items()
                )
                collective = axis.matrix_reduction.collective
                assert collective is not None
                rounds = 2 if collective == "all_reduce" else 1
                of_gradients = sent[name, collective]
                if axis.orthogonalization and (collective, run.grid.tp) == ("all_to_all", 1):
                    plan = axis.orthogonalization
                    elements = max(map(plan.sent_by, range(plan.members)))
                    of_gradients -= elements * BYTES_OF[run.muon_dtype]
                assert of_gradients == rounds * size * (shards - 1) // shards


# --- mistakes -------------------------------------------------------------------------------------

Mistake = Callable[[pytest.MonkeyPatch], None]


def neighbours_overlap(patch: pytest.MonkeyPatch) -> None:
    ranges = buckets.neighbours

    def overlapping(sizes: Sequence[int], most: int, alone: int | None = None) -> list[range]:
        return [range(max(0, each.start - 1), each.stop) for each in ranges(sizes, most, alone)]

    patch.setattr(buckets, "neighbours", overlapping)


def the_first_parameters_are_omitted(patch: pytest.MonkeyPatch) -> None:
    ranges = buckets.neighbours
    patch.setattr(buckets, "neighbours", lambda *args, **how: ranges(*args, **how)[:-1])


def the_norms_are_in_no_bucket(patch: pytest.MonkeyPatch) -> None:
    of_run = buckets.buckets_of
    patch.setattr(
        plan,
        "buckets_of",
        lambda *args: [b for b in of_run(*args) if len(b.parameters[0].shape) > 1],
    )


def parts_are_rounded_down(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(buckets, "_ceil", lambda elements, multiple: elements // multiple * multiple)


def changed(patch: pytest.MonkeyPatch, module: Any, name: str, **changes: Any) -> None:
    """Change the reduction that a function of a module returns."""
    how = getattr(module, name)
    patch.setattr(module, name, lambda *args: replace(how(*args), **changes))


def complete_gradients_are_reduced_in_each_backward(patch: pytest.MonkeyPatch) -> None:
    each = {"collected": "micro_batch", "when": "micro_batch"}
    changed(patch, plan, "reduction_of_matrices", keeps="complete", **each)


def nothing_is_sent(patch: pytest.MonkeyPatch) -> None:
    changed(patch, plan, "reduction_of_matrices", collective=None)


def replicas_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    changed(patch, plan, "reduction_of_matrices", holders=6)


def packed_sums_are_reduced_in_all_backwards_but_the_last(patch: pytest.MonkeyPatch) -> None:
    changed(patch, buckets, "_reduction_of_vectors", keeps="packed", when="micro_batch")


def passes_change(patch: pytest.MonkeyPatch, direction: str, change: Callable[..., Any]) -> None:
    made = gathers.gathers_of_passes

    def mistaken(*args: Any) -> dict[Any, Any]:
        passes = made(*args).items()
        return {own: change(order) if own[0] == direction else order for own, order in passes}

    patch.setattr(plan, "gathers_of_passes", mistaken)


def a_forward_does_not_gather_its_last_layer(patch: pytest.MonkeyPatch) -> None:
    passes_change(patch, "forward", lambda order: [*order[:-1], order[0]])


def a_forward_stops_before_its_last_layer(patch: pytest.MonkeyPatch) -> None:
    passes_change(patch, "forward", lambda order: order[:-1])


def a_backward_gathers_in_the_order_of_a_forward(patch: pytest.MonkeyPatch) -> None:
    passes_change(patch, "backward", lambda order: order[::-1])


def the_last_pass_gathers_ahead(patch: pytest.MonkeyPatch) -> None:
    held = DataAxis.held

    def ahead(axis: DataAxis, own: Any, following: Any) -> list[list[Gather]]:
        return held(axis, own, following or ("forward", 0))

    patch.setattr(DataAxis, "held", ahead)


def only_the_next_layer_is_held(patch: pytest.MonkeyPatch) -> None:
    held = gathers._held
    patch.setattr(gathers, "_held", lambda zero, coming: held(zero, coming)[1:])


MISTAKES: dict[Mistake, tuple[int, str]] = {
    neighbours_overlap: (2, "is in 2 buckets"),
    the_first_parameters_are_omitted: (2, "is in 0 buckets"),
    the_norms_are_in_no_bucket: (1, "is in 0 buckets"),
    parts_are_rounded_down: (3, "do not own each element"),
    nothing_is_sent: (2, "is over 3 ranks"),
    replicas_are_forgotten: (1, "not summed over its replicas"),
    complete_gradients_are_reduced_in_each_backward: (2, "for the second time"),
    packed_sums_are_reduced_in_all_backwards_but_the_last: (2, "after its last reduction"),
    a_forward_does_not_gather_its_last_layer: (3, "neither gathered for its layer nor persistent"),
    a_forward_stops_before_its_last_layer: (3, "neither gathered for its layer nor persistent"),
    a_backward_gathers_in_the_order_of_a_forward: (
        3,
        "neither gathered for its layer nor persistent",
    ),
    the_last_pass_gathers_ahead: (3, "still held after the last pass"),
    only_the_next_layer_is_held: (3, "computes a layer that is not held"),
}


def rounds_change(patch: pytest.MonkeyPatch, change: Callable[[list[list[Batch]]], Any]) -> None:
    made = orthogonalization._rounds
    patch.setattr(orthogonalization, "_rounds", lambda *args: change(made(*args)))


def the_first_round_is_omitted(patch: pytest.MonkeyPatch) -> None:
    rounds_change(patch, lambda rounds: rounds[1:])


def the_first_round_is_repeated(patch: pytest.MonkeyPatch) -> None:
    rounds_change(patch, lambda rounds: [rounds[0], *rounds])


def two_rounds_are_one(patch: pytest.MonkeyPatch) -> None:
    rounds_change(patch, lambda rounds: [[*rounds[0], *rounds[1]], *rounds[2:]])


def parts_change(patch: pytest.MonkeyPatch, change: Callable[[Part, int], Part]) -> None:
    made = Orthogonalization.parts

    def mistaken(plan: Orthogonalization, batch: Batch, member: int) -> list[Part]:
        return [change(part, member) for part in made(plan, batch, member)]

    patch.setattr(Orthogonalization, "parts", mistaken)


def all_parts_are_sent_to_the_same_place(patch: pytest.MonkeyPatch) -> None:
    parts_change(patch, lambda part, _: part._replace(place=0))


def a_rank_omits_its_last_element(patch: pytest.MonkeyPatch) -> None:
    parts_change(patch, lambda part, member: part._replace(length=part.length - (member == 1)))


def copies_are_sent_too(patch: pytest.MonkeyPatch) -> None:
    parts_change(patch, lambda part, _: part._replace(is_copy=False))


MUON_MISTAKES: dict[Mistake, tuple[int, str]] = {
    the_first_round_is_omitted: (1, "is in 0 batches"),
    the_first_round_is_repeated: (1, "is in 2 batches"),
    two_rounds_are_one: (1, "owns several batches of round 0"),
    all_parts_are_sent_to_the_same_place: (3, "do not fill its batch once"),
    a_rank_omits_its_last_element: (2, "do not fill its batch once"),
    copies_are_sent_too: (0, "do not fill its batch once"),
}


def run_at(stage: int, *, muon: bool = False) -> Run:
    more: dict[str, Any] = {}
    if muon:  # at ZeRO-0, tensor ranks hold copies of key/value heads
        more = {"optimizer": MUON, "model": LLAMA, "tp": 4 if stage == 0 else 1}
    return tiny_run(
        TEXT,
        **more,
        dp=3,
        zero_optimization={"stage": stage, "reduce_bucket_size": 5000},
        gradient_accumulation_steps=2,
        train_batch_size=6,
    )


@pytest.mark.parametrize(
    "mistake", [*MISTAKES, *MUON_MISTAKES], ids=lambda mistake: mistake.__name__
)
def test_a_plan_with_a_mistake_is_refused(mistake: Mistake) -> None:
    stage, reason = (MISTAKES | MUON_MISTAKES)[mistake]
    run = run_at(stage, muon=mistake in MUON_MISTAKES)
    plan._data_axis_of.cache_clear()
    check_data_axis(data_axis_of(run, 0, "cuda"), pipeline_of(run), 0)
    plan._data_axis_of.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        mistake(patch)
        mistaken = data_axis_of(run, 0, "cuda")
        with pytest.raises(ScheduleError, match=reason):
            check_data_axis(mistaken, pipeline_of(run), 0)
    plan._data_axis_of.cache_clear()

"""What is reduced, gathered and held together, by hand."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megaspeed.config.deepspeed_keys import ZeroConfig
from megaspeed.config.message_sizes import buckets, gathered_together, held_in_pass
from megaspeed.config.resolve import Run
from tests.support.tiny import tiny_run

TEXT = Path(__file__).parents[2] / "LICENSE"


def run_of(dp: int, reduction: str = "per_step", **zero: Any) -> Run:
    parallel = {"gradient_reduction": reduction}
    changes: dict[str, Any] = {"zero_optimization": zero, "parallel": parallel}
    return tiny_run(TEXT, dp=dp, gradient_accumulation_steps=2, **changes)


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({"stage": 1, "reduce_bucket_size": 10}, [[4], [3], [1, 2], [0]]),
        ({"stage": 1, "reduce_bucket_size": 1000}, [[0, 1, 2, 3, 4]]),
        # At ZeRO-3, a rank's part of a bucket has at most sub_group_size elements: 4 x 3.
        ({"stage": 3, "reduce_bucket_size": 1000, "sub_group_size": 3}, [[4], [2, 3], [0, 1]]),
        ({"stage": 1, "reduce_bucket_size": 1000, "sub_group_size": 3}, [[0, 1, 2, 3, 4]]),
    ],
)
def test_buckets_are_neighbours_from_the_last_to_the_first(
    zero: dict[str, Any], expected: list[list[int]]
) -> None:
    sizes = [8, 4, 4, 8, 40]
    assert [list(bucket) for bucket in buckets(run_of(4, **zero), sizes)] == expected


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("per_micro_batch", [[3], [2], [0, 1]]), ("per_step", [[0, 1, 2, 3]])],
)
def test_the_heads_weight_is_alone_unless_the_complete_gradient_is_kept(
    reduction: str, expected: list[list[int]]
) -> None:
    run = run_of(2, reduction, stage=2, reduce_bucket_size=1000)
    assert [list(bucket) for bucket in buckets(run, [8, 4, 4, 8], head=2)] == expected


@dataclass(frozen=True, eq=False)
class Layer:
    """What is gathered for a layer."""

    name: str
    elements: int


A, B, C = Layer("a", 5), Layer("b", 5), Layer("c", 5)


def held(zero: ZeroConfig, *passes: list[Layer]) -> str:
    order, following = passes
    layers = held_in_pass(zero, order, following)
    return " ".join("".join(layer.name for layer in hold) or "-" for hold in layers)


def test_each_layer_and_the_next_one_are_held_and_after_the_pass_what_the_next_pass_needs() -> None:
    zero = ZeroConfig(stage=3, stage3_prefetch_bucket_size=1)
    assert held(zero, [A, B, C], []) == "ab bc c -"
    assert held(zero, [A, B, C], [C, B, A]) == "ab bc cb cb"
    # The next pass needs a and b. Only what is in memory already is held for it.
    assert held(zero, [A, B, C], [A, B]) == "ab bc ca a"
    bounded = zero.model_copy(update={"stage3_max_live_parameters": 9})
    assert held(bounded, [A, B, C], [C, B, A]) == "a b c c"


def test_small_blocks_are_gathered_together_up_to_half_of_what_may_live() -> None:
    zero = ZeroConfig(stage=3, stage3_prefetch_bucket_size=10)
    assert [list(each) for each in gathered_together(zero, [5] * 5)] == [[0], [1, 2], [3, 4]]
    bounded = zero.model_copy(update={"stage3_max_live_parameters": 18})
    assert [list(each) for each in gathered_together(bounded, [5] * 3)] == [[0], [1], [2]]

"""Partitions agree with brute force, including the rule that chooses between equal costs."""

import time
from collections.abc import Sequence
from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from megaspeed.pipeline.partition import partition_layers
from tests.support.machine import limit


def brute_force(costs: Sequence[int], pipeline_stages: int) -> list[range]:
    """Return the best split by the criteria: bottleneck, squares, short early stages."""

    def judge(ends: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        sums = [sum(costs[start:end]) for start, end in pairwise([0, *ends])]
        return max(sums), sum(cost**2 for cost in sums), ends

    layers = len(costs)
    splits = ((*cut, layers) for cut in combinations(range(1, layers), pipeline_stages - 1))
    return [range(start, end) for start, end in pairwise([0, *min(splits, key=judge)])]


def sizes(partition: Sequence[range]) -> list[int]:
    return [len(layers) for layers in partition]


COSTS = st.sampled_from([4, 10**18]).flatmap(
    lambda largest: st.lists(st.integers(0, largest), min_size=1, max_size=9)
)


@settings(max_examples=400)
@given(costs=COSTS, data=st.data())
def test_partition_is_the_best_of_all_splits(costs: list[int], data: st.DataObject) -> None:
    pipeline_stages = data.draw(st.integers(1, min(7, len(costs))))
    assert partition_layers(costs, pipeline_stages) == brute_force(costs, pipeline_stages)


def test_equal_layers_are_spread_evenly_with_the_longer_stages_last() -> None:
    assert partition_layers([1] * 9, 4) == [range(0, 2), range(2, 4), range(4, 6), range(6, 9)]


def test_a_costly_head_takes_blocks_from_the_last_stage() -> None:
    # Layers are [embedding, 8 blocks, head]. 5 + 60 | 20 + 40 beats an equal count of layers.
    assert sizes(partition_layers([5, *[10] * 8, 40], 2)) == [7, 3]


def test_a_tiny_layer_is_not_lost_beside_a_huge_one() -> None:
    assert sizes(partition_layers([10**30, 1, 1, 10**30], 2)) == [2, 2]


def test_as_many_layers_as_stages_gives_one_each() -> None:
    assert partition_layers([5, 0, 1], 3) == [range(0, 1), range(1, 2), range(2, 3)]


def test_107_layers_on_35_stages_take_no_time() -> None:
    costs = [1, *[10] * 105, 9]
    started = time.process_time()
    partition = partition_layers(costs, 35)
    assert time.process_time() - started < limit(0.5)
    assert len(partition) == 35
    assert [layer for layers in partition for layer in layers] == list(range(107))
    # 105 blocks fill 35 stages with three each. So one stage has the head and three blocks.
    assert max(sum(costs[layer] for layer in layers) for layers in partition) == 39

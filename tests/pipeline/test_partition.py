"""Partitions against brute force, and the rule that chooses between equally good ones."""

import random
import time
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations, pairwise

import pytest

from megaspeed.pipeline.partition import PartitionError, partition_layers


def brute_force(costs: Sequence[float], pipeline_stages: int) -> list[range]:
    """All splits, judged as `partition` says: bottleneck, then squares, then short early stages."""

    def judge(ends: tuple[int, ...]) -> tuple[Fraction, Fraction, tuple[int, ...]]:
        sums = [
            sum(map(Fraction, costs[start:end]), Fraction()) for start, end in pairwise([0, *ends])
        ]
        return max(sums), sum((cost**2 for cost in sums), Fraction()), ends

    layers = len(costs)
    splits = ((*cut, layers) for cut in combinations(range(1, layers), pipeline_stages - 1))
    return [range(start, end) for start, end in pairwise([0, *min(splits, key=judge)])]


def sizes(partition: Sequence[range]) -> list[int]:
    return [len(layers) for layers in partition]


@pytest.mark.parametrize("pipeline_stages", range(1, 8))
def test_partition_is_the_best_of_all_splits(pipeline_stages: int) -> None:
    random_ = random.Random(pipeline_stages)
    for _ in range(60):
        layers = random_.randint(pipeline_stages, 9)
        whole = [float(random_.randint(0, 4)) for _ in range(layers)]
        uneven = [random_.random() for _ in range(layers)]
        for costs in (whole, uneven):
            expected = brute_force(costs, pipeline_stages)
            assert partition_layers(costs, pipeline_stages) == expected, costs


def test_equal_layers_are_spread_evenly_with_the_longer_stages_last() -> None:
    assert partition_layers([1.0] * 9, 4) == [range(0, 2), range(2, 4), range(4, 6), range(6, 9)]


def test_a_costly_head_takes_blocks_from_the_last_stage() -> None:
    # [embedding, 8 blocks, head]: 0.5 + 3 + 3 | 2 + 4 beats an equal count of layers.
    assert sizes(partition_layers([0.5, *[1.0] * 8, 4.0], 2)) == [7, 3]


def test_rounding_decides_no_split() -> None:
    # Added up as floats, 0.1 + 0.2 is more than 0.3.
    assert sizes(partition_layers([0.1, 0.2, 0.3, 0.1, 0.2], 3)) == sizes(
        brute_force([0.1, 0.2, 0.3, 0.1, 0.2], 3)
    )
    # A tiny layer is not lost beside a huge one.
    assert sizes(partition_layers([1e30, 1.0, 1.0, 1e30], 2)) == [2, 2]


def test_as_many_layers_as_stages_gives_one_each() -> None:
    assert partition_layers([5.0, 0.0, 1.0], 3) == [range(0, 1), range(1, 2), range(2, 3)]


def test_107_layers_on_35_stages_take_no_time() -> None:
    costs = [0.1, *[1.0] * 105, 0.9]
    started = time.perf_counter()
    partition = partition_layers(costs, 35)
    assert time.perf_counter() - started < 0.5
    assert len(partition) == 35
    assert [layer for layers in partition for layer in layers] == list(range(107))
    # 105 blocks fill 35 stages by three; so the head comes on top of three blocks.
    assert max(sum(costs[layer] for layer in layers) for layers in partition) == pytest.approx(3.9)


def test_fewer_layers_than_stages_is_refused_with_both_numbers() -> None:
    with pytest.raises(PartitionError, match=r"5 layers for 8 stages.*to 5 or less.*by 3 or more"):
        partition_layers([1.0] * 5, 8)


def test_no_stage_is_refused() -> None:
    with pytest.raises(PartitionError, match="at least 1 pipeline stage, not 0"):
        partition_layers([1.0], 0)


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), -1.0])
def test_a_cost_that_is_no_amount_of_work_is_refused(cost: float) -> None:
    with pytest.raises(PartitionError, match=r"layer 1: (nan|inf|-1\.0)"):
        partition_layers([1.0, cost, 1.0], 2)

"""Limits of time in tests follow the machine."""

import pytest

from megaspeed.topology.launch import LaunchEnvironment
from tests.support.machine import factor, factor_of, limit
from tests.support.rank_pool import RankPool


@pytest.mark.parametrize(
    ("turns", "used", "load", "expected"),
    [
        ([(0.1, 0.08)], 0.18, 0.0, 1.0),
        ([(0.05, 0.04)], 0.09, 0.5, 1.0),
        ([(0.4, 0.16), (0.25, 0.16)], 0.41, 0.0, 2.5),  # slow products
        ([(0.1, 9.0), (0.1, 0.24)], 0.18, 0.0, 3.0),  # slow starts, after a first one
        ([(0.1, 0.08)], 0.18, 4.0, 2.0),  # others took as much as a test run takes
    ],
)
def test_the_factor_is_that_of_the_slowest(
    turns: list[tuple[float, float]], used: float, load: float, expected: float
) -> None:
    assert factor_of(turns, used, load) == pytest.approx(expected)


@pytest.mark.timeout(40)
def test_limits_of_tests_and_of_ranks_are_multiplied(
    request: pytest.FixtureRequest, pool: RankPool
) -> None:
    assert limit(40) == 40 * factor() >= 40
    marker = request.node.get_closest_marker("timeout")
    assert marker is not None and marker.args == (limit(40),)
    assert pool.run(2, limit_in_a_rank) == [limit(40)] * 2


def limit_in_a_rank(launch: LaunchEnvironment) -> float:
    return limit(40)

"""Limits of time follow the machine. A test run ends with what was skipped and what to send us."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaspeed.topology.launch import LaunchEnvironment
from tests.support.machine import factor, factor_of, limit
from tests.support.rank_pool import RankPool
from tests.support.summary import lines_of_skipped


@pytest.mark.parametrize(
    ("turns", "used", "load", "expected"),
    [
        ([(0.1, 0.08)], 0.18, 0.0, 1.0),
        ([(0.05, 0.04)], 0.09, 0.5, 1.0),
        ([(0.4, 0.16), (0.25, 0.16)], 0.41, 0.0, 2.5),  # slow products
        ([(0.1, 9.0), (0.1, 0.24)], 0.18, 0.0, 3.0),  # slow starts, after a first one
        ([(0.1, 0.08)], 0.18, 4.0, 2.0),  # others took as much as a test run takes
        ([(30.0, 0.08)], 0.18, 0.0, 20.0),
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
    stated = float(request.config.getini("timeout"))
    assert request.config.getoption("timeout") != stated or factor() == 1
    assert pool.run(2, limit_in_a_rank) == [limit(40)] * 2


def limit_in_a_rank(launch: LaunchEnvironment) -> float:
    return limit(40)


def test_skipped_tests_are_grouped_by_reason() -> None:
    reason = "Skipped: needs a GPU"
    skipped = [("b.py::one", reason), ("a.py::two[x]", reason), ("b.py::three", reason)]
    assert lines_of_skipped([*skipped, ("c.py::four", "no root")]) == [
        "needs a GPU: 1 in a.py, 2 in b.py",
        "no root: 1 in c.py",
    ]


TESTS = """
import pytest
from tests.support.machine import limit

def test_one(): pytest.skip("there is no browser")
def test_two(): raise ValueError("broken")
"""


def test_after_a_failure_the_last_lines_state_what_to_send(tmp_path: Path) -> None:
    (tmp_path / "test_both.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-o", "timeout=40"]
    done = subprocess.run(
        [*command, "test_both.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    header, _, rest = done.stdout.partition("1 test skipped")
    assert f"limits of time are multiplied by {factor():.2f}" in header
    assert f"timeout: {math.ceil(limit(40))}s" in header
    skipped, _, sent = rest.partition("1 test failed")
    assert "there is no browser: 1 in test_both.py" in skipped
    assert "megaspeed.cli doctor --config" in sent and f"factor {factor():.2f}" in sent
    assert "FAILED test_both.py::test_two" in sent

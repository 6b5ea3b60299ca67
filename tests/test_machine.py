"""Limits of time follow the machine. Tests that wait take no slot from those that compute. A test
run ends with what was skipped and what to send us.
"""

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megaspeed.topology.launch import LaunchEnvironment
from tests.support.machine import factor, factor_of, limit
from tests.support.rank_pool import RankPool
from tests.support.slots import slot, spread
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


def hold_a_slot(launch: LaunchEnvironment, folder: Path) -> tuple[float, float]:
    """Hold one of two slots until two ranks have held one. Return from when to when."""
    with slot(folder / "slots", 2):
        begin = time.monotonic()
        (folder / f"rank-{launch.rank}").touch()
        while len(list(folder.glob("rank-*"))) < 2:
            time.sleep(0.01)
        time.sleep(0.1)
        return begin, time.monotonic()


def test_as_many_processes_compute_at_once_as_there_are_slots(
    pool: RankPool, tmp_path: Path
) -> None:
    times = pool.run(5, hold_a_slot, tmp_path)
    most = max(sum(begin <= at < end for begin, end in times) for at, _ in times)
    assert most == 2


def test_tests_that_wait_are_spread_over_the_run_but_not_inside_a_module() -> None:
    items = ["a1", "a2", "a3", "b1", "c1", "c2", "c3", "c4", "d1", "d2", "W1", "a4", "W2", "W3"]
    found = spread(items, str.isupper, lambda item: item[0])
    assert " ".join(found) == "a1 a2 a3 W1 b1 W2 c1 c2 c3 c4 W3 d1 d2 a4"
    assert spread(["W1", "W2"], str.isupper, str) == ["W1", "W2"]


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

"""Turns, and noise from given numbers."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from megaspeed.measurement import turns
from megaspeed.measurement.local_ranks import RanksFailed
from megaspeed.measurement.turns import MeasuredRow, Steps, noise_of, take_turns
from tests.support.tiny import tiny_run

TEXT = Path(__file__).parents[2] / "LICENSE"


@pytest.fixture
def take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that lets rows take turns. The launch is a function of label and log."""

    def take(labels: list[str], number: int, launch: Callable[[str, Path], Any]) -> Any:
        monkeypatch.setattr(
            turns, "run_on_ranks", lambda _, label, *rest, log, **more: launch(label, log)
        )
        corpus: Any = None
        return take_turns(
            [
                MeasuredRow(label=label, run=tiny_run(TEXT), make=cast(Any, label))
                for label in labels
            ],
            number,
            corpus,
            Steps(warm_up=1, timed=1, timeout_seconds=1.0),
            device_type="cpu",
            folder=tmp_path,
        )

    return take


def test_rows_alternate_and_one_that_fails_takes_no_turn_after_it(
    take: Callable[..., Any], tmp_path: Path
) -> None:
    taken = []

    def launch(label: str, log: Path) -> list[list[Any]]:
        taken.append(log.name)
        number = len(taken) // 2 + len(taken) % 2
        if (label, number) == ("B b", 2):
            raise RanksFailed("too slow", [["times"]])
        return [[f"times {number}", f"extra {number}"]]

    (a, b), stopped = take(["A", "B b"], 3, launch)
    assert taken == ["a-1.log", "b-b-1.log", "a-2.log", "b-b-2.log", "a-3.log"]
    assert a.turns == [["times 1"], ["times 2"], ["times 3"]] and not stopped
    assert a.extras == ["extra 1"] and a.done, "those of the first turn"
    log = tmp_path / "logs" / "b-b-2.log"
    assert b.failure == f"failed in turn 2: too slow; see {log}" and log.exists()
    assert b.turns == [["times 1"], ["times"]] and not b.done, "all its ranks had their times"


def test_a_first_turn_that_fails_after_its_times_keeps_them(take: Callable[..., Any]) -> None:
    def launch(label: str, log: Path) -> list[list[Any]]:
        raise RanksFailed("no memory", [["times", "extra"], ["times"]] if label == "A" else [])

    (a, b), _ = take(["A", "B"], 1, launch)
    assert a.turns == [["times", "times"]] and a.extras == () and not a.done
    assert a.failure.startswith("failed in turn 1: no memory; see ")
    assert b.failure.startswith("failed in turn 1: no memory") and b.turns == ()


@pytest.mark.parametrize("at", [1, 2, 4])
def test_ctrl_c_keeps_the_turns_that_have_ended(at: int, take: Callable[..., Any]) -> None:
    calls = []

    def launch(label: str, log: Path) -> list[list[Any]]:
        calls.append(label)
        if len(calls) == at:
            raise KeyboardInterrupt
        return [["times"]]

    if at == 1:
        with pytest.raises(KeyboardInterrupt):
            take(["A", "B"], 2, launch)
    else:
        rows, stopped = take(["A", "B"], 2, launch)
        assert stopped and [len(row.turns) for row in rows] == ([1] if at == 2 else [2, 1])


def test_a_drift_that_all_share_is_no_noise() -> None:
    drift = (1.0, 1.5, 0.7)
    assert noise_of([[0.1 * each for each in drift], [0.2 * each for each in drift]]) == (
        pytest.approx(0.0, abs=1e-9)
    )


def test_noise_is_computed_as_by_hand() -> None:
    """There are two contestants and three turns. In logs, each residual is 0.01, -0.02 or 0.01, and
    there are two degrees of freedom: the variance is 12e-4 / 2, and t is 9.92.
    """
    rests = (0.01, -0.02, 0.01)
    seconds = [[math.exp(each) for each in rests], [math.exp(1 - each) for each in rests]]
    expected = math.expm1(9.92 * math.sqrt(2 / 3 * 12e-4 / 2))
    assert noise_of(seconds) == pytest.approx(expected)
    assert noise_of([*seconds[:1], [*seconds[1], 99.0]]) == pytest.approx(expected), "of 3 turns"


@pytest.mark.parametrize("seconds", [[], [[1, 2, 3]], [[1], [2]], [[1, 2, 3], [1, 2]], [[1], []]])
def test_noise_is_unknown_with_one_degree_of_freedom_or_none(seconds: list[list[float]]) -> None:
    assert noise_of(seconds) is None


@pytest.mark.parametrize("turns", [2, 3, 9])
def test_equal_contestants_are_rarely_told_apart_and_more_turns_lower_the_noise(turns: int) -> None:
    """Six contestants are equal. The difference of two exceeds the noise in about 1 %."""
    draw, wrong, noises = random.Random(turns), 0, []
    for _ in range(400):
        logs = [[draw.gauss(0, 0.03) for _ in range(turns)] for _ in range(6)]
        noise = noise_of([[math.exp(each) for each in row] for row in logs])
        assert noise is not None
        first, second = (sum(row) / turns for row in logs[:2])
        wrong += abs(first - second) > math.log1p(noise)
        noises.append(noise)
    assert wrong <= 12
    assert sum(noises) / 400 == pytest.approx(0.03 * 3.3 * math.sqrt(2 / turns), rel=0.35)

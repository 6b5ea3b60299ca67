"""Stop signals are noted, told to all ranks, and afterwards as they were before."""

import os
import signal

import pytest

from megaspeed.topology import Grid, LaunchEnvironment, ParallelContext
from megaspeed.training.stop_signal import STOP_SIGNALS, StopSignal
from tests.rank_pool import RankPool

RANKS = 3


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_noted_and_the_process_lives(number: signal.Signals) -> None:
    with StopSignal() as stop:
        assert stop.received is None
        os.kill(os.getpid(), number)
        assert stop.received is number


def test_the_handlers_that_were_there_before_are_back_afterwards() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopSignal():
        during = [signal.getsignal(number) for number in STOP_SIGNALS]
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    assert not set(map(repr, during)) & set(map(repr, before))


def agreed(
    launch: LaunchEnvironment, signals: list[signal.Signals | None]
) -> list[signal.Signals | None]:
    """What this rank takes from all before and after each rank was sent its own signal."""
    number = signals[launch.rank]
    grid = Grid(pp=1, dp=RANKS, tp=1)
    with StopSignal() as stop, ParallelContext.create(grid, launch, timeout_seconds=30) as context:
        before = stop.agreed(context)
        if number is not None:
            os.kill(os.getpid(), number)
        return [before, stop.agreed(context)]


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_what_one_rank_was_told_all_ranks_know(number: signal.Signals, pool: RankPool) -> None:
    assert pool.run(RANKS, agreed, [None, number, None]) == [[None, number]] * RANKS


def test_ranks_that_were_told_different_things_name_the_same_one(pool: RankPool) -> None:
    told = [signal.SIGUSR1, signal.SIGTERM, None]
    assert pool.run(RANKS, agreed, told) == [[None, signal.SIGTERM]] * RANKS

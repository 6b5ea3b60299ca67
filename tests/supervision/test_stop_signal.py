"""Stop signals are stored, and the earlier handlers are restored."""

import os
import signal

import pytest

from megaspeed.supervision.process_end import STOP_SIGNALS, StopSignal


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

"""A block ends in time, whatever it does, and the limit leaves no trace."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from megaspeed.files.reading import at_most


def test_a_block_that_takes_too_long_is_left() -> None:
    start = time.monotonic()
    steps = []
    with at_most(0.1):
        while True:
            try:
                time.sleep(60)
            except Exception:  # code that walks through folders often ignores an OSError
                steps.append("caught")
    assert time.monotonic() - start < 30  # type: ignore[unreachable]
    assert steps == []


def test_a_block_that_is_done_in_time_is_not_disturbed_later() -> None:
    before, (outer, _) = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    with at_most(0.1):
        pass
    time.sleep(0.2)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == pytest.approx(outer, abs=5)


def test_errors_of_the_block_are_raised() -> None:
    outer, _ = signal.getitimer(signal.ITIMER_REAL)
    with pytest.raises(KeyError), at_most(6000):
        raise KeyError
    assert signal.getitimer(signal.ITIMER_REAL)[0] == pytest.approx(outer, abs=5)


def test_another_thread_has_no_limit() -> None:
    """The doctor reads its configuration in a thread with a deadline of its own."""

    def wait() -> bool:
        with at_most(0.05):
            time.sleep(0.2)
            return True
        return False  # type: ignore[unreachable]

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(wait).result()

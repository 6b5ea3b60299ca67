"""A time limit for a step, even if it waits for a disk or a driver."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


def within(seconds: float, make: Callable[[], Result]) -> Result:
    """Returns the result of `make`, which runs in another thread for at most `seconds`.

    Raises:
        TimeoutError: `make` has not returned in time. Its thread continues in the background.
    """
    future: Future[Result] = Future()

    def work() -> None:
        try:
            future.set_result(make())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=work, daemon=True).start()
    return future.result(timeout=seconds)

"""A time limit for a step, even if it waits for a disk or a driver."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


def within(seconds: float, make: Callable[[], Result]) -> Result:
    """What `make` returns. It runs in another thread, which is abandoned after `seconds`.

    Raises:
        TimeoutError: `make` has not returned.
    """
    future: Future[Result] = Future()

    def work() -> None:
        try:
            future.set_result(make())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=work, daemon=True).start()
    return future.result(timeout=seconds)

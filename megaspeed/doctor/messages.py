"""Messages between ranks over a key-value store, and calls with a time limit.

    rank 1, 2, ...  --send("record", {...})-->  store  --gather("record")-->   rank 0
    rank 1, 2, ...  <----receive("plan")------  store  <--send("plan", ...)--  rank 0

These are no collectives. A collective would wait for a missing rank, and could not name it.
"""

import json
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

import torch.distributed as dist

from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.topology.store import GroupError, wait_for_keys

Result = TypeVar("Result")


class Messages:
    """This rank's connection to the store of all ranks."""

    def __init__(self, launch: LaunchEnvironment, store: dist.Store) -> None:
        self._launch = launch
        self._store = dist.PrefixStore("doctor", store)

    def send(self, name: str, value: Any) -> None:
        """Store a JSON value of this rank."""
        self._store.set(f"{name}/{self._launch.rank}", json.dumps(value))

    def gather(self, name: str, seconds: float) -> list[Any]:
        """Return the values of all ranks; None for ranks that have sent none after ``seconds``."""
        keys = [f"{name}/{rank}" for rank in range(self._launch.world_size)]
        wait_for_keys(self._store, keys, seconds)
        return [
            json.loads(self._store.get(key)) if self._store.check([key]) else None for key in keys
        ]

    def receive(self, name: str, seconds: float, rank: int = 0) -> Any:
        """Wait for a value of a rank.

        Raises:
            GroupError: it does not arrive within ``seconds``, or the store has ended.
        """
        try:
            self._store.wait([f"{name}/{rank}"], timedelta(seconds=seconds))
            return json.loads(self._store.get(f"{name}/{rank}"))
        except RuntimeError as error:  # torch's DistError is one
            raise GroupError(
                f"rank {self._launch.rank} waited {seconds:g} s for rank {rank} ({name}), which "
                "did not answer"
            ) from error


def call_with_timeout(seconds: float, function: Callable[[], Result]) -> Result:
    """Call ``function`` in another thread, because a disk or a driver may hang.

    Raises:
        TimeoutError: it has not returned after ``seconds``. Its thread continues in the background.
    """
    future: Future[Result] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    # A daemon, so that a thread that hangs does not keep the process alive.
    Thread(target=work, daemon=True).start()
    return future.result(timeout=seconds)

"""Messages from all ranks to rank 0, and from rank 0 to all, over a store, without collectives.

    rank 1, 2, ...  --put("record", {...})-->  store  --everyones("record")-->  rank 0
    rank 1, 2, ...  <--hear("next")----------  store  <--tell("next", ...)----  rank 0

A collective would wait for a missing rank, and could not name it.
"""

import json
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megaspeed.topology.launch import LaunchEnvironment
from megaspeed.topology.meeting import GroupError

_POLL_SECONDS = 0.02


class Messages:
    """This rank's end of the store of all ranks."""

    def __init__(self, launch: LaunchEnvironment, store: dist.Store) -> None:
        self.rank = launch.rank
        self.world_size = launch.world_size
        self._store = dist.PrefixStore("doctor", store)

    def put(self, name: str, value: Any) -> None:
        """This rank's answer to rank 0."""
        self._store.set(f"{name}/{self.rank}", json.dumps(value))

    def everyones(self, name: str, seconds: float) -> list[Any]:
        """The answers of all ranks; None if a rank has not answered after `seconds` in all."""
        keys = [f"{name}/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + seconds
        while not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return [
            json.loads(self._store.get(key)) if self._store.check([key]) else None for key in keys
        ]

    def tell(self, name: str, value: Any) -> None:
        """Rank 0 sends a value to all ranks."""
        self._store.set(name, json.dumps(value))

    def hear(self, name: str, seconds: float) -> Any:
        """Wait for a value, usually from rank 0.

        Raises:
            GroupError: it does not arrive within `seconds`, or the store has ended.
        """
        try:
            self._store.wait([name], timedelta(seconds=seconds))
            return json.loads(self._store.get(name))
        except RuntimeError as error:  # torch's DistError is one
            raise GroupError(
                f"rank {self.rank} waited {seconds:g} s for rank 0 ({name}), which did not answer"
            ) from error

"""Messages from all ranks to rank 0, and from rank 0 to all, over a store, without collectives.

    rank 1, 2, ...  --put("record", {...})-->  store  --everyones("record")-->  rank 0
    rank 1, 2, ...  <--hear("next")----------  store  <--tell("next", ...)----  rank 0

A collective would wait for a rank that never comes, and could not name it.
"""

import json
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megaspeed.topology.launch import LaunchEnvironment

_POLL_SECONDS = 0.02


class NobodyThere(RuntimeError):
    """What was waited for did not come in time."""


class Meeting:
    """This rank's end of the store at MASTER_ADDR and MASTER_PORT."""

    def __init__(self, launch: LaunchEnvironment, store: dist.Store) -> None:
        self.rank = launch.rank
        self.world_size = launch.world_size
        self._store = store

    @classmethod
    def join(
        cls,
        launch: LaunchEnvironment,
        *,
        address: str,
        port: int,
        agent_store: bool,
        seconds: float,
    ) -> "Meeting":
        """Opens the store, on rank 0 unless torchrun has one there.

        Raises:
            NobodyThere: it cannot be reached.
        """
        if launch.world_size == 1:
            return cls(launch, dist.HashStore())
        serves = launch.rank == 0 and not agent_store
        try:
            store = dist.TCPStore(
                address,
                port,
                is_master=serves,
                timeout=timedelta(seconds=seconds),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except (RuntimeError, ValueError) as error:
            what = "cannot listen at" if serves else "cannot reach"
            raise NobodyThere(
                f"rank {launch.rank} {what} MASTER_ADDR:MASTER_PORT {address}:{port} within "
                f"{seconds:g} s. They must be rank 0's machine and a port that is free there and "
                f"open to the others. torch says: {str(error).splitlines()[0]}"
            ) from error
        return cls(launch, dist.PrefixStore("doctor", store))

    def put(self, name: str, value: Any) -> None:
        """This rank's answer to rank 0."""
        self._store.set(f"{name}/{self.rank}", json.dumps(value))

    def everyones(self, name: str, seconds: float) -> list[Any]:
        """The answers of all ranks; None of a rank that has not answered. All share the seconds."""
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
            NobodyThere: it does not arrive within `seconds`, or the store has ended.
        """
        try:
            self._store.wait([name], timedelta(seconds=seconds))
            return json.loads(self._store.get(name))
        except RuntimeError as error:  # torch's DistError is one
            raise NobodyThere(
                f"rank {self.rank} waited {seconds:g} s for rank 0 ({name}), which did not answer"
            ) from error

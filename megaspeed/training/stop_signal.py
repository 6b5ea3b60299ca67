"""Being told to stop: SIGTERM or SIGUSR1 lets a run finish its step, save, and end well.

    rank 0   step 6   step 7 --- max(0, 10) --- save, end
    rank 1   step 6   step 7 --- max(10, 0) --- save, end
                          ^ SIGUSR1 (10)

A scheduler may tell one process or all of them, in the midst of anything. The handler takes a note
and no more; after each step all ranks take the maximum of their notes, so they stop together.
"""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from megaspeed.topology import ParallelContext

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignal:
    """Notes the stop signals of this process while it is open; for the main thread.

    When it is closed, the handlers that were there before are back.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The latest stop signal of this process."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            # None: it was installed by something else than Python, which cannot put it back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def agreed(self, context: ParallelContext) -> signal.Signals | None:
        """A stop signal that some rank has received; the same on every rank, a collective."""
        number = torch.tensor(self.received or 0, device=context.device)
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=context.world_group)
        return signal.Signals(int(number)) if number else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)

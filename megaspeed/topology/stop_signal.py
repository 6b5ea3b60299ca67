"""Stop signals: after one, a run finishes its step, saves, and ends with exit code 0.

    SIGTERM, SIGUSR1   from a scheduler, a launcher or a user
    SIGINT             Ctrl-C; the second one ends the process at once
    SIGHUP             a closed terminal, unless it is ignored already (``nohup``)
    launcher ended     counts as SIGHUP, because no process waits for this one any more

    rank 0   step 6   step 7 --- max(0, 10) --- save, end
    rank 1   step 6   step 7 --- max(10, 0) --- save, end
                          ^ SIGUSR1 (10)

A scheduler may signal one process or all of them, at any time. The handler stores the signal and
does nothing else. The ranks exchange what they have stored with the gradient norm of each step
(``Worker.train_step``), so they stop after the same step. A signal that arrives later in a step, or
during validation, stops the run after the next step.
"""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


class StopSignal:
    """Stores the stop signals of this process inside a ``with`` block; for the main thread.

    At the end of the block, the earlier handlers are restored.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The latest stop signal of this process."""
        self.can_save = False
        """Whether the run checks `received` and saves. Before training starts, it only ends."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        noted = [one for one in STOP_SIGNALS if one is not signal.SIGHUP or not ignored]
        self._before = {number: signal.signal(number, self._note) for number in noted}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            # None: the handler was not installed from Python, so Python cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)

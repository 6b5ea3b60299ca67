"""Stop signals: they let a run finish its step, save, and end well.

    SIGTERM, SIGUSR1   from a scheduler, a launcher or a user
    SIGINT             Ctrl-C; the second one ends the process at once
    SIGHUP             a closed terminal, unless it is ignored already (``nohup``)
    launcher gone      counts as SIGHUP: nobody waits for this process any more

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
    """Notes the stop signals of this process while it is open; for the main thread.

    When it is closed, the handlers that were there before are back.
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
            # None: it was installed by something else than Python, which cannot put it back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)

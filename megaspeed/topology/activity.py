"""What this rank is doing, for failure reports and for the watch.

    start-up                     step 12                       saving after step 12
      building the model           Forward(micro_batch=0)
                                   Backward(micro_batch=0)

A phase lasts as long as a ``with`` block. Within it, ``begin`` names one piece of work after
another. Each of them counts as progress.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megaspeed.topology.failure import note_phase

START_UP_PATIENCE = 4.0
"""How many times longer than a step each phase of start-up may take."""
SAVE_PATIENCE = 24.0
"""A disk may be very slow. A rank that has died or stopped is still detected earlier."""


SECONDS_OF_A_STANDSTILL = 5.0
"""If a thread runs this much later than it should, its process was stopped or the machine slept.
What other processes did meanwhile is unknown.
"""


class Activity:
    """The phases that this rank is in, its current piece of work, and how far it has come.

    The main thread writes it. Other threads may read it at any time.
    """

    def __init__(self) -> None:
        self.beats = 0
        """Grows with every phase and every piece of work."""
        self.patience = START_UP_PATIENCE
        """How many times longer than usual this phase may take without progress."""
        self.pending: Callable[[], list[str]] = list
        """Returns descriptions of the messages that this rank waits for."""
        self.on_begin: Callable[[str, object], None] | None = None
        """Called with the phase and the piece of work, before the work begins."""
        self._phases: tuple[str, ...] = ()
        self._work: object = None

    @contextmanager
    def during(self, phase: object, *, patience: float = 1.0) -> Iterator[None]:
        """A phase. An exception that leaves the block gets a note with the phase.

        Args:
            phase: what is printed, such as "step 12".
            patience: how many times longer than usual it may take without progress; infinity if
                it may take any time.
        """
        before = (self._phases, self._work, self.patience)
        self.beats += 1
        self._phases, self.patience = (*self._phases, str(phase)), patience
        self.begin(None)
        try:
            yield
        except Exception as error:
            note_phase(error, phase)
            raise  # keep the phase, because the failure report prints it
        self._phases, self._work, self.patience = before
        self.beats += 1

    def begin(self, work: object) -> None:
        """Start the next piece of work in this phase."""
        self._work = work
        self.beats += 1
        if self.on_begin is not None:
            self.on_begin(self._phases[-1] if self._phases else "", work)

    def __str__(self) -> str:
        """Such as "step 12, Backward(micro_batch=1)"."""
        work = () if self._work is None else (repr(self._work),)
        return ", ".join((*self._phases, *work)) or "start-up"

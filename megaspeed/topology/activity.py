"""What this rank is doing, for failure reports and for the watch, and how long it takes.

    start-up                     step 12                       saving after step 12
      building the model           Forward(micro_batch=0)
                                   Backward(micro_batch=0)

A phase lasts as long as a ``with`` block. Within it, ``begin`` names each piece of work. Each phase
and each piece of work counts as progress.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, Literal, get_args

import torch

DURING = "during "
"""An exception has a note that starts with this word for each phase that it has left."""
START_UP_TIMEOUTS = 4.0
"""How many hang timeouts each phase of start-up may take."""
COMPILATION_TIMEOUTS = 12.0
"""How many hang timeouts a compilation may take, because all ranks of a machine compile at once."""
SAVE_TIMEOUTS = 24.0
"""How many hang timeouts a save may take, because a disk may be very slow. A rank that has died or
stopped is still detected earlier."""
SUSPENDED_SECONDS = 5.0
"""If a thread runs this much later than it should, its process was stopped or the machine slept.
What other processes did meanwhile is unknown."""


def note_phase(error: Exception, phase: object) -> None:
    """Add the phase as a note to an exception that leaves it."""
    error.add_note(f"{DURING}{phase}")


class Activity:
    """The phases that this rank is in, its current piece of work, and how far it has come.

    The main thread writes it, or a thread that it waits for. Other threads may read it at any time.
    """

    def __init__(self) -> None:
        self.progress = 0
        """Grows with every phase and every piece of work."""
        self.steps = 0
        """The last step that this rank has completed. All ranks have computed its gradients."""
        self.timeouts = START_UP_TIMEOUTS
        """How many hang timeouts the current phase may take without progress."""
        self.pending: Callable[[], list[str]] = list
        """Returns descriptions of the messages that this rank waits for."""
        self.on_begin: Callable[[str, object], None] | None = None
        """Called with the phase and the piece of work, before the work begins."""
        self._phases: tuple[str, ...] = ()  # not a list: another thread may read it meanwhile
        self._work: object = None

    @contextmanager
    def during(self, phase: object, *, timeouts: float = 1.0) -> Iterator[None]:
        """A phase. An exception that leaves the block gets a note with the phase.

        Args:
            phase: what is printed, such as "step 12".
            timeouts: how many hang timeouts it may take without progress; infinity if it may take
                any time.
        """
        outer = (self._phases, self._work, self.timeouts)
        self.progress += 1
        self._phases, self.timeouts = (*self._phases, str(phase)), timeouts
        self.begin(None)
        try:
            yield
        except Exception as error:
            note_phase(error, phase)
            raise  # keep the phase, because the failure report prints it
        self._phases, self._work, self.timeouts = outer
        self.progress += 1

    def begin(self, work: object) -> None:
        """Start the next piece of work in this phase."""
        self._work = work
        self.progress += 1
        if self.on_begin is not None:
            self.on_begin(self._phases[-1] if self._phases else "", work)

    def __str__(self) -> str:
        """Such as "step 12, Backward(micro_batch=1)", or between two phases "after step 12"."""
        work = () if self._work is None else (repr(self._work),)
        between = f"after step {self.steps}" if self.steps else "start-up"
        return ", ".join((*self._phases, *work)) or between


Part = Literal[
    "data_loading",  # waiting for a micro-batch
    "compute",  # forward and backward
    "tensor",  # communication over the tensor axis, except within compiled blocks
    "context",  # communication over the context axis, except within compiled blocks
    "expert",  # communication over the expert axis
    "data",  # gradients and gathered parameters over the data axis
    "pipeline",  # waiting for a neighbour's message: bubble and transfer time
    "world",  # the all-reduce of loss and norm, which waits for the slowest rank
    "optimizer",  # clipping and the optimizer
    "host",  # anything else
]

PARTS: tuple[Part, ...] = get_args(Part)
OWN_WORK: tuple[Part, ...] = ("data_loading", "compute", "optimizer", "host")
"""The parts in which a rank does not wait for other ranks."""


class Timeline:
    """Times the parts of a step on this rank. Each moment counts for one part.

        compute ... | tensor | compute ... | pipeline (a neighbour's message) | compute ...

    The innermost part counts: if a forward waits for a collective, this time counts for the
    collective. On a GPU, events time the current stream, so communication counts only while
    computation waits for it. On a CPU, the host is timed. If blocks are compiled, the collectives
    within them count as compute, because nothing of a compiled graph can be timed from outside.

    Only some steps are timed (every ``training.log_interval``-th, and those that are profiled). In
    all other steps, a part costs only a check of one attribute.
    """

    def __init__(self, device: torch.device) -> None:
        self.annotate: Callable[[str], AbstractContextManager[Any]] | None = None
        """Opens a span of the profile; None unless the step is profiled."""
        self._on_gpu = device.type == "cuda"
        self._step: int | None = None
        self._marks: list[tuple[Any, Part, object]] = []
        self._now: tuple[Part, object] = ("host", None)
        self._last: tuple[int, list[tuple[Any, Part, object]]] | None = None

    def begin(self, step: int) -> None:
        self._step, self._now = step, ("host", None)
        self._marks = [(self._moment(), *self._now)]

    def end(self) -> None:
        if self._step is not None:
            self._marks.append((self._moment(), "host", None))
            self._last = (self._step, self._marks)
        self._step = None

    def part(self, name: Part, work: object = None) -> AbstractContextManager[None]:
        """The time within this block counts for ``name``, except the time within inner blocks.

        In a profile, the block is a span with the name of the part, or that of ``work``.
        """
        return self._timed(name, work) if self._step is not None else nullcontext()

    def pop_seconds(self, *, wait: bool = False) -> Sequence[float]:
        """Return and forget the number of the last timed step and the seconds of each of ``PARTS``.

        All are zero if there is no such step, or if the GPU has not finished it.
        """
        nothing = [0.0] * (1 + len(PARTS))
        if self._last is None:
            return nothing
        step, marks = self._last
        if self._on_gpu and wait:
            marks[-1][0].synchronize()
        elif self._on_gpu and not marks[-1][0].query():
            return nothing
        by_part = dict.fromkeys(PARTS, 0.0)
        for name, _, seconds in self.intervals():
            by_part[name] += seconds
        self._last = None
        return [float(step), *by_part.values()]

    def intervals(self) -> Iterator[tuple[Part, object, float]]:
        """Yield the part, the work and the seconds of each interval of the last timed step, in
        order. If a block names no work, its work is that of the block that contains it.

        The device must have finished the step, and ``pop_seconds`` must not have returned it.
        """
        assert self._last is not None, "a step is timed"
        for (start, name, work), (end, _, _) in pairwise(self._last[1]):
            yield name, work, start.elapsed_time(end) / 1000 if self._on_gpu else end - start

    @contextmanager
    def _timed(self, name: Part, work: object) -> Iterator[None]:
        outer = self._now
        self._switch(name, outer[1] if work is None else work)
        try:
            if self.annotate is None:
                yield
            else:
                with self.annotate(name if work is None else str(work)):
                    yield
        finally:
            self._switch(*outer)

    def _switch(self, name: Part, work: object) -> None:
        self._now = (name, work)
        self._marks.append((self._moment(), name, work))

    def _moment(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        # The host's clock would time launches, which end long before the kernels.
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

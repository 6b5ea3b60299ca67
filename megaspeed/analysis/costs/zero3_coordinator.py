"""ZeRO-3: which parameters DeepSpeed gathers when, as its coordinator decides it.

DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py. It records the order of modules
from one forward to the next; while passes keep to the recorded order it

    fetches ahead   what is entered next, up to ``prefetch_elements`` more at each module
    keeps           what is entered again within ``reuse_elements``, what fetching ahead has already
                    passed over, and what is persistent

and without a record it lets go of a module's parameters as each module is left. A pass that goes on
beyond the record ends it, and the next forward records anew: with several micro-batches in flight
that happens again and again, so what is gathered depends on the schedule. Hence a replay and not a
formula; a pass that begins as an earlier one did is not replayed twice.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megaspeed.analysis.costs.zero3_trace import Trace
from megaspeed.analysis.costs.zero3_visits import Pass, Visit

_NEVER = -1


@dataclass(frozen=True, kw_only=True)
class GatherSettings:
    """What decides on gathering; numbers are elements.

    Attributes:
        sizes: of each parameter.
        persistent: parameters that are not let go of while there is a record.
        prefetch_elements, reuse_elements, live_elements: ``zero_optimization``'s
            ``stage3_prefetch_bucket_size``, ``stage3_max_reuse_distance`` and
            ``stage3_max_live_parameters``.
    """

    sizes: Mapping[str, int]
    persistent: frozenset[str]
    prefetch_elements: int
    reuse_elements: int
    live_elements: int


@dataclass(kw_only=True)
class _State:
    whole: set[str] = field(default_factory=set)
    whole_elements: int = 0
    fetched_ahead: set[str] = field(default_factory=set)  # and not entered yet
    recording: tuple[Pass, ...] | None = None
    recorded: tuple[Pass, ...] | None = None
    step: int = 0  # modules entered since the last forward began
    live_elements: int = 0  # as DeepSpeed counts: since the last forward began
    queue_position: int = 0
    last_fetched_for: dict[str, int] = field(default_factory=dict)

    def copy(self) -> "_State":
        return replace(
            self,
            whole=set(self.whole),
            fetched_ahead=set(self.fetched_ahead),
            last_fetched_for=dict(self.last_fetched_for),
        )

    def key(self) -> object:
        return (
            frozenset(self.whole),
            frozenset(self.fetched_ahead),
            self.recording,
            self.recorded,
            self.step,
            self.live_elements,
            self.queue_position,
            frozenset(self.last_fetched_for.items()),
        )


@dataclass(kw_only=True)
class GatherCounts:
    """What passes have gathered.

    Attributes:
        times: how often each parameter, those let go of unused included.
        alone: of these, in a collective with no other parameter.
        most_whole_elements: the most that were whole at one moment.
    """

    times: Counter[str] = field(default_factory=Counter)
    alone: Counter[str] = field(default_factory=Counter)
    most_whole_elements: int = 0

    def add(self, other: "GatherCounts") -> None:
        """Counts ``other``'s passes too."""
        self.times.update(other.times)
        self.alone.update(other.alone)
        self.most_whole_elements = max(self.most_whole_elements, other.most_whole_elements)


class Coordinator:
    """Replays the passes and steps of one rank.

    Args:
        settings: what decides on gathering.
        visits: of one micro-batch's passes.
    """

    def __init__(self, settings: GatherSettings, visits: Mapping[Pass, Sequence[Visit]]) -> None:
        self._settings = settings
        self._visits = visits
        self._state = _State()
        self._counts = GatherCounts()
        self._traces: dict[tuple[Pass, ...], Trace] = {}
        # DeepSpeed never forgets what it decided for (module, step), even with another record.
        self._decided: dict[tuple[str, int], list[str]] = {}
        self._replayed: dict[object, tuple[_State, GatherCounts]] = {}

    def run(self, passes: Iterable[Pass]) -> GatherCounts:
        """One optimizer step: its passes, in the schedule's order, and the step itself.

        The optimizer lets go of all parameters, and gathers those that are persistent afterwards;
        these are not in the counts.
        """
        total = GatherCounts()
        for name in passes:
            begun_as = (name, self._state.key(), len(self._decided))
            if begun_as not in self._replayed:
                self._counts = GatherCounts()
                self._pass(name)
                self._replayed[begun_as] = self._state.copy(), self._counts
            state, counts = self._replayed[begun_as]
            self._state = state.copy()
            total.add(counts)
        settings = self._settings
        self._state.whole = set(settings.persistent)
        self._state.whole_elements = sum(settings.sizes[name] for name in settings.persistent)
        self._state.fetched_ahead = set()
        return total

    def state(self) -> object:
        """What the next step begins with: from equal states all goes on alike."""
        return self._state.key(), len(self._decided)

    def _pass(self, name: Pass) -> None:
        if name == "forward":
            self._begin()
        if self._state.recording is not None:
            self._state.recording += (name,)
        for visit in self._visits[name]:
            if visit.kind == "enter":
                self._enter(visit)
            elif visit.kind == "leave":
                self._let_go(self._released(visit))
            else:
                persistent = self._settings.persistent
                self._let_go(name for name in visit.parameters if name not in persistent)

    def _begin(self) -> None:
        state = self._state
        self._drop_what_was_fetched_ahead()
        if state.recorded is None:
            state.recorded = state.recording
            state.recording = () if state.recorded is None else None
        state.last_fetched_for = {}
        state.queue_position = state.step = state.live_elements = 0

    def _trace(self) -> Trace | None:
        recorded = self._state.recorded
        if recorded is None:
            return None
        if recorded not in self._traces:
            visits = [visit for name in recorded for visit in self._visits[name]]
            self._traces[recorded] = Trace(visits, self._settings.sizes)
        return self._traces[recorded]

    def _enter(self, visit: Visit) -> None:
        state, trace = self._state, self._trace()
        if trace is not None and trace.modules[state.step : state.step + 1] != [visit.module]:
            state.recorded, trace = None, None
            state.last_fetched_for = {}
            self._drop_what_was_fetched_ahead()
        self._gather([name for name in visit.parameters if name not in state.whole])
        state.fetched_ahead.difference_update(visit.parameters)
        if trace is not None:
            self._take_from_queue(trace, visit)
            self._fetch_ahead(trace)
        state.step += 1

    def _take_from_queue(self, trace: Trace, visit: Visit) -> None:
        """What is entered now need not be fetched ahead for it any more."""
        state = self._state
        fetched = state.last_fetched_for
        due = [name for name in visit.parameters if fetched.get(name, _NEVER) < state.step]
        taken: set[str] = set()
        while state.queue_position < len(trace.queue) and len(taken) < len(due):
            name, step = trace.queue[state.queue_position]
            state.queue_position += 1
            fetched[name] = step
            taken.add(name)

    def _fetch_ahead(self, trace: Trace) -> None:
        state, settings = self._state, self._settings
        limit = min(settings.live_elements - state.live_elements, settings.prefetch_elements)
        fetched = state.last_fetched_for
        wanted: list[str] = []
        elements = 0
        while state.queue_position < len(trace.queue) and elements < limit:
            name, step = trace.queue[state.queue_position]
            state.queue_position += 1
            fetched[name] = max(fetched.get(name, _NEVER), step)
            if name not in state.whole and name not in wanted:
                wanted.append(name)
                elements += settings.sizes[name]
        self._gather(wanted)
        state.fetched_ahead.update(wanted)

    def _released(self, visit: Visit) -> Iterable[str]:
        trace = self._trace()
        if trace is None or not visit.parameters:
            return visit.parameters
        key = (visit.module, self._state.step)
        if key not in self._decided:
            names = visit.parameters
            self._decided[key] = [name for name in names if not self._is_kept(trace, name)]
        return self._decided[key]

    def _is_kept(self, trace: Trace, name: str) -> bool:
        step = self._state.step
        return (
            name in self._settings.persistent
            or self._state.last_fetched_for.get(name, _NEVER) > step
            or trace.is_used_within(name, step, self._settings.reuse_elements)
        )

    def _gather(self, names: Sequence[str]) -> None:
        if not names:
            return
        sizes = self._settings.sizes
        self._state.whole.update(names)
        elements = sum(sizes[name] for name in names)
        self._state.live_elements += elements
        self._state.whole_elements += elements
        counts = self._counts
        counts.times.update(names)
        if len(names) == 1:
            counts.alone.update(names)
        counts.most_whole_elements = max(counts.most_whole_elements, self._state.whole_elements)

    def _let_go(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._state.whole:
                self._state.whole.remove(name)
                self._state.live_elements -= self._settings.sizes[name]
                self._state.whole_elements -= self._settings.sizes[name]

    def _drop_what_was_fetched_ahead(self) -> None:
        self._let_go(self._state.fetched_ahead)
        self._state.fetched_ahead = set()

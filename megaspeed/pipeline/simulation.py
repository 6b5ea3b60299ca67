"""Simulates all stages of a pipeline, to check their programs and to measure the bubble.

For each micro-batch and chunk, a stage runs each of these exactly once, in the order of the arrows:

    load --------> forward ----> send activation        (no send by the last virtual stage)
    receive ------>   |                                 (no receive by the first)
                      v
    receive gradient -> backward -> send gradient       (training only)

A micro-batch is loaded once, before its first forward. After all of them come reduce gradients,
reduce tied gradients and, at the very end, the optimizer step. If ZeRO-3 gathers chunks, a chunk
is gathered before it computes, and released before it is gathered again and at the end.

``check_programs`` proves this, and that the programs end, even if a stage waits for each batch as
soon as it has started it. gloo and NCCL never wait for more, even with a device synchronisation at
any place. ``simulate`` computes the time of a step. A forward, a backward and a message take the
times in ``Durations``, and so do the collectives of the data axis, if they are stated. Everything
else takes none. A batch begins when the stage has computed what it sends and the batch before it is
complete. It is complete when its messages have arrived.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from megaspeed.pipeline.programs import stage_program, timetable
from megaspeed.pipeline.schedules import (
    Backward,
    Compute,
    Forward,
    Gather,
    Instruction,
    LoadMicroBatch,
    Message,
    OptimizerStep,
    Pipeline,
    Receive,
    ReduceGradients,
    ReduceTiedGradients,
    Release,
    ScheduleError,
    Send,
    StageProgram,
    Transfer,
    input_of,
    order_of,
    output_of,
    peer,
    received_as,
)
from megaspeed.pipeline.visits import ends_of, holds_by_index


@dataclass(frozen=True, kw_only=True)
class Durations:
    """The times of one micro-batch, in any unit."""

    forward: Sequence[float]  # of each virtual stage
    backward: Sequence[float]  # of each virtual stage
    message: float = 0  # between two pipeline stages: latency and transfer
    gather: Sequence[float] = ()  # of each virtual stage, if ZeRO-3 gathers chunks
    reduce: Sequence[float] = ()  # of each virtual stage, if a backward visit ends with a reduction

    @classmethod
    def in_ticks(cls, pipeline: Pipeline) -> "Durations":
        """Equal chunks, in whole ticks of the timetable."""
        count = pipeline.virtual_stages
        return cls(forward=[1] * count, backward=[pipeline.backward_ticks] * count)


_Collective = Gather | ReduceGradients
_Kind = TypeVar("_Kind", bound=Instruction)


@dataclass(frozen=True, slots=True)
class Span(Generic[_Kind]):
    """What a stage does in the time [start, end)."""

    instruction: _Kind
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step: the spans of each pipeline stage, in order."""

    computes: list[list[Span[Compute]]]
    collectives: list[list[Span[_Collective]]]  # of the data axis, beside the computations

    @property
    def length(self) -> float:
        """The time from the first forward to the end of the last span."""
        ends = [spans[-1].end for spans in self.computes]
        return max(ends + [spans[-1].end for spans in self.collectives if spans])


class _DataAxis:
    """The collectives of one stage, which run one after another, beside its computations."""

    def __init__(self, pipeline: Pipeline, stage: int, times: Durations) -> None:
        self._pipeline, self._stage, self._times = pipeline, stage, times
        self._holds, _ = holds_by_index(pipeline, stage)
        self._gathered: dict[int, float] = {}  # chunk -> when
        self.spans: list[Span[_Collective]] = []

    def before(self, index: int, clock: float) -> None:
        """Begin the gathers before a computation of the stage's order."""
        for hold in self._holds[index] if self._times.gather else ():
            seconds = self._times.gather[self._pipeline.virtual(self._stage, hold.chunk)]
            gather = Gather(hold.chunk, hold.forward)
            self._gathered[hold.chunk] = self._run(gather, clock, seconds)

    def gathered(self, chunk: int) -> float:
        """When the last layers of a chunk have arrived; 0 if it is not gathered."""
        return self._gathered.get(chunk, 0)

    def after(self, compute: Compute, clock: float) -> None:
        """Reduce the gradients of a chunk if its visit has ended."""
        if self._times.reduce and compute in ends_of(self._pipeline, self._stage):
            seconds = self._times.reduce[self._pipeline.virtual(self._stage, compute.chunk)]
            self._run(ReduceGradients(), clock, seconds)

    def _run(self, instruction: _Collective, clock: float, seconds: float) -> float:
        start = max(clock, self.spans[-1].end if self.spans else 0)
        self.spans.append(Span(instruction, start, start + seconds))
        return start + seconds


def simulate(pipeline: Pipeline, durations: Durations | None = None) -> SimulatedStep:
    """Simulate a step, by default in ticks.

    All events are taken in the order of the timetable. Each depends only on earlier ones.

    The first computation that needs a gathered chunk ends when its last layer has arrived: layers
    arrive one after another, while others compute.
    """
    times = durations or Durations.in_ticks(pipeline)
    axes = [_DataAxis(pipeline, stage, times) for stage in range(pipeline.stages)]
    events: defaultdict[int, list[tuple[int, Compute]]] = defaultdict(list)
    for stage, ticks in enumerate(timetable(pipeline)):
        for compute, (end, _) in zip(order_of(pipeline, stage), ticks, strict=True):
            events[end].append((stage, compute))
    spans: list[list[Span[Compute]]] = [[] for _ in range(pipeline.stages)]
    clocks = [0.0] * pipeline.stages
    complete = [0.0] * pipeline.stages  # when the last batch of each stage was
    arrived: dict[object, float] = {}
    for tick in sorted(events):
        sent = []
        for stage, compute in events[tick]:
            virtual = pipeline.virtual(stage, compute.chunk)
            index, axis = len(spans[stage]), axes[stage]
            axis.before(index, clocks[stage])
            start = max(clocks[stage], arrived.pop((stage, input_of(pipeline, stage, compute)), 0))
            takes = times.forward if isinstance(compute, Forward) else times.backward
            clocks[stage] = max(start + takes[virtual], axis.gathered(compute.chunk))
            spans[stage].append(Span(compute, start, clocks[stage]))
            axis.after(compute, clocks[stage])
            message = output_of(pipeline, stage, compute)
            if message is not None:
                receiver = peer(pipeline, stage, message)
                sent.append((stage, receiver, received_as(pipeline, stage, message)))
        # A stage waits for its last batch before it starts the next one.
        for stage in {stage for sender, receiver, _ in sent for stage in (sender, receiver)}:
            clocks[stage] = complete[stage] = max(clocks[stage], complete[stage])
        begun = list(complete)
        for sender, receiver, _ in sent:
            both = max(begun[sender], begun[receiver]) + times.message
            for stage in (sender, receiver):
                complete[stage] = max(complete[stage], both)
        # A stage waits for a batch, not for one of its messages: NCCL runs a batch as one kernel.
        for _, receiver, received in sent:
            arrived[receiver, received] = complete[receiver]
    return SimulatedStep(spans, [axis.spans for axis in axes])


def format_grid(pipeline: Pipeline, width: int | None = None) -> str:
    """Draw a schedule: a row for each pipeline stage, a column for each tick.

    If a row has more than ``width`` characters, it continues in a block below, after an empty line.
    ``F3`` is the forward of micro-batch 3, ``B3`` is its backward, and a dot is a tick in which the
    stage waits. With several chunks, ``F3.1`` is the forward of chunk 1. 1f1b with two stages and
    three micro-batches:

        tick              0  1  2  3  4  5  6  7  8  9  10 11
        pipeline stage 0  F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
        pipeline stage 1  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .
    """
    timeline = simulate(pipeline)
    ticks = int(timeline.length)
    rows = [("tick", [str(tick) for tick in range(ticks)])]
    for stage, spans in enumerate(timeline.computes):
        cells = ["."] * ticks
        for span in spans:
            compute = span.instruction
            name = f"{'F' if isinstance(compute, Forward) else 'B'}{compute.micro_batch}"
            name += f".{compute.chunk}" if pipeline.chunks > 1 else ""
            start, end = int(span.start), int(span.end)
            cells[start:end] = [name] * (end - start)
        rows.append((f"pipeline stage {stage}", cells))

    label_width = max(len(label) for label, _ in rows)
    cell_width = max(len(cell) for _, cells in rows for cell in cells)
    count = ticks if width is None else max(1, (width - label_width - 1) // (cell_width + 1))
    lines: list[str] = []
    for first in range(0, ticks, count):
        lines += [""] * bool(lines)
        for label, cells in rows:
            shown = " ".join(f"{cell:<{cell_width}}" for cell in cells[first : first + count])
            lines.append(f"{label:<{label_width}}  {shown}".rstrip())
    return "\n".join(lines)


# --- checks ---------------------------------------------------------------------------------------

_Work = LoadMicroBatch | Compute | Message | ReduceGradients | ReduceTiedGradients | OptimizerStep

_REDUCTIONS = (ReduceGradients(), ReduceTiedGradients())


def check_schedule(pipeline: Pipeline) -> None:
    """Raise ``ScheduleError`` if the stages cannot run this pipeline's schedule to its end."""
    if pipeline.stages < 1 or pipeline.micro_batches < 1:
        raise ScheduleError(
            "A schedule needs at least one pipeline stage and one micro-batch, not "
            f"{pipeline.stages} and {pipeline.micro_batches}."
        )
    check_programs(pipeline, [stage_program(pipeline, stage) for stage in range(pipeline.stages)])


def check_programs(pipeline: Pipeline, programs: Sequence[StageProgram]) -> None:
    """Raise ``ScheduleError`` if a stage's program breaks a rule of this file, or never ends."""
    for stage, program in enumerate(programs):
        _check_stage(pipeline, stage, program)
    _run_together(pipeline, programs)


def _check_stage(pipeline: Pipeline, stage: int, program: StageProgram) -> None:
    where = f"pipeline stage {stage} of {pipeline.stages}"
    required = _required(pipeline, stage)
    done: set[_Work] = set()
    held: dict[int, bool] = {}  # gathered chunk -> whether a forward can use it
    for position, instruction in enumerate(program):
        for work in instruction.messages if isinstance(instruction, Transfer) else (instruction,):
            reason = _reason_against(work, pipeline, required, done, held)
            if reason is not None:
                raise ScheduleError(f"{where}, instruction {position}: {work!r} {reason}")
    for left in required:
        if left not in done:
            raise ScheduleError(f"{where} never runs {left!r}. The stage must run it once.")
    if held:
        raise ScheduleError(f"{where} never releases chunk {', '.join(map(str, held))}.")


def _reason_against(
    work: _Work | Gather | Release,
    pipeline: Pipeline,
    required: Mapping[_Work, Sequence[_Work]],
    done: set[_Work],
    held: dict[int, bool],
) -> str | None:
    """Return why a stage cannot run this now. If it can, add it to what is done or held."""
    match work:
        case Gather(chunk, forward):
            if chunk in held:
                return "comes before the chunk is released."
            held[chunk] = forward
            return None
        case Release(chunk):
            return "comes before the chunk is gathered." if held.pop(chunk, None) is None else None
        case Forward(_, chunk) | Backward(_, chunk) if pipeline.gather_policy != "layers":
            if chunk not in held or (isinstance(work, Forward) and not held[chunk]):
                return "comes before all that it needs is gathered."
    if work not in required:
        return (
            "is not possible here: there is no layer before the first virtual stage and none after "
            f"the last one, the step has {pipeline.micro_batches} micro-batches, numbered from 0, "
            "and an evaluation has no backward."
        )
    if work in done:
        return "comes twice. A stage runs each instruction once."
    for needed in required[work]:
        if needed not in done:
            return f"comes before {needed!r}, which it needs."
    done.add(work)
    return None


def _required(pipeline: Pipeline, stage: int) -> Mapping[_Work, Sequence[_Work]]:
    """Return all that a stage runs -> what must come before it."""
    required: dict[_Work, Sequence[_Work]] = {}
    backwards: list[_Work] = []
    for micro_batch in range(pipeline.micro_batches):
        load = LoadMicroBatch(micro_batch)
        required[load] = ()
        for chunk in range(pipeline.chunks):
            before: list[_Work] = []
            computes = (Forward(micro_batch, chunk), Backward(micro_batch, chunk))
            for compute in computes[: 1 if pipeline.schedule == "forward_only" else 2]:
                received = input_of(pipeline, stage, compute)
                if received is not None:
                    required[received] = before
                    before = [*before, received]
                required[compute] = [*before, load]
                sent = output_of(pipeline, stage, compute)
                if sent is not None:
                    required[sent] = [compute]
                before = [compute]
            backwards += [each for each in before if isinstance(each, Backward)]
    if backwards:
        required |= dict.fromkeys(_REDUCTIONS, backwards)
        required[OptimizerStep()] = _REDUCTIONS
    return required


def _run_together(pipeline: Pipeline, programs: Sequence[StageProgram]) -> None:
    """Run all stages to the end of their programs. Each waits for a batch when it has started it.

    The messages from one stage to another arrive in the order in which they are sent.
    """
    left = [
        deque(instruction for instruction in program if isinstance(instruction, Transfer))
        for program in programs
    ]
    missing = [0] * pipeline.stages  # messages of the current batch that have not met
    met: dict[tuple[int, int], deque[tuple[Receive, bool]]] = defaultdict(deque)

    ready = deque(stage for stage in range(pipeline.stages) if left[stage])
    while ready:
        stage = ready.popleft()
        # Start the next batch of the stage, and let each of its messages meet its other end.
        messages = left[stage][0].messages if left[stage] else ()
        missing[stage] = len(messages)
        for message in messages:
            other, is_sent = peer(pipeline, stage, message), isinstance(message, Send)
            received: Receive = (
                received_as(pipeline, stage, message) if isinstance(message, Send) else message
            )
            waiting = met[(stage, other) if is_sent else (other, stage)]
            if not waiting or waiting[0][1] == is_sent:
                waiting.append((received, is_sent))
                continue
            expected, _ = waiting.popleft()
            if expected != received:
                sender, receiver = (stage, other) if is_sent else (other, stage)
                sent, wanted = (received, expected) if is_sent else (expected, received)
                raise ScheduleError(
                    f"pipeline stage {receiver}, {wanted!r} would get micro-batch "
                    f"{sent.micro_batch} of chunk {sent.chunk}, which pipeline stage {sender} "
                    "sends first. Two neighbours must send and receive in the same order."
                )
            for one in (stage, other):
                missing[one] -= 1
                if missing[one] == 0:
                    left[one].popleft()
                    ready.append(one)
    stuck = [
        f"pipeline stage {stage} waits at {batches[0]!r}"
        for stage, batches in enumerate(left)
        if batches
    ]
    if stuck:
        raise ScheduleError("\n  ".join(["Deadlock: no pipeline stage can continue.", *stuck]))

"""Simulates all pipeline stages of a schedule, to check it and to measure its bubble.

For each micro-batch, a stage runs each of these exactly once, in the order of the arrows:

    load --------> forward ----> send activation        (no send on the last stage)
    receive ------>   |                                 (no receive on the first)
                      v
    receive gradient -> backward -> send gradient       (training only)

After all of them come reduce gradients, reduce tied gradients and, at the very end, the optimizer
step.

In the simulation, a forward, a backward and a message take the times in ``Durations``. Everything
else takes no time. A stage waits at each send, receive or exchange until its neighbour reaches the
matching one. Then the message is sent: a stage that receives waits for it, and a stage that only
sends continues at once. The executor, gloo and NCCL wait for no more than the neighbour and the
message, even with a device synchronisation at any place. So a schedule that completes here
completes there, too.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from megaspeed.pipeline.schedules import (
    Backward,
    BackwardInstruction,
    Batch,
    Forward,
    Instruction,
    LoadMicroBatch,
    MicroBatchInstruction,
    OptimizerStep,
    ReceiveActivation,
    ReceiveGradient,
    ReceiveInstruction,
    ReduceGradients,
    ReduceTiedGradients,
    Schedule,
    ScheduleError,
    SendActivation,
    SendGradient,
    SendInstruction,
    StageProgram,
    StepInstruction,
    form_exchanges,
    other_end,
    peer,
)


@dataclass(frozen=True, kw_only=True)
class Durations:
    """The times of one micro-batch, in any unit."""

    forward: Sequence[float]  # on each pipeline stage
    backward: Sequence[float]  # on each pipeline stage
    message: float = 0  # between two pipeline stages: latency and transfer

    @classmethod
    def in_ticks(cls, pipeline_stages: int) -> "Durations":
        """Equal pipeline stages, in whole clock ticks.

        A backward takes two ticks, because it computes the gradients of inputs and of weights:
        twice as many matrix products as a forward, which takes one.
        """
        return cls(forward=[1] * pipeline_stages, backward=[2] * pipeline_stages)


_NEEDS: Mapping[type[MicroBatchInstruction], tuple[type[MicroBatchInstruction], ...]] = {
    LoadMicroBatch: (),
    ReceiveActivation: (),
    Forward: (LoadMicroBatch, ReceiveActivation),
    SendActivation: (Forward,),
    ReceiveGradient: (Forward,),
    Backward: (Forward, ReceiveGradient),
    SendGradient: (Backward,),
}
"""Each kind of instruction -> the kinds that must come before it for the same micro-batch."""

_REDUCTIONS = (ReduceGradients(), ReduceTiedGradients())


@dataclass(frozen=True, slots=True)
class Span:
    """A forward or backward, and its time [start, end)."""

    instruction: Forward | Backward
    start: float
    end: float


@dataclass(slots=True)
class _Stage:
    """The position of one stage in its program, and its clock."""

    number: int
    program: StageProgram
    takes: Mapping[type[Instruction], float]  # times of a forward and of a backward
    position: int = -1
    clock: float = 0
    spans: list[Span] = field(default_factory=list)
    messages: Batch | None = None
    """The send, receive or exchange that the stage waits for; None at the end of the program."""

    def resume(self, clock: float) -> None:
        """Continue at this time, until the next batch of messages."""
        self.clock, self.messages = clock, None
        for position in range(self.position + 1, len(self.program)):
            instruction = self.program[position]
            if isinstance(instruction, Batch):
                self.position, self.messages = position, instruction
                return
            if isinstance(instruction, Forward | Backward):
                start, self.clock = self.clock, self.clock + self.takes[type(instruction)]
                self.spans.append(Span(instruction, start, self.clock))

    @property
    def waits_for(self) -> int | None:
        """The stage at the other end of ``messages``."""
        return None if self.messages is None else peer(self.number, self.messages)


def check_schedule(schedule: Schedule, pipeline_stages: int, micro_batches: int) -> None:
    """Raise ``ScheduleError`` if the stages cannot run this schedule to its end.

    Every stage must obey the rules of this file, two neighbours must send and receive in the same
    order, and there must be no deadlock, even if each stage waits for every message at once.
    """
    programs = _programs(schedule, pipeline_stages, micro_batches)
    trains = any(
        isinstance(instruction, BackwardInstruction | StepInstruction)
        for program in programs
        for instruction in program
    )
    for number, program in enumerate(programs):
        _check_stage(program, (number, pipeline_stages), micro_batches, trains)
    _run_together(programs, Durations.in_ticks(pipeline_stages))


def simulate(
    schedule: Schedule,
    pipeline_stages: int,
    micro_batches: int,
    durations: Durations | None = None,
) -> list[list[Span]]:
    """The spans of each stage, by default in whole clock ticks (``Durations.in_ticks``).

    Raises ``ScheduleError`` if there is a deadlock. Only ``check_schedule`` checks the other rules.
    """
    programs = _programs(schedule, pipeline_stages, micro_batches)
    return _run_together(programs, durations or Durations.in_ticks(pipeline_stages))


def bubble_fraction(schedule: Schedule, pipeline_stages: int, micro_batches: int) -> float:
    """The fraction of time in which a stage computes nothing, if all stages are equal.

    For gpipe and 1f1b this is (P - 1) / (M + P - 1) with P pipeline stages and M micro-batches
    (Huang et al. 2019, section 2.3).
    """
    timeline = simulate(schedule, pipeline_stages, micro_batches)
    available = pipeline_stages * length(timeline)
    busy = sum(span.end - span.start for spans in timeline for span in spans)
    return (available - busy) / available


def format_grid(schedule: Schedule, pipeline_stages: int, micro_batches: int) -> str:
    """Draw a schedule: a row for each pipeline stage, a column for each clock tick.

    ``F3`` is the forward of micro-batch 3, ``B3`` is its backward, and a dot is a tick in which the
    stage waits. 1f1b with two stages and three micro-batches:

        tick              0  1  2  3  4  5  6  7  8  9  10 11
        pipeline stage 0  F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
        pipeline stage 1  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .
    """
    timeline = simulate(schedule, pipeline_stages, micro_batches)
    ticks = int(length(timeline))
    rows = [("tick", [str(tick) for tick in range(ticks)])]
    for stage, spans in enumerate(timeline):
        cells = ["."] * ticks
        for span in spans:
            letter = "F" if isinstance(span.instruction, Forward) else "B"
            name = f"{letter}{span.instruction.micro_batch}"
            start, end = int(span.start), int(span.end)
            cells[start:end] = [name] * (end - start)
        rows.append((f"pipeline stage {stage}", cells))

    label_width = max(len(label) for label, _ in rows)
    cell_width = max(len(cell) for _, cells in rows for cell in cells)
    return "\n".join(
        f"{label:<{label_width}}  {' '.join(f'{cell:<{cell_width}}' for cell in cells)}".rstrip()
        for label, cells in rows
    )


def length(timeline: Sequence[Sequence[Span]]) -> float:
    """The time from the first forward to the end of the last forward or backward."""
    return max(spans[-1].end for spans in timeline)


def _check_stage(
    program: Sequence[Instruction], place: tuple[int, int], micro_batches: int, trains: bool
) -> None:
    """Raise ``ScheduleError`` if the program of stage ``place`` (number, of all) breaks a rule."""
    number, pipeline_stages = place
    where = f"pipeline stage {number} of {pipeline_stages}"
    absent: set[type[MicroBatchInstruction]] = set()
    if number == 0:
        absent |= {ReceiveActivation, SendGradient}
    if number == pipeline_stages - 1:
        absent |= {SendActivation, ReceiveGradient}
    if not trains:
        absent |= {ReceiveGradient, Backward, SendGradient}
    kinds = [kind for kind in _NEEDS if kind not in absent]
    of_micro_batches = [kind(m) for m in range(micro_batches) for kind in kinds]
    required = dict.fromkeys([*of_micro_batches, *((*_REDUCTIONS, OptimizerStep()) * trains)])

    def needed_by(instruction: Instruction) -> Iterable[MicroBatchInstruction | StepInstruction]:
        match instruction:
            case OptimizerStep():
                return _REDUCTIONS
            case ReduceGradients() | ReduceTiedGradients():
                return of_micro_batches
        needs = _NEEDS[type(instruction)]
        return [kind(instruction.micro_batch) for kind in needs if kind in kinds]

    positions: dict[MicroBatchInstruction | StepInstruction, int] = {}
    for position, instruction in enumerate(program):
        at = f"{where}, instruction {position}: {instruction!r}"
        if instruction not in required:
            raise ScheduleError(
                f"{at} is not possible here: there is no stage before the first one and none after "
                f"the last one, the step has {micro_batches} micro-batches, numbered from 0, and "
                "an evaluation has no backward."
            )
        if instruction in positions:
            raise ScheduleError(f"{at} comes twice. A stage runs each instruction once.")
        positions[instruction] = position
    for one in required:
        if one not in positions:
            raise ScheduleError(f"{where} never runs {one!r}. The stage must run it once.")
    for position, instruction in enumerate(program):
        for needed in needed_by(instruction):
            if positions[needed] > position:
                raise ScheduleError(
                    f"{where}, instruction {position}: {instruction!r} comes before {needed!r}, "
                    "which it needs."
                )


def _programs(
    schedule: Schedule, pipeline_stages: int, micro_batches: int
) -> list[list[Instruction]]:
    if pipeline_stages < 1 or micro_batches < 1:
        raise ScheduleError(
            "A schedule needs at least one pipeline stage and one micro-batch, not "
            f"{pipeline_stages} and {micro_batches}."
        )
    return [
        list(schedule(pipeline_stages, stage, micro_batches)) for stage in range(pipeline_stages)
    ]


def _run_together(programs: Sequence[list[Instruction]], times: Durations) -> list[list[Span]]:
    """Run all stages to the end of their programs."""
    surrounded = zip([[], *programs[:-1]], programs, [*programs[1:], []], strict=True)
    stages = [
        _Stage(
            number,
            form_exchanges(program, number, before=before, after=after),
            {Forward: times.forward[number], Backward: times.backward[number]},
        )
        for number, (before, program, after) in enumerate(surrounded)
    ]
    for stage in stages:
        stage.resume(0)
    links = list(pairwise(stages))
    while any(stage.messages for stage in stages):
        # A list, not a generator, so that all links are tried.
        if not any([_pass_messages(before, after, times.message) for before, after in links]):
            _refuse_another_order(links)
            raise ScheduleError(_deadlock(stages))
    return [stage.spans for stage in stages]


def _pass_messages(before: _Stage, after: _Stage, message: float) -> bool:
    """Let two neighbours continue while they wait for each other. Returns whether they did."""
    passed = False
    while (
        before.messages is not None
        and before.waits_for == after.number
        and after.messages == other_end(before.messages)
    ):
        clock = max(before.clock, after.clock)
        for stage in (before, after):
            only_sends = isinstance(stage.messages, SendInstruction)
            stage.resume(clock if only_sends else clock + message)
        passed = True
    return passed


def _refuse_another_order(links: Sequence[tuple[_Stage, _Stage]]) -> None:
    for link in links:
        for sender, receiver in (link, link[::-1]):
            sent, expected = sender.messages, receiver.messages
            if (
                isinstance(sent, SendInstruction)
                and isinstance(expected, ReceiveInstruction)
                and (sender.waits_for, receiver.waits_for) == (receiver.number, sender.number)
            ):
                raise ScheduleError(
                    f"pipeline stage {receiver.number}, {expected!r} would get micro-batch "
                    f"{sent.micro_batch}, which pipeline stage {sender.number} sends first. Two "
                    "neighbours must send and receive in the same order."
                )


def _deadlock(stages: Sequence[_Stage]) -> str:
    waiting = [
        f"pipeline stage {stage.number} waits at {stage.messages!r} for pipeline stage "
        f"{stage.waits_for}"
        for stage in stages
        if stage.messages is not None
    ]
    return "\n  ".join(
        [
            "Deadlock: no pipeline stage can continue.",
            *waiting,
            "If two neighbours send to each other, both must yield the receive directly after the "
            "send.",
        ]
    )

"""Simulates all pipeline stages of a schedule, to check it and to measure its bubble.

Forward and backward take whole clock ticks, everything else takes none. A simulated stage waits at
each send, receive or exchange until its neighbour reaches the matching one; then both continue. The
executor, gloo and NCCL wait for no more than that, even with a device synchronisation at any place.
So a schedule that completes here completes there, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from megaspeed.pipeline.instructions import (
    Backward,
    Batch,
    Exchange,
    Forward,
    Instruction,
    ReceiveInstruction,
    SendInstruction,
    other_end,
    peer,
)
from megaspeed.pipeline.schedules import Schedule, ScheduleError, StageProgram, form_exchanges
from megaspeed.pipeline.stage_rules import check_stage, trains

# A backward computes the gradients of inputs and of weights: twice the matrix products of a
# forward.
BACKWARD_TICKS = 2


@dataclass(frozen=True, slots=True)
class Span:
    """A forward or backward, and its clock ticks [start, end)."""

    instruction: Forward | Backward
    start: int
    end: int


@dataclass(slots=True)
class _Stage:
    """The position of one stage in its program, and its clock."""

    number: int
    program: Sequence[Instruction | Exchange]
    backward_ticks: int
    position: int = 0
    clock: int = 0
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._compute()

    @property
    def next_messages(self) -> Batch | None:
        """The send, receive or exchange that comes next; None at the end of the program."""
        if self.position == len(self.program):
            return None
        instruction = self.program[self.position]
        assert isinstance(instruction, Batch), instruction
        return instruction

    @property
    def waits_for(self) -> int | None:
        """The stage at the other end of ``next_messages``."""
        return None if self.next_messages is None else peer(self.number, self.next_messages)

    def matches(self, neighbour: "_Stage") -> bool:
        """Whether this stage and ``neighbour`` wait for each other."""
        return (
            self.next_messages is not None
            and self.waits_for == neighbour.number
            and neighbour.next_messages == other_end(self.next_messages)
        )

    def resume(self, clock: int) -> None:
        """Continue at tick `clock`, until the next batch of messages."""
        self.clock = clock
        self.position += 1
        self._compute()

    def _compute(self) -> None:
        while self.position < len(self.program):
            instruction = self.program[self.position]
            if isinstance(instruction, Batch):
                return
            if isinstance(instruction, Forward | Backward):
                ticks = 1 if isinstance(instruction, Forward) else self.backward_ticks
                self.spans.append(Span(instruction, self.clock, self.clock + ticks))
                self.clock += ticks
            self.position += 1


def check_schedule(schedule: Schedule, pipeline_stages: int, micro_batches: int) -> None:
    """Raise `ScheduleError` if the stages cannot run this schedule to its end.

    Every stage must obey `stage_rules`, two neighbours must send and receive in the same order, and
    there must be no deadlock, even if each stage waits for every message at once.
    """
    simulate(schedule, pipeline_stages, micro_batches)


def simulate(
    schedule: Schedule,
    pipeline_stages: int,
    micro_batches: int,
    *,
    backward_ticks: int = BACKWARD_TICKS,
) -> list[list[Span]]:
    """Check a schedule as `check_schedule` does; return the spans of each stage.

    A forward takes one tick, a backward `backward_ticks`.
    """
    if pipeline_stages < 1 or micro_batches < 1:
        raise ScheduleError(
            "A schedule needs at least one pipeline stage and one micro-batch, not "
            f"{pipeline_stages} and {micro_batches}."
        )
    programs = [
        list(schedule(pipeline_stages, stage, micro_batches)) for stage in range(pipeline_stages)
    ]
    training = trains(programs)
    for stage, program in enumerate(programs):
        check_stage(
            program,
            pipeline_stages=pipeline_stages,
            pipeline_stage=stage,
            micro_batches=micro_batches,
            training=training,
        )
    surrounded = zip([[], *programs[:-1]], programs, [*programs[1:], []], strict=True)
    return _run_together(
        [
            form_exchanges(program, stage, before=before, after=after)
            for stage, (before, program, after) in enumerate(surrounded)
        ],
        backward_ticks,
    )


def bubble_fraction(
    schedule: Schedule,
    pipeline_stages: int,
    micro_batches: int,
    *,
    backward_ticks: int = BACKWARD_TICKS,
) -> float:
    """The fraction of time in which a stage computes nothing, if all stages are equal.

    For gpipe and 1f1b this is (P - 1) / (M + P - 1) with P pipeline stages and M micro-batches,
    whatever a backward costs (Huang et al. 2019, section 2.3).
    """
    timeline = simulate(schedule, pipeline_stages, micro_batches, backward_ticks=backward_ticks)
    available = pipeline_stages * _ticks(timeline)
    busy = sum(span.end - span.start for spans in timeline for span in spans)
    return (available - busy) / available


def format_grid(
    schedule: Schedule,
    pipeline_stages: int,
    micro_batches: int,
    *,
    backward_ticks: int = BACKWARD_TICKS,
) -> str:
    """Draw a schedule: a row for each pipeline stage, a column for each clock tick.

    `F3` is the forward of micro-batch 3, `B3` is its backward, and a dot is a tick in which the
    stage waits. 1f1b with two stages and three micro-batches:

        tick              0  1  2  3  4  5  6  7  8  9  10 11
        pipeline stage 0  F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
        pipeline stage 1  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .
    """
    timeline = simulate(schedule, pipeline_stages, micro_batches, backward_ticks=backward_ticks)
    ticks = _ticks(timeline)
    rows = [("tick", [str(tick) for tick in range(ticks)])]
    for stage, spans in enumerate(timeline):
        cells = ["."] * ticks
        for span in spans:
            cells[span.start : span.end] = [str(span.instruction)] * (span.end - span.start)
        rows.append((f"pipeline stage {stage}", cells))

    label_width = max(len(label) for label, _ in rows)
    cell_width = max(len(cell) for _, cells in rows for cell in cells)
    return "\n".join(
        f"{label:<{label_width}}  {' '.join(f'{cell:<{cell_width}}' for cell in cells)}".rstrip()
        for label, cells in rows
    )


def _ticks(timeline: Sequence[Sequence[Span]]) -> int:
    return max(spans[-1].end for spans in timeline)


def _run_together(programs: Sequence[StageProgram], backward_ticks: int) -> list[list[Span]]:
    stages = [_Stage(number, program, backward_ticks) for number, program in enumerate(programs)]
    links = list(pairwise(stages))
    while any(stage.next_messages for stage in stages):
        # A list, not a generator, so that all links are tried.
        if not any([_pass_messages(before, after) for before, after in links]):
            _refuse_another_order(links)
            raise ScheduleError(_deadlock(stages))
    return [stage.spans for stage in stages]


def _pass_messages(before: _Stage, after: _Stage) -> bool:
    """Let two neighbours continue while they wait for each other. Returns whether they did."""
    passed = False
    while before.matches(after):
        clock = max(before.clock, after.clock)
        before.resume(clock)
        after.resume(clock)
        passed = True
    return passed


def _refuse_another_order(links: Sequence[tuple[_Stage, _Stage]]) -> None:
    for link in links:
        for sender, receiver in (link, link[::-1]):
            sent, expected = sender.next_messages, receiver.next_messages
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
    lines = ["Deadlock: no pipeline stage can continue."]
    for stage in stages:
        if stage.next_messages is not None:
            lines.append(
                f"pipeline stage {stage.number} waits at {stage.next_messages!r} for pipeline "
                f"stage {stage.waits_for}"
            )
    lines.append(
        "If two neighbours send to each other, both must yield the receive directly after the send."
    )
    return "\n  ".join(lines)

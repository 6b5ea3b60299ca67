"""A pipeline stage with a clock instead of tensors, and the wires between two such stages.

The model is what `Channel` does. Each pair of neighbours has one first-in-first-out wire for
activations (down the pipeline) and one for gradients (up). A receive waits until its micro-batch
is on the wire. A send does not wait, unless the wire already holds as many unreceived
micro-batches as the sending stage may have in flight. Forward and backward take whole clock
ticks, everything else takes none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megaspeed.pipeline.instructions import (
    Backward,
    Forward,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
)
from megaspeed.pipeline.schedules import ScheduleError


@dataclass(frozen=True, slots=True)
class Span:
    """A forward or backward and the clock ticks it takes: from `start` up to, not with, `end`."""

    instruction: Forward | Backward
    start: int
    end: int


@dataclass(slots=True)
class Wire:
    """Micro-batches on their way from one stage to a neighbour, and when they came and went."""

    capacity: int
    sent: list[tuple[int, int]] = field(default_factory=list)  # (micro-batch, tick)
    received_at: list[int] = field(default_factory=list)

    def is_full(self) -> bool:
        return len(self.sent) - len(self.received_at) >= self.capacity

    def is_empty(self) -> bool:
        return len(self.sent) == len(self.received_at)

    def free_since(self) -> int:
        """The tick from which there was room for the next send."""
        blocking = len(self.sent) - self.capacity
        return self.received_at[blocking] if blocking >= 0 else 0


def peer(stage: int, instruction: Instruction) -> int:
    """The stage at the other end: activations flow to the next stage, gradients back."""
    return stage + 1 if isinstance(instruction, SendActivation | ReceiveGradient) else stage - 1


@dataclass(slots=True)
class SimulatedStage:
    """One stage's place in its program and its clock."""

    number: int
    program: Sequence[Instruction]
    wires: Mapping[tuple[int, int], Wire]  # (from stage, to stage) -> wire; shared by all stages
    backward_ticks: int
    position: int = 0
    clock: int = 0
    spans: list[Span] = field(default_factory=list)

    @property
    def next_instruction(self) -> Instruction | None:
        return self.program[self.position] if self.position < len(self.program) else None

    def advance(self) -> bool:
        """Run until an instruction must wait or none is left; whether any was run."""
        first = self.position
        while (instruction := self.next_instruction) is not None and self._run(instruction):
            self.position += 1
        return self.position > first

    def _run(self, instruction: Instruction) -> bool:
        """Run one instruction, or change nothing and return False where it must wait."""
        match instruction:
            case Forward():
                self._compute(instruction, 1)
            case Backward():
                self._compute(instruction, self.backward_ticks)
            case SendActivation() | SendGradient():
                return self._send(instruction)
            case ReceiveActivation() | ReceiveGradient():
                return self._receive(instruction)
        return True

    def _compute(self, instruction: Forward | Backward, ticks: int) -> None:
        self.spans.append(Span(instruction, self.clock, self.clock + ticks))
        self.clock += ticks

    def _send(self, instruction: SendActivation | SendGradient) -> bool:
        wire = self.wires[self.number, peer(self.number, instruction)]
        if wire.is_full():
            return False
        self.clock = max(self.clock, wire.free_since())
        wire.sent.append((instruction.micro_batch, self.clock))
        return True

    def _receive(self, instruction: ReceiveActivation | ReceiveGradient) -> bool:
        sender = peer(self.number, instruction)
        wire = self.wires[sender, self.number]
        if wire.is_empty():
            return False
        micro_batch, sent_at = wire.sent[len(wire.received_at)]
        if micro_batch != instruction.micro_batch:
            raise ScheduleError(
                f"pipeline stage {self.number}, instruction {self.position}: {instruction!r} "
                f"would get micro-batch {micro_batch}, which pipeline stage {sender} sends first. "
                "Two neighbours send and receive in the same order."
            )
        self.clock = max(self.clock, sent_at)
        wire.received_at.append(self.clock)
        return True

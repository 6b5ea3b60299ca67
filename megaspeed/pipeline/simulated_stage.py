"""A pipeline stage with a clock instead of tensors.

A simulated stage waits at each send, receive or exchange until its neighbour reaches the matching
one; then both continue. The executor, gloo, NCCL and a device synchronisation at any place wait for
no more than that. So a program that completes here completes there too. Forward and backward take
whole clock ticks, everything else takes none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from megaspeed.pipeline.instructions import (
    Backward,
    Batch,
    Exchange,
    Forward,
    Instruction,
    other_end,
    peer,
)


@dataclass(frozen=True, slots=True)
class Span:
    """A forward or backward and the clock ticks it takes: from `start` up to, not with, `end`."""

    instruction: Forward | Backward
    start: int
    end: int


@dataclass(slots=True)
class SimulatedStage:
    """One stage's place in its program and its clock."""

    number: int
    program: Sequence[Instruction | Exchange]
    backward_ticks: int
    position: int = 0
    clock: int = 0
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._compute()

    @property
    def waits_at(self) -> Batch | None:
        """The send, receive or exchange that is next; None at the program's end."""
        if self.position == len(self.program):
            return None
        instruction = self.program[self.position]
        assert isinstance(instruction, Batch), instruction
        return instruction

    @property
    def waits_for(self) -> int | None:
        """The number of the stage at its other end."""
        return None if self.waits_at is None else peer(self.number, self.waits_at)

    def meets(self, neighbour: "SimulatedStage") -> bool:
        """Whether the neighbour waits at the other end of what this stage waits at."""
        return (
            self.waits_at is not None
            and self.waits_for == neighbour.number
            and neighbour.waits_at == other_end(self.waits_at)
        )

    def proceed(self, clock: int) -> None:
        """The message that it waited at is there at tick `clock`: run until the next one."""
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

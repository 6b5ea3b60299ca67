"""What one pipeline stage does in one optimizer step, as plain data.

A schedule is an iterator of these records; the executor runs them one after another, the
simulation checks them and a grid prints them. They carry no tensor, so a schedule can be
compared, printed and tested without a process.

    load      receive activation      forward      send activation        down the pipeline
                receive gradient      backward     send gradient          up the pipeline
    reduce gradients, reduce tied gradients, optimizer step               once, at the end

A receive instruction only starts the receive. The forward or backward that needs the message waits
for it, so a stage can load a micro-batch while its activation arrives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from megaspeed.pipeline.schedules import Schedule


@dataclass(frozen=True, slots=True)
class MicroBatchInstruction:
    """An instruction about one micro-batch of the step, counted from 0."""

    letters: ClassVar[str] = "?"

    micro_batch: int

    def __str__(self) -> str:
        return f"{self.letters}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class LoadMicroBatch(MicroBatchInstruction):
    """Fetch the micro-batch: tokens, targets and the sample indices that seed dropout."""

    letters: ClassVar[str] = "L"


@dataclass(frozen=True, slots=True)
class ReceiveActivation(MicroBatchInstruction):
    """Start to receive the output of the previous pipeline stage; `Forward` waits for it."""

    letters: ClassVar[str] = "RA"


@dataclass(frozen=True, slots=True)
class Forward(MicroBatchInstruction):
    """Run this stage's layers; what backward needs is kept until it has run."""

    letters: ClassVar[str] = "F"


@dataclass(frozen=True, slots=True)
class SendActivation(MicroBatchInstruction):
    """Hand this stage's output to the next pipeline stage."""

    letters: ClassVar[str] = "SA"


@dataclass(frozen=True, slots=True)
class ReceiveGradient(MicroBatchInstruction):
    """Start to receive the gradient of this stage's output; `Backward` waits for it."""

    letters: ClassVar[str] = "RG"


@dataclass(frozen=True, slots=True)
class Backward(MicroBatchInstruction):
    """Accumulate this stage's gradients and free what forward kept."""

    letters: ClassVar[str] = "B"


@dataclass(frozen=True, slots=True)
class SendGradient(MicroBatchInstruction):
    """Hand the gradient of this stage's input to the previous pipeline stage."""

    letters: ClassVar[str] = "SG"


@dataclass(frozen=True, slots=True)
class StepInstruction:
    """An instruction about the whole step, after its last backward."""

    letters: ClassVar[str] = "?"

    def __str__(self) -> str:
        return self.letters


@dataclass(frozen=True, slots=True)
class ReduceGradients(StepInstruction):
    """Average what the backwards left on this rank over the data axis."""

    letters: ClassVar[str] = "R"


@dataclass(frozen=True, slots=True)
class ReduceTiedGradients(StepInstruction):
    """Add the gradients of weights that the first and the last pipeline stage share."""

    letters: ClassVar[str] = "RT"


@dataclass(frozen=True, slots=True)
class OptimizerStep(StepInstruction):
    """Clip, update the parameters and clear the gradients."""

    letters: ClassVar[str] = "S"


ForwardInstruction = LoadMicroBatch | ReceiveActivation | Forward | SendActivation
BackwardInstruction = ReceiveGradient | Backward | SendGradient
Instruction = (
    ForwardInstruction | BackwardInstruction | ReduceGradients | ReduceTiedGradients | OptimizerStep
)
SendInstruction = SendActivation | SendGradient
ReceiveInstruction = ReceiveActivation | ReceiveGradient


@dataclass(frozen=True, slots=True)
class Exchange:
    """A send and a receive with the same neighbour, started together as one batch.

    Schedules do not yield it: `exchanges.stage_program` forms it from a send and a receive.
    """

    send: SendInstruction
    receive: ReceiveInstruction


Batch = SendInstruction | ReceiveInstruction | Exchange
"""What a stage starts as one batch of messages with one neighbour."""


def peer(stage: int, batch: Batch) -> int:
    """The stage at the other end: activations go to the next stage, gradients to the previous."""
    message = batch.send if isinstance(batch, Exchange) else batch
    return stage + 1 if isinstance(message, SendActivation | ReceiveGradient) else stage - 1


def other_end(batch: Batch) -> Batch:
    """What the neighbour starts: it receives what this stage sends, and sends what it receives."""
    match batch:
        case SendActivation(m):
            return ReceiveActivation(m)
        case ReceiveActivation(m):
            return SendActivation(m)
        case SendGradient(m):
            return ReceiveGradient(m)
        case ReceiveGradient(m):
            return SendGradient(m)
        case Exchange(SendActivation(m), ReceiveGradient(k)):
            return Exchange(SendGradient(k), ReceiveActivation(m))
        case Exchange(SendGradient(k), ReceiveActivation(m)):
            return Exchange(SendActivation(m), ReceiveGradient(k))
    raise AssertionError(f"a send and a receive with two neighbours: {batch!r}")


# Which sends and receives go out together.
#
# In the steady state of 1f1b two neighbours send to each other at the same time:
#
#     stage s        ... Forward(m)   SendActivation(m)  ReceiveGradient(k)     Backward(k) ...
#                                             |                 ^
#                                             v                 |
#     stage s + 1    ... Backward(k)  ReceiveActivation(m)  SendGradient(k)     Forward(m)  ...
#
# NCCL completes a send only when the other side receives, and runs the messages of a communicator
# in the order of the calls. If both stages start their send first, both wait: on one communicator
# always, on two communicators if the device is synchronised between the send and the receive. As
# one batch, a send and a receive complete together, in any order.

StageProgram = list[Instruction | Exchange]


def stage_program(
    schedule: Schedule, pipeline_stages: int, pipeline_stage: int, micro_batches: int
) -> StageProgram:
    """One stage's instructions for one step, with its exchanges formed."""
    programs = {
        stage: list(schedule(pipeline_stages, stage, micro_batches))
        for stage in (pipeline_stage - 1, pipeline_stage, pipeline_stage + 1)
        if 0 <= stage < pipeline_stages
    }
    return form_exchanges(
        programs[pipeline_stage],
        pipeline_stage,
        before=programs.get(pipeline_stage - 1, ()),
        after=programs.get(pipeline_stage + 1, ()),
    )


def form_exchanges(
    program: Sequence[Instruction],
    pipeline_stage: int,
    *,
    before: Sequence[Instruction],
    after: Sequence[Instruction],
) -> StageProgram:
    """Join each send with the receive directly after it, if the neighbour can do the same.

    They become an exchange if both have the same neighbour, and if on that neighbour the matching
    receive also comes directly after the matching send. The condition is symmetric, so both
    neighbours form the same exchanges.

    Args:
        program: the stage's own instructions.
        pipeline_stage: its number.
        before, after: the instructions of the stages before and after; empty if there is none.
    """
    neighbours = {
        pipeline_stage - 1: frozenset(pairwise(before)),
        pipeline_stage + 1: frozenset(pairwise(after)),
    }
    joined: StageProgram = []
    for instruction in program:
        last = joined[-1] if joined else None
        if (
            isinstance(last, SendInstruction)
            and isinstance(instruction, ReceiveInstruction)
            and peer(pipeline_stage, last) == peer(pipeline_stage, instruction)
            and (other_end(instruction), other_end(last)) in neighbours[peer(pipeline_stage, last)]
        ):
            joined[-1] = Exchange(last, instruction)
        else:
            joined.append(instruction)
    return joined

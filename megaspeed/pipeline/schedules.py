"""Pipeline schedules: the instructions that a stage executes in one optimizer step, as plain data.

    load      receive activation      forward      send activation        down the pipeline
                receive gradient      backward     send gradient          up the pipeline
    reduce gradients, reduce tied gradients, optimizer step               once, at the end

A receive instruction only starts to receive. The forward or backward that needs the message waits
for it, so a stage can load a micro-batch while its activation arrives.

A schedule is a generator of instructions. Its arguments are the number of pipeline stages, the
index of this stage, and the number of micro-batches of one optimizer step. All stages run the same
generator. Instructions contain no tensors, so a schedule can be compared, printed and simulated
without a process. The executor runs them one after another.

Every stage loads every micro-batch: the first stage needs its tokens, the last one its targets, and
all need its sample indices, from which dropout computes its masks.

In the steady state of 1f1b two neighbours send to each other at the same time:

    stage s        ... Forward(m)   SendActivation(m)  ReceiveGradient(k)     Backward(k) ...
                                            |                 ^
                                            v                 |
    stage s + 1    ... Backward(k)  ReceiveActivation(m)  SendGradient(k)     Forward(m)  ...

NCCL completes a send only when the other side receives, and runs the messages of a communicator in
the order of the calls. If both stages start their send first, both wait: on one communicator
always, on two communicators if the device is synchronised between the send and the receive. As one
batch, a send and a receive complete together, in any order. So each stage yields its receive
directly after its send, and ``form_exchanges`` joins the two into one batch.

``docs/architecture.md`` describes how to add a schedule. (An interleaved schedule, Narayanan et al.
2021, section 2.2.2, gives a stage several chunks of layers. It would be a generator whose
instructions also name the chunk.)
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class MicroBatchInstruction:
    """An instruction about one micro-batch of the step, counted from 0."""

    micro_batch: int


@dataclass(frozen=True, slots=True)
class LoadMicroBatch(MicroBatchInstruction):
    """Fetch the micro-batch: tokens, targets and the sample indices that seed dropout."""


@dataclass(frozen=True, slots=True)
class ReceiveActivation(MicroBatchInstruction):
    """Start to receive the output of the previous stage; ``Forward`` waits for it."""


@dataclass(frozen=True, slots=True)
class Forward(MicroBatchInstruction):
    """Run the layers of this stage; the input and the graph are kept for ``Backward``."""


@dataclass(frozen=True, slots=True)
class SendActivation(MicroBatchInstruction):
    """Send the output of this stage to the next stage."""


@dataclass(frozen=True, slots=True)
class ReceiveGradient(MicroBatchInstruction):
    """Start to receive the gradient of the output; ``Backward`` waits for it."""


@dataclass(frozen=True, slots=True)
class Backward(MicroBatchInstruction):
    """Accumulate the gradients of this stage, and free what ``Forward`` has kept."""


@dataclass(frozen=True, slots=True)
class SendGradient(MicroBatchInstruction):
    """Send the gradient of the input to the previous stage."""


@dataclass(frozen=True, slots=True)
class StepInstruction:
    """An instruction that runs once a step, after the last backward."""


@dataclass(frozen=True, slots=True)
class ReduceGradients(StepInstruction):
    """Average the accumulated gradients over the data axis."""


@dataclass(frozen=True, slots=True)
class ReduceTiedGradients(StepInstruction):
    """Sum the gradients of weights that the first and the last stage share."""


@dataclass(frozen=True, slots=True)
class OptimizerStep(StepInstruction):
    """Clip, and update the parameters. The first forward of the next step clears the gradients."""


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

    Schedules do not yield it: ``stage_program`` joins a send and a receive.
    """

    send: SendInstruction
    receive: ReceiveInstruction


Batch = SendInstruction | ReceiveInstruction | Exchange
"""One batch of messages with one neighbour."""


def peer(stage: int, batch: Batch) -> int:
    """The stage at the other end of ``batch``, which ``stage`` starts."""
    message = batch.send if isinstance(batch, Exchange) else batch
    return stage + 1 if isinstance(message, SendActivation | ReceiveGradient) else stage - 1


def other_end(batch: Batch) -> Batch:
    """The matching batch of the neighbour: it receives what this stage sends, and vice versa."""
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
    raise AssertionError(f"the send and the receive have different neighbours: {batch!r}")


class ScheduleError(ValueError):
    """A schedule breaks a law of pipelines."""


class Schedule(Protocol):
    """Yields the instructions of one pipeline stage for one step."""

    def __call__(
        self, pipeline_stages: int, pipeline_stage: int, micro_batches: int
    ) -> Iterator[Instruction]: ...


def gpipe(pipeline_stages: int, pipeline_stage: int, micro_batches: int) -> Iterator[Instruction]:
    """All forwards, then all backwards (GPipe, Huang et al. 2019, section 2.2).

    A stage keeps the activations of all micro-batches. Backwards run in the order of the forwards,
    so gradients are summed in the same order as with one process.
    """
    for micro_batch in range(micro_batches):
        yield from _forward(pipeline_stages, pipeline_stage, micro_batch)
    for micro_batch in range(micro_batches):
        yield from _backward(pipeline_stages, pipeline_stage, micro_batch)
    yield from _finish_step()


def one_forward_one_backward(
    pipeline_stages: int, pipeline_stage: int, micro_batches: int
) -> Iterator[Instruction]:
    """Warmup, then one forward and one backward in turn, then cooldown.

    PipeDream-Flush (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
    Clusters", section 2.2.1). It has the same bubble as GPipe, but needs less memory: a stage keeps
    the activations of at most ``pipeline_stages - pipeline_stage`` micro-batches.
    """
    # After this many forwards, the first micro-batch is on the last stage, and its gradient is what
    # this stage receives next.
    warmup = min(pipeline_stages - 1 - pipeline_stage, micro_batches)
    steady = micro_batches - warmup

    for micro_batch in range(warmup):
        yield from _forward(pipeline_stages, pipeline_stage, micro_batch)
    for micro_batch in range(steady):
        yield from _forward(pipeline_stages, pipeline_stage, warmup + micro_batch)
        yield from _backward(pipeline_stages, pipeline_stage, micro_batch)
    for micro_batch in range(steady, micro_batches):
        yield from _backward(pipeline_stages, pipeline_stage, micro_batch)
    yield from _finish_step()


def forward_only(
    pipeline_stages: int, pipeline_stage: int, micro_batches: int
) -> Iterator[Instruction]:
    """Evaluation: one forward of every micro-batch."""
    for micro_batch in range(micro_batches):
        yield from _forward(pipeline_stages, pipeline_stage, micro_batch)


# The training schedules by their name in the JSON (``parallel.schedule``).
SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_forward_one_backward}
)


def peak_micro_batches_in_flight(
    schedule: Schedule, pipeline_stages: int, pipeline_stage: int, micro_batches: int
) -> int:
    """The largest number of micro-batches whose activations one stage holds at the same time.

    A micro-batch is in flight from its forward to the last instruction of this stage that names it:
    its backward or the send of its gradient.
    """
    if schedule is gpipe:
        return micro_batches
    assert schedule is one_forward_one_backward, f"state the peak of {schedule} here"
    return min(micro_batches, pipeline_stages - pipeline_stage)


def _forward(pipeline_stages: int, pipeline_stage: int, micro_batch: int) -> Iterator[Instruction]:
    if pipeline_stage > 0:
        yield ReceiveActivation(micro_batch)
    yield LoadMicroBatch(micro_batch)
    yield Forward(micro_batch)
    if pipeline_stage < pipeline_stages - 1:
        yield SendActivation(micro_batch)


def _backward(pipeline_stages: int, pipeline_stage: int, micro_batch: int) -> Iterator[Instruction]:
    if pipeline_stage < pipeline_stages - 1:
        yield ReceiveGradient(micro_batch)
    yield Backward(micro_batch)
    if pipeline_stage > 0:
        yield SendGradient(micro_batch)


def _finish_step() -> Iterator[Instruction]:
    yield ReduceGradients()
    yield ReduceTiedGradients()
    yield OptimizerStep()


StageProgram = list[Instruction | Exchange]
Pass = Literal["forward", "backward"]


def passes_of(program: Iterable[Instruction | Exchange]) -> list[Pass]:
    """The passes through the layers of a stage, in order."""
    return [
        "forward" if isinstance(instruction, Forward) else "backward"
        for instruction in program
        if isinstance(instruction, Forward | Backward)
    ]


def stage_program(
    schedule: Schedule, pipeline_stages: int, pipeline_stage: int, micro_batches: int
) -> StageProgram:
    """The instructions of one stage for one step, with its exchanges formed."""
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

    They become an exchange if both have the same neighbour, and if that neighbour yields the
    matching receive directly after the matching send. The condition is symmetric, so both
    neighbours form the same exchanges.

    Args:
        program: the instructions of the stage.
        pipeline_stage: its index.
        before, after: the instructions of its neighbours; empty if there is none.
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

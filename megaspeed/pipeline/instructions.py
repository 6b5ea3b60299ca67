"""The instructions that one pipeline stage executes in one optimizer step, as plain data.

A schedule is an iterator of instructions. They contain no tensors, so a schedule can be compared,
printed and simulated without a process. The executor runs them one after another.

    load      receive activation      forward      send activation        down the pipeline
                receive gradient      backward     send gradient          up the pipeline
    reduce gradients, reduce tied gradients, optimizer step               once, at the end

A receive instruction only starts to receive. The forward or backward that needs the message waits
for it, so a stage can load a micro-batch while its activation arrives.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicroBatchInstruction:
    """An instruction about one micro-batch of the step, counted from 0."""

    micro_batch: int


@dataclass(frozen=True, slots=True)
class LoadMicroBatch(MicroBatchInstruction):
    """Fetch the micro-batch: tokens, targets and the sample indices that seed dropout."""


@dataclass(frozen=True, slots=True)
class ReceiveActivation(MicroBatchInstruction):
    """Start to receive the output of the previous stage; `Forward` waits for it."""


@dataclass(frozen=True, slots=True)
class Forward(MicroBatchInstruction):
    """Run the layers of this stage; the input and the graph are kept for `Backward`."""


@dataclass(frozen=True, slots=True)
class SendActivation(MicroBatchInstruction):
    """Send the output of this stage to the next stage."""


@dataclass(frozen=True, slots=True)
class ReceiveGradient(MicroBatchInstruction):
    """Start to receive the gradient of the output; `Backward` waits for it."""


@dataclass(frozen=True, slots=True)
class Backward(MicroBatchInstruction):
    """Accumulate the gradients of this stage, and free what `Forward` has kept."""


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
    """Clip, update the parameters and clear the gradients."""


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

    Schedules do not yield it: `schedules.stage_program` joins a send and a receive.
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

"""What one pipeline stage does in one optimizer step, as plain data.

A schedule is an iterator of these records; the executor runs them one after another, the
simulation checks them and a grid prints them. They carry no tensor, so a schedule can be
compared, printed and tested without a process.

    load      receive activation      forward      send activation        down the pipeline
                receive gradient      backward     send gradient          up the pipeline
    reduce gradients, reduce tied gradients, optimizer step               once, at the end
"""

from dataclasses import dataclass
from typing import ClassVar


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
    """Wait for the output of the previous pipeline stage."""

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
    """Wait for the gradient of this stage's output from the next pipeline stage."""

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

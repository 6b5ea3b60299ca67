"""Runs one pipeline stage's instructions: the imperative shell round the pure schedules.

    previous stage                         this stage                         next stage
    activations  ------------------------> forward  ------------------------> activations
    gradients    <------------------------ backward <------------------------ gradients

What is held for a micro-batch between its forward and its backward is its input and its output
(with the graph between them); both are dropped as soon as its backward is done.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megaspeed.data import MicroBatch
from megaspeed.pipeline.instructions import (
    Backward,
    Forward,
    Instruction,
    LoadMicroBatch,
    OptimizerStep,
    ReceiveActivation,
    ReceiveGradient,
    ReduceGradients,
    ReduceTiedGradients,
    SendActivation,
    SendGradient,
)
from megaspeed.pipeline.p2p import Channel
from megaspeed.topology.failure import note_phase

LossFunction = Callable[[Tensor, Tensor], Tensor]


class StageEngine(Protocol):
    """What the executor asks of one pipeline stage's engine."""

    def forward(
        self, micro_batch: int, x: Tensor, samples: Tensor, documents: Tensor | None
    ) -> Tensor:
        """Runs the stage's layers."""

    def backward(
        self, micro_batch: int, output: Tensor, gradient: Tensor | None, *, last: bool
    ) -> None:
        """Back-propagates from a loss (gradient None) or from an output."""

    def reduce_gradients(self) -> None:
        """Sums over the data axis."""

    def reduce_tied_gradients(self) -> None:
        """Sums over the pipeline stages that share a weight."""


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """The channels to the stages before and after; None at the pipeline's ends."""

    activations_in: Channel | None
    activations_out: Channel | None
    gradients_in: Channel | None
    gradients_out: Channel | None

    def drain(self) -> None:
        """Waits until everything sent has left."""
        for channel in (self.activations_out, self.gradients_out):
            if channel is not None:
                channel.drain()


class Executor:
    """Interprets the instructions of one step, or of one evaluation, for one rank.

    With gradients enabled, inputs and outputs are kept until their backward; otherwise they are
    dropped at once.

    Args:
        engine: this stage's engine.
        neighbours: its channels.
        load: micro-batch index -> this data rank's rows, the same on every pipeline stage.
        loss_function: (output of the last stage, targets) -> (B, S) losses, zero where a target is
            not counted.
        loss_scale: what the sum of a micro-batch's losses is multiplied by before its backward
            pass.
        micro_batches: how many there are.
    """

    def __init__(
        self,
        engine: StageEngine,
        neighbours: Neighbours,
        *,
        load: Callable[[int], MicroBatch],
        loss_function: LossFunction,
        loss_scale: float,
        micro_batches: int,
    ) -> None:
        self._engine = engine
        self._neighbours = neighbours
        self._load = load
        self._loss_function = loss_function
        self._loss_scale = loss_scale
        self._backwards_left = micro_batches
        self._batches: dict[int, MicroBatch] = {}
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._output_gradients: dict[int, Tensor] = {}
        self._input_gradients: dict[int, Tensor] = {}
        self.loss_sum: Tensor | None = None
        """Sum of this rank's losses so far (fp32 scalar); None but on the last stage."""

    def run(self, instructions: Iterable[Instruction]) -> None:
        """Executes the instructions in order; ``OptimizerStep`` is left to the caller."""
        for instruction in instructions:
            try:
                self._execute(instruction)
            except Exception as error:
                note_phase(error, repr(instruction))
                raise
        self._neighbours.drain()

    def _execute(self, instruction: Instruction) -> None:
        neighbours = self._neighbours
        match instruction:
            case LoadMicroBatch(m):
                self._batches[m] = self._load(m)
            case ReceiveActivation(m):
                assert neighbours.activations_in is not None
                received = neighbours.activations_in.receive()
                self._inputs[m] = received.requires_grad_(torch.is_grad_enabled())
            case Forward(m):
                self._forward(m)
            case SendActivation(m):
                assert neighbours.activations_out is not None
                neighbours.activations_out.send(self._outputs[m])
                self._drop_unless_training(m)
            case ReceiveGradient(m):
                assert (
                    neighbours.gradients_in is not None and neighbours.activations_out is not None
                )
                self._output_gradients[m] = neighbours.gradients_in.receive()
                # The gradient has come back, so the activation has arrived: its send can let go of
                # it.
                neighbours.activations_out.finish_oldest_send()
            case Backward(m):
                self._backward(m)
            case SendGradient(m):
                assert neighbours.gradients_out is not None
                neighbours.gradients_out.send(self._input_gradients.pop(m))
            case ReduceGradients():
                self._engine.reduce_gradients()
            case ReduceTiedGradients():
                self._engine.reduce_tied_gradients()
            case OptimizerStep():
                pass

    def _forward(self, m: int) -> None:
        batch = self._batches.pop(m)
        x = self._inputs.get(m, batch.tokens)
        self._outputs[m] = self._engine.forward(m, x, batch.samples, batch.documents)
        if self._neighbours.activations_out is None:
            loss = self._loss_function(self._outputs.pop(m), batch.targets).sum()
            self.loss_sum = (
                loss.detach() if self.loss_sum is None else self.loss_sum + loss.detach()
            )
            self._outputs[m] = loss * self._loss_scale
            self._drop_unless_training(m)

    def _drop_unless_training(self, m: int) -> None:
        if not torch.is_grad_enabled():
            del self._outputs[m]
            self._inputs.pop(m, None)

    def _backward(self, m: int) -> None:
        output, gradient = self._outputs.pop(m), self._output_gradients.pop(m, None)
        self._backwards_left -= 1
        self._engine.backward(m, output, gradient, last=self._backwards_left == 0)
        x = self._inputs.pop(m, None)
        if x is not None:
            assert x.grad is not None
            self._input_gradients[m] = x.grad

"""Executes the instructions of one pipeline stage.

    previous stage                         this stage                         next stage
    activations  ------------------------> forward  ------------------------> activations
    gradients    <------------------------ backward <------------------------ gradients

Between the forward and the backward of a micro-batch, the stage holds its input and its graph.
Backward needs only the last edge of the graph, so the output is freed after it is sent.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megaspeed.model.micro_batch import MicroBatch
from megaspeed.pipeline.p2p import Neighbours
from megaspeed.pipeline.schedules import (
    Backward,
    Exchange,
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
from megaspeed.topology.activity import Activity, Part, Timeline, note_phase

_PARTS: dict[type, Part] = {
    LoadMicroBatch: "data_loading",
    Forward: "compute",
    Backward: "compute",
    ReduceGradients: "data",
    OptimizerStep: "optimizer",
}
"""The part of a step that an instruction is timed as; "pipeline" for all others."""


Outcome = TypeVar("Outcome")


class StageEngine(Protocol):
    """The engine of one pipeline stage."""

    def forward(self, x: Tensor, batch: MicroBatch) -> Tensor:
        """Run the layers of the stage on ``x``. The last stage returns the sum of the losses."""

    def backward(
        self, output: Tensor | GradientEdge, gradient: Tensor | None, *, last: bool
    ) -> None:
        """Back-propagate from the loss (``gradient`` is None) or from the edge of an output."""

    def reduce_gradients(self) -> None:
        """Average over the data axis, and sum partial gradients over the tensor axis."""

    def reduce_tied_gradients(self) -> None:
        """Sum the gradients over the pipeline stages that share a weight."""


class Executor:
    """Executes the instructions of one step, or of one evaluation, on one rank.

    With gradients enabled, inputs and graphs are kept until their backward.

    Args:
        engine: the engine of this stage.
        neighbours: the links to the previous and next stage.
        load: micro-batch index -> rows of this data rank, the same on every pipeline stage.
        micro_batches: how many there are.
        activity: records each instruction before it is executed.
        timeline: times each instruction.
    """

    def __init__(
        self,
        engine: StageEngine,
        neighbours: Neighbours,
        *,
        load: Callable[[int], MicroBatch],
        micro_batches: int,
        activity: Activity | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self._activity = activity or Activity()
        self._timeline = timeline or Timeline(torch.device("cpu"))
        self._engine = engine
        self._neighbours = neighbours
        self._load = load
        self._backwards_left = micro_batches
        self._batches: dict[int, MicroBatch] = {}
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        # Where a backward starts: the last edge of the graph, or the loss.
        self._ends: dict[int, Tensor | GradientEdge] = {}
        self._output_gradients: dict[int, Tensor] = {}
        self._input_gradients: dict[int, Tensor] = {}
        self.losses: dict[int, Tensor] = {}
        """Sum of the losses of each micro-batch (fp32 scalars); empty except on the last stage."""

    @property
    def loss_sum(self) -> Tensor | None:
        """Sum of all losses so far (fp32 scalar); None except on the last stage."""
        return functools.reduce(torch.add, self.losses.values()) if self.losses else None

    def run(
        self,
        program: Iterable[Instruction | Exchange],
        step: Callable[[Tensor | None], Outcome] | None = None,
    ) -> Outcome | None:
        """Execute a ``stage_program`` in order.

        Args:
            program: of a step or of an evaluation.
            step: called at ``OptimizerStep`` with the sum of this rank's losses (an fp32 scalar),
                or None if this is not the last stage.

        Returns:
            What ``step`` has returned; None for an evaluation.
        """
        outcome = None
        for instruction in program:
            try:
                self._activity.begin(instruction)
                with self._timeline.part(_PARTS.get(type(instruction), "pipeline"), instruction):
                    if isinstance(instruction, OptimizerStep):
                        outcome = self._take(step)
                    else:
                        self._execute(instruction)
            except Exception as error:
                note_phase(error, repr(instruction))
                raise
        self._drain()
        return outcome

    def _take(self, step: Callable[[Tensor | None], Outcome] | None) -> Outcome | None:
        self._drain()
        return None if step is None else step(self.loss_sum)

    def _drain(self) -> None:
        with self._timeline.part("pipeline"):
            self._neighbours.drain()

    def _execute(self, instruction: Instruction | Exchange) -> None:
        before, after = self._neighbours.before, self._neighbours.after
        match instruction:
            case LoadMicroBatch(m):
                self._batches[m] = self._load(m)
            case ReceiveActivation(m):
                assert before is not None
                self._inputs[m] = before.receive()
            case Forward(m):
                self._forward(m)
            case SendActivation(m):
                assert after is not None
                after.send(self._outputs.pop(m))
            case Exchange(SendActivation(m), ReceiveGradient(k)):
                assert after is not None
                self._output_gradients[k] = after.exchange(self._outputs.pop(m))
            case ReceiveGradient(m):
                assert after is not None
                self._output_gradients[m] = after.receive()
            case Backward(m):
                self._backward(m)
            case SendGradient(m):
                assert before is not None
                before.send(self._input_gradients.pop(m))
            case Exchange(SendGradient(m), ReceiveActivation(k)):
                assert before is not None
                self._inputs[k] = before.exchange(self._input_gradients.pop(m))
            case ReduceGradients():
                self._engine.reduce_gradients()
            case ReduceTiedGradients():
                self._engine.reduce_tied_gradients()

    def _forward(self, m: int) -> None:
        batch = self._batches.pop(m)
        x = batch.tokens
        if self._neighbours.before is not None:
            with self._timeline.part("pipeline"):
                self._neighbours.before.finish()
            x = self._inputs[m].requires_grad_(torch.is_grad_enabled())
        output = self._engine.forward(x, batch)
        if self._neighbours.after is None:
            self.losses[m] = output.detach()
            self._ends[m] = output
        else:
            self._outputs[m] = output
            if torch.is_grad_enabled():
                self._ends[m] = get_gradient_edge(output)
        if not torch.is_grad_enabled():
            self._inputs.pop(m, None)
            self._ends.pop(m, None)

    def _backward(self, m: int) -> None:
        if self._neighbours.after is not None:
            with self._timeline.part("pipeline"):
                self._neighbours.after.finish()
        end, gradient = self._ends.pop(m), self._output_gradients.pop(m, None)
        self._backwards_left -= 1
        self._engine.backward(end, gradient, last=self._backwards_left == 0)
        x = self._inputs.pop(m, None)
        if x is not None:
            assert x.grad is not None
            self._input_gradients[m] = x.grad

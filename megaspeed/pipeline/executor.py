"""Executes the instructions of one pipeline stage.

    stage before                           this stage                         stage after
    activations  ------------------------> forward  ------------------------> activations
    gradients    <------------------------ backward <------------------------ gradients

Between the forward and the backward of a micro-batch, a chunk of the stage holds its input and its
graph. Backward needs only the last edge of the graph, so the output is freed after it is sent.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megaspeed.model.micro_batch import MicroBatch
from megaspeed.pipeline.p2p import Links
from megaspeed.pipeline.schedules import (
    Backward,
    Compute,
    End,
    Forward,
    Gather,
    Instruction,
    LoadMicroBatch,
    Message,
    OptimizerStep,
    Pipeline,
    Receive,
    ReduceGradients,
    ReduceTiedGradients,
    Release,
    Send,
    Transfer,
    input_of,
    output_of,
    peer,
)
from megaspeed.pipeline.visits import ends_of
from megaspeed.topology.activity import Activity, Part, Timeline, note_phase

_PARTS: dict[type, Part] = {
    LoadMicroBatch: "data_loading",
    Forward: "compute",
    Backward: "compute",
    Gather: "data",
    Release: "data",
    ReduceGradients: "data",
    OptimizerStep: "optimizer",
}
"""The part of a step that an instruction is timed as; "pipeline" for all others."""


InsteadOfLoss = Callable[..., Tensor]
"""A function of the loss's arguments, which the last stage of an evaluation computes instead."""


class StageEngine(Protocol):
    """The engine of one pipeline stage. ``ZeroEngine`` in ``zero/engine.py`` implements it."""

    def forward(
        self, x: Tensor, batch: MicroBatch, chunk: int, instead_of_loss: InsteadOfLoss | None
    ) -> Tensor: ...

    def backward(
        self, output: Tensor | GradientEdge, gradient: Tensor | None, chunk: int, end: End
    ) -> None: ...

    def gather(self, chunk: int, *, forward: bool) -> None: ...

    def release(self, chunk: int) -> None: ...

    def reduce_gradients(self) -> None: ...

    def reduce_tied_gradients(self) -> None: ...


class Executor:
    """Executes the instructions of one step, or of one evaluation, on one rank.

    With gradients enabled, inputs and graphs are kept until their backward.

    Args:
        engine: the engine of this stage.
        links: to the other stages; None if there is only one.
        pipeline: the shape of the step.
        stage: this rank's stage.
        load: micro-batch index -> rows of this data rank, the same on every pipeline stage.
        instead_of_loss: what the last stage computes; None for the loss.
        activity: records each instruction before it is executed.
        timeline: times each instruction.
    """

    def __init__(
        self,
        engine: StageEngine,
        links: Links | None,
        pipeline: Pipeline,
        stage: int,
        *,
        load: Callable[[int], MicroBatch],
        instead_of_loss: InsteadOfLoss | None = None,
        activity: Activity | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self._activity = activity or Activity()
        self._timeline = timeline or Timeline(torch.device("cpu"))
        self._engine = engine
        self._links = links
        self._pipeline, self._stage = pipeline, stage
        self._load, self._instead_of_loss = load, instead_of_loss
        self._batches: dict[int, MicroBatch] = {}
        self._received: dict[Receive, Tensor] = {}
        self._in_flight: Sequence[Receive] = ()  # may not be complete
        self._computed: dict[Send, Tensor] = {}  # not sent yet
        self._inputs: dict[tuple[int, int], Tensor] = {}  # by micro-batch and chunk
        # Where a backward starts: the last edge of the graph, or the loss.
        self._ends: dict[tuple[int, int], Tensor | GradientEdge] = {}
        self.losses: dict[int, Tensor] = {}
        """What the last stage has computed for each micro-batch: the sum of its losses (an fp32
        scalar), or what it computes instead. Empty on other stages."""

    @property
    def loss_sum(self) -> Tensor | None:
        """Sum of all losses so far (fp32 scalar); None except on the last stage."""
        return functools.reduce(torch.add, self.losses.values()) if self.losses else None

    def run(self, program: Iterable[Instruction]) -> None:
        """Execute a ``stage_program`` in order, but not its ``OptimizerStep``: the caller takes
        that step, within ``executing``. At the end of a program, it calls ``finish``.

        ``program`` may look at the rank after each instruction, before it yields the next one.
        """
        for instruction in program:
            with self.executing(instruction):
                self._execute(instruction)

    @contextmanager
    def executing(self, instruction: Instruction) -> Iterator[None]:
        """The time in which an instruction is executed. It is recorded before, and timed.

        An exception that leaves the block gets a note with the instruction.
        """
        try:
            # Before it runs, so that the report of a hang names an instruction that does not end.
            self._activity.begin(instruction)
            with self._timeline.part(_PARTS.get(type(instruction), "pipeline"), instruction):
                yield
        except Exception as error:
            note_phase(error, repr(instruction))
            raise

    def finish(self) -> None:
        """Wait for the messages that are in flight."""
        if self._links is not None:
            with self._timeline.part("pipeline"):
                self._links.finish()

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case LoadMicroBatch(m):
                self._batches[m] = self._load(m)
            case Transfer(messages):
                self._transfer(messages)
            case Forward():
                self._forward(instruction)
            case Backward():
                self._backward(instruction)
            case Gather(chunk, forward):
                self._engine.gather(chunk, forward=forward)
            case Release(chunk):
                self._engine.release(chunk)
            case ReduceGradients():
                self._engine.reduce_gradients()
            case ReduceTiedGradients():
                self._engine.reduce_tied_gradients()

    def _transfer(self, messages: Sequence[Message]) -> None:
        assert self._links is not None, "the only stage of a pipeline has no messages"
        sends = [message for message in messages if isinstance(message, Send)]
        sent = [(self._computed.pop(message), self._peer(message)) for message in sends]
        self._in_flight = [message for message in messages if isinstance(message, Receive)]
        received = self._links.start(sent, [self._peer(message) for message in self._in_flight])
        self._received.update(zip(self._in_flight, received, strict=True))

    def _peer(self, message: Message) -> int:
        return peer(self._pipeline, self._stage, message)

    def _input_of(self, compute: Compute) -> Tensor | None:
        """The tensor that another stage has sent for this; None if it needs none."""
        needed = input_of(self._pipeline, self._stage, compute)
        if needed is None:
            return None
        # As late as possible: the messages travel while the stage computes.
        if needed in self._in_flight:
            self.finish()
            self._in_flight = ()
        return self._received.pop(needed)

    def _forward(self, forward: Forward) -> None:
        key = m, chunk = forward.micro_batch, forward.chunk
        is_last = chunk == self._pipeline.chunks - 1
        batch = self._batches.pop(m) if is_last else self._batches[m]
        x = self._input_of(forward)
        if x is not None and torch.is_grad_enabled():
            self._inputs[key] = x.requires_grad_()
        output = self._engine.forward(
            batch.tokens if x is None else x, batch, chunk, self._instead_of_loss
        )
        sent = output_of(self._pipeline, self._stage, forward)
        if sent is None:
            self.losses[m] = output.detach()
        else:
            self._computed[sent] = output
        if torch.is_grad_enabled():
            self._ends[key] = output if sent is None else get_gradient_edge(output)

    def _backward(self, backward: Backward) -> None:
        key = _, chunk = backward.micro_batch, backward.chunk
        end = ends_of(self._pipeline, self._stage).get(backward, "micro_batch")
        self._engine.backward(self._ends.pop(key), self._input_of(backward), chunk, end)
        x, sent = self._inputs.pop(key, None), output_of(self._pipeline, self._stage, backward)
        if x is not None and sent is not None:
            assert x.grad is not None
            self._computed[sent] = x.grad

"""Predicts the peak memory of a rank of one pipeline stage in an optimizer step.

The step is simulated layer by layer. The peak is in one of

    forward       of a micro-batch while others are in flight
    backward      of the first micro-batch, which allocates gradients, or of a later one
    reduction     of the accumulated gradients, if they are reduced once a step
    optimizer     the optimizer step

The schedule determines how many micro-batches are in flight: up to P - s for 1f1b at pipeline stage
s of P, and all of them for gpipe (Narayanan et al. 2021, section 2.2; Korthikanti et al. 2022,
section 4.2.3 for the activations of the first stage).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, repeat

from megaspeed.analysis.costs.activations import (
    Activations,
    LayerMemory,
    hidden_bytes,
)
from megaspeed.analysis.costs.memory import (
    BYTES_OF,
    Category,
    GatheredBytes,
    LocalParameter,
    MemoryBytes,
    bucket_elements,
    elements_of,
    gathered_in_pass,
    gradient_partition_bytes,
    keeps_complete_gradients,
    local_parameters,
    model_states,
)
from megaspeed.config.resolve import Run
from megaspeed.model.parameters import EMBEDDING_WEIGHT, HEAD_WEIGHT, layer_count, layer_name
from megaspeed.pipeline.partition import layers_of_stages
from megaspeed.pipeline.schedules import SCHEDULES, peak_micro_batches_in_flight


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes of a rank of a pipeline stage."""

    states: MemoryBytes  # memory between two micro-batches of a step, without activations
    peak: MemoryBytes  # memory at the peak of the step


def predict_memory(run: Run, pipeline_stage: int, *, device_type: str = "cuda") -> StageMemory:
    """Memory of a rank of one pipeline stage. All its data and tensor ranks hold the same.

    ``device_type`` is "cuda" or "cpu". RMSNorm keeps more on a CPU.
    """
    step = _Step(run, pipeline_stage, device_type)
    peaks = (ledger.peak for ledger in step.moments())
    return StageMemory(states=step.states, peak=max(peaks, key=lambda peak: peak.total))


class _Ledger:
    """Counts the bytes held now by category, and keeps the counts of the highest sum."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.peak = MemoryBytes()
        self._total = 0

    def hold(self, category: Category, size_bytes: int) -> None:
        """Adds bytes, which are held until ``free``."""
        self.held[category] += size_bytes
        self._total += size_bytes
        if self._total > self.peak.total:
            self.peak = MemoryBytes(**self.held)

    def free(self, category: Category, size_bytes: int) -> None:
        assert self.held[category] >= size_bytes, f"{category} {size_bytes} was never held"
        self.hold(category, -size_bytes)

    @contextmanager
    def briefly(self, category: Category, size_bytes: int) -> Iterator[None]:
        """Holds bytes within a ``with`` block."""
        self.hold(category, size_bytes)
        yield
        self.free(category, size_bytes)

    def touch(self, category: Category, size_bytes: int) -> None:
        """Adds bytes and frees them at once, so they count only for the peak."""
        self.hold(category, size_bytes)
        self.free(category, size_bytes)


class _Step:
    """Simulates one optimizer step of a pipeline stage, layer by layer."""

    def __init__(self, run: Run, pipeline_stage: int, device_type: str) -> None:
        self._run = run
        self._first_stage = pipeline_stage == 0
        self._last_stage = pipeline_stage == run.grid.pp - 1
        self._parameters = local_parameters(run, pipeline_stage)
        self.states = model_states(run, self._parameters, on_host=device_type == "cpu")
        self._layers = _layers(run, pipeline_stage, self._parameters, device_type)
        self._hidden = hidden_bytes(run)
        self._shared = Activations(run, device_type).shared()
        self._element = BYTES_OF[run.precision]
        self._gradient = BYTES_OF[run.accumulation_dtype]
        self._bucket = bucket_elements(run, self._parameters) * self._gradient
        self._partition = gradient_partition_bytes(run, self._parameters)
        self._in_flight = peak_micro_batches_in_flight(
            SCHEDULES[run.config.parallel.schedule],
            run.grid.pp,
            pipeline_stage,
            run.batch.gradient_accumulation_steps,
        )

    def moments(self) -> Iterator[_Ledger]:
        """A ledger for each part of the step that may contain the peak."""
        in_flight, micro_batches = self._in_flight, self._run.batch.gradient_accumulation_steps
        continues = micro_batches > in_flight
        yield self._forward(others=in_flight - 1, gradients=continues)
        yield self._backward(others=in_flight - 1, first=True)
        if micro_batches > 1:
            others = in_flight - 1 if continues else in_flight - 2
            yield self._backward(others=others, first=False)
        yield self._reduction()
        yield self._optimizer()

    def _start(self, *, others: int, gradients: bool) -> _Ledger:
        """A ledger with ``others`` micro-batches in flight.

        ``gradients``: whether a backward has already computed gradients in this step.
        """
        ledger = _Ledger()
        ledger.hold("parameters", self.states.parameters)
        ledger.hold("optimizer_states", self.states.optimizer_states)
        ledger.hold("activations", others * self._kept_in_flight + self._shared)
        if self._run.zero_stage == 3:  # the bucket and the partition stay from step to step
            ledger.hold("communication_buffers", self._bucket)
        if gradients:
            ledger.hold("gradients", self.states.gradients)
        elif self._run.zero_stage == 3:
            ledger.hold("gradients", min(self._partition, self.states.gradients))
        return ledger

    @property
    def _kept_in_flight(self) -> int:
        received = 0 if self._first_stage else self._hidden
        return received + sum(layer.memory.kept for layer in self._layers)

    def _forward(self, *, others: int, gradients: bool) -> _Ledger:
        ledger = self._start(others=others, gradients=gradients)
        if not self._first_stage:
            ledger.hold("activations", self._hidden)
        if others and not (self._last_stage or gradients):
            # The previous output may still be in flight.
            ledger.hold("activations", self._hidden)
        for layer in self._layers:
            memory, gathered = layer.memory, layer.forward
            with ledger.briefly("communication_buffers", gathered.at_work):
                ledger.touch("communication_buffers", gathered.arriving)
                with ledger.briefly("communication_buffers", gathered.ahead):
                    if not memory.kept_until_loss:
                        ledger.hold("activations", memory.kept)
                    ledger.touch("activations", memory.forward_working)
            if memory.kept_until_loss:  # the head's weight is freed before the loss
                ledger.hold("activations", memory.kept)
                ledger.touch("activations", memory.forward_working)
        return ledger

    def _backward(self, *, others: int, first: bool) -> _Ledger:
        ledger = self._start(others=others, gradients=not first)
        ledger.hold("activations", self._kept_in_flight)
        if not self._last_stage:
            ledger.hold("activations", self._hidden)  # the received gradient
        if not (self._first_stage or first):
            ledger.hold("activations", self._hidden)  # the previous gradient, still in flight
        reduces = not keeps_complete_gradients(self._run)
        copy_in_flight = 0
        waiting = self._tied_gradient()
        filled = 0
        for layer in reversed(self._layers):
            memory = layer.memory
            if memory.kept_until_loss:
                ledger.touch("activations", memory.loss_backward_working)
                ledger.free("activations", memory.kept_until_loss)
                ledger.hold("gradients", waiting)
            if reduces and self._run.zero_stage == 2 and layer is self._layers[-1]:
                ledger.hold("communication_buffers", self._bucket)
            with ledger.briefly("communication_buffers", layer.backward.at_work):
                ledger.touch("communication_buffers", layer.backward.arriving)
            at_work = layer.backward.at_work + layer.backward.ahead
            with (
                ledger.briefly("communication_buffers", at_work),
                ledger.briefly("activations", memory.backward_working),
                ledger.briefly("gradients", self._fresh_gradient(layer)),
                # The embedding's part of a tied gradient, and the sum of both.
                ledger.briefly("gradients", waiting if layer is self._layers[0] else 0),
            ):
                ledger.touch("communication_buffers", copy_in_flight)
            if reduces:  # a full bucket is sent while the next one fills
                filled += elements_of(layer.parameters) * self._gradient
                is_full = filled >= self._bucket or self._run.zero_stage == 3
                copy_in_flight = self._bucket if is_full else 0
                missing = self.states.gradients + waiting - ledger.held["gradients"]
                ledger.hold("gradients", missing)
            elif first:
                ledger.hold("gradients", elements_of(layer.parameters) * self._gradient)
            ledger.free("activations", memory.kept - memory.kept_until_loss)
        ledger.touch("communication_buffers", copy_in_flight)
        return ledger

    def _fresh_gradient(self, layer: "_Layer") -> int:
        """The layer's largest gradient as backward computes it, and its copy in another type."""
        largest = max(parameter.elements for parameter in layer.parameters)
        cast = self._gradient if self._gradient != self._element else 0
        return largest * (self._element + cast)

    def _tied_gradient(self) -> int:
        """The head's part of a tied weight's gradient, which autograd keeps until the embedding's
        part is computed.
        """
        names = {parameter.name for parameter in self._parameters}
        if EMBEDDING_WEIGHT not in names or HEAD_WEIGHT in names or not self._last_stage:
            return 0
        tied = next(p for p in self._parameters if p.name == EMBEDDING_WEIGHT)
        return tied.elements * self._element

    def _reduction(self) -> _Ledger:
        """Memory of the reduction: complete gradients, a bucket, its sent copy, the partition."""
        ledger = self._start(others=0, gradients=True)
        if not keeps_complete_gradients(self._run):
            return ledger
        if self._run.zero_stage == 3:
            ledger.hold("communication_buffers", self._bucket)
            return ledger
        # Gradients that have been copied to the bucket are freed.
        ledger.free("gradients", self._bucket)
        ledger.hold("gradients", self._partition)
        ledger.hold("communication_buffers", 2 * self._bucket)
        return ledger

    def _optimizer(self) -> _Ledger:
        """Memory of the optimizer step: the partition's gradients, and an fp32 copy if needed."""
        ledger = self._start(others=0, gradients=False)
        if self._run.zero_stage < 3:
            ledger.hold("gradients", self._partition)
        if self._gradient < BYTES_OF["fp32"]:
            ledger.hold("gradients", 2 * self._partition)
        return ledger


@dataclass(frozen=True)
class _Layer:
    memory: LayerMemory
    parameters: Sequence[LocalParameter]
    forward: GatheredBytes
    backward: GatheredBytes


def _layers(
    run: Run, pipeline_stage: int, parameters: Sequence[LocalParameter], device_type: str
) -> list[_Layer]:
    """The layers of the pipeline stage, each with its parameters."""
    count = layer_count(run.config.model)
    own: dict[str, list[LocalParameter]] = {}
    for parameter in parameters:
        own.setdefault(parameter.layer, []).append(parameter)
    on_host = device_type == "cpu"
    forward = gathered_in_pass(run, parameters, "forward", on_host=on_host)
    backward = gathered_in_pass(run, parameters, "backward", on_host=on_host)
    activations = Activations(run, device_type)
    blocks = chain([activations.first_block()], repeat(activations.block()))
    layers = []
    for index, layer in enumerate(layers_of_stages(run)[pipeline_stage]):
        if layer == 0:
            memory = activations.embedding()
        elif layer < count - 1:
            memory = next(blocks)
        else:
            memory = activations.head()
        name = layer_name(run.config.model, layer)
        layers.append(_Layer(memory, own[name], forward[index], backward[index]))
    last, output = layers[-1].memory, hidden_bytes(run)
    if last.kept_until_loss == 0:  # not the head: its output is freed once the next stage has it
        sent = replace(last, kept=last.kept - output, forward_working=last.forward_working + output)
        layers[-1] = replace(layers[-1], memory=sent)
    return layers

"""Predict the peak memory of a rank of one pipeline stage in an optimizer step.

The step is simulated layer by layer. The peak is in one of

    forward       of a micro-batch while others are in flight
    backward      of the first micro-batch, or of a later one
    reduction     of the complete gradients, if they are copied for it
    optimizer     the optimizer step

The schedule determines how many micro-batches are in flight: up to P - s for 1f1b at pipeline stage
s of P, and all of them for gpipe (Narayanan et al. 2021, section 2.2; Korthikanti et al. 2022,
section 4.2.3 for the activations of the first stage).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, count

from megaspeed.config.resolve import Run
from megaspeed.model.parameters import HEAD_WEIGHT, layer_count, layer_name
from megaspeed.pipeline.partition import layers_of_stages
from megaspeed.pipeline.schedules import SCHEDULES, Pass, peak_micro_batches_in_flight
from megaspeed.planning.costs.activations import Activations, LayerMemory, hidden_bytes
from megaspeed.planning.costs.gathers import gathered_in_pass
from megaspeed.planning.costs.memory import (
    Bucket,
    Category,
    MemoryBytes,
    compression_buffer_bytes,
    gradient_buckets,
    gradient_copy_bytes,
    head_gradient_bytes,
    model_states,
)
from megaspeed.planning.costs.rank_parameters import (
    BYTES_OF,
    LocalParameter,
    head_weight,
    local_parameters,
)


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes of a rank of a pipeline stage."""

    states: MemoryBytes  # memory between two micro-batches of a step, without activations
    peak: MemoryBytes  # memory at the peak of the step


def predict_memory(run: Run, pipeline_stage: int, *, device_type: str = "cuda") -> StageMemory:
    """Return the memory of a rank of a pipeline stage. All its data and tensor ranks hold it.

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
        self._total = self._most = 0

    def hold(self, category: Category, size_bytes: int) -> None:
        """Add bytes, which are held until ``free``."""
        self.held[category] += size_bytes
        self._total += size_bytes
        if self._total > self._most:
            self._most = self._total
            self.peak = MemoryBytes(**self.held)

    def free(self, category: Category, size_bytes: int) -> None:
        assert self.held[category] >= size_bytes, f"{category} {size_bytes} was never held"
        self.hold(category, -size_bytes)

    @contextmanager
    def briefly(self, category: Category, size_bytes: int) -> Iterator[None]:
        """Hold bytes within a ``with`` block."""
        self.hold(category, size_bytes)
        yield
        self.free(category, size_bytes)


class _Step:
    """Simulates one optimizer step of a pipeline stage, layer by layer."""

    def __init__(self, run: Run, pipeline_stage: int, device_type: str) -> None:
        self._run, self._on_host = run, device_type == "cpu"
        self._is_first_stage = pipeline_stage == 0
        self._is_last_stage = pipeline_stage == run.grid.pp - 1
        self._micro_batches = run.batch.gradient_accumulation_steps
        self._parameters = local_parameters(run, pipeline_stage)
        self.states = model_states(run, self._parameters, on_host=self._on_host)
        self._layers = _layers(run, pipeline_stage, self._parameters, device_type)
        self._hidden = hidden_bytes(run)
        self._shared = Activations(run, device_type).shared()
        self._head_gradient = head_gradient_bytes(run, self._parameters)
        self._buckets = gradient_buckets(run, self._parameters, on_host=self._on_host)
        schedule = SCHEDULES[run.config.parallel.schedule]
        self._in_flight = peak_micro_batches_in_flight(
            schedule, run.grid.pp, pipeline_stage, self._micro_batches
        )
        received = 0 if self._is_first_stage else self._hidden
        self._kept_in_flight = received + sum(layer.memory.kept for layer in self._layers)

    def moments(self) -> Iterator[_Ledger]:
        """Yield a ledger for each part of the step that may contain the peak."""
        others = self._in_flight - 1
        continues = self._micro_batches > self._in_flight
        yield self._forward(others=others, sends_back=continues)
        yield self._backward(others=others, first=True)
        if self._micro_batches > 1:
            yield self._backward(others=others if continues else others - 1, first=False)
        yield self._reduction()
        yield self._optimizer()

    def _start(self, *, others: int) -> _Ledger:
        """Return a ledger with ``others`` micro-batches in flight."""
        ledger = _Ledger()
        ledger.hold("parameters", self.states.parameters)
        ledger.hold("optimizer_states", self.states.optimizer_states)
        ledger.hold("activations", others * self._kept_in_flight + self._shared)
        ledger.hold("gradients", self.states.gradients)
        return ledger

    def _forward(self, *, others: int, sends_back: bool) -> _Ledger:
        ledger = self._start(others=others)
        if not self._is_first_stage:
            ledger.hold("activations", self._hidden)
        if others and not (self._is_last_stage or sends_back):
            # The previous output may still be in flight.
            ledger.hold("activations", self._hidden)
        # After the forward with the most micro-batches in flight comes a backward.
        held = self._gathered("forward", "backward")
        for layer, gathered in zip(self._layers, held, strict=True):
            with ledger.briefly("communication_buffers", gathered):
                ledger.hold("activations", layer.memory.kept)
                if layer.is_head:
                    ledger.hold("communication_buffers", self._head_gradient)
                with ledger.briefly("activations", layer.memory.forward_working):
                    pass
        return ledger

    def _backward(self, *, others: int, first: bool) -> _Ledger:
        ledger = self._start(others=others)
        ledger.hold("activations", self._kept_in_flight)
        if not self._is_last_stage:
            ledger.hold("activations", self._hidden)  # the received gradient
        if not (self._is_first_stage or first):
            ledger.hold("activations", self._hidden)  # the previous gradient, still in flight
        # The forward of the loss has computed it.
        ledger.hold("communication_buffers", self._head_gradient)
        reductions = _Reductions(self._run, self._buckets, head_weight(self._parameters), ledger)
        left = self._micro_batches - (1 if first else 2)
        following: Pass | None = None
        if left:
            following = "forward" if left >= self._in_flight else "backward"
        held = self._gathered("backward", following)
        for layer, gathered in zip(reversed(self._layers), reversed(held), strict=True):
            with ledger.briefly("communication_buffers", gathered):
                with (
                    ledger.briefly("activations", layer.memory.backward_working),
                    ledger.briefly("gradients", self._fresh_gradient(layer)),
                ):
                    pass
                ledger.free("activations", layer.memory.kept)
                for parameter in reversed(layer.parameters):
                    reductions.compute(parameter)
        return ledger

    def _gathered(self, direction: Pass, following: Pass | None) -> list[int]:
        return gathered_in_pass(
            self._run, self._parameters, direction, following, on_host=self._on_host
        )

    def _fresh_gradient(self, layer: "_Layer") -> int:
        """Return the layer's largest gradient, which autograd computes and then adds to the sum."""
        computed = (p.elements for p in layer.parameters if p.name != HEAD_WEIGHT)
        return BYTES_OF[self._run.precision] * max(computed)

    def _reduction(self) -> _Ledger:
        """Return the memory of the reduction: the copy of a bucket, or what compression needs."""
        ledger = self._start(others=0)
        copies = [compression_buffer_bytes(self._run, self._parameters, on_host=self._on_host)]
        if self._run.keeps_complete_gradients:
            copies += [bucket.packed_bytes for bucket in self._buckets]
        ledger.hold("communication_buffers", max(copies))
        return ledger

    def _optimizer(self) -> _Ledger:
        """Return the memory of the optimizer step: an fp32 copy of gradients of another type."""
        ledger = self._start(others=0)
        ledger.hold("gradients", gradient_copy_bytes(self._run, self._parameters))
        return ledger


class _Reductions:
    """Gradients that wait for their bucket, and the copy that is being reduced, in a backward."""

    def __init__(
        self, run: Run, buckets: Sequence[Bucket], head: LocalParameter | None, ledger: _Ledger
    ) -> None:
        self._run, self._head, self._ledger = run, head, ledger
        self._is_partial = not run.keeps_complete_gradients
        self._bucket_of = {name: bucket for bucket in buckets for name in bucket.names}
        self._missing = {bucket.names: len(bucket.names) for bucket in buckets}
        self._in_flight = 0

    def compute(self, parameter: LocalParameter) -> None:
        """Backward has computed the gradient of this parameter."""
        run, ledger = self._run, self._ledger
        bucket = self._bucket_of.get(parameter.name)
        if bucket is None:
            return
        is_partial = self._is_partial
        if is_partial and parameter != self._head:
            ledger.hold("gradients", parameter.elements * BYTES_OF[run.precision])
        self._missing[bucket.names] -= 1
        if self._missing[bucket.names] > 0 or not (is_partial or run.overlaps_reductions):
            return
        ledger.free("communication_buffers", self._in_flight)
        ledger.hold("communication_buffers", bucket.packed_bytes)
        self._in_flight = bucket.packed_bytes
        if is_partial:
            ledger.free("gradients", bucket.gradient_bytes)
            if self._head is not None and self._head.name in bucket.names:
                sum_bytes = self._head.elements * BYTES_OF[run.accumulation_dtype]
                ledger.free("communication_buffers", sum_bytes)
        if not run.overlaps_reductions:
            ledger.free("communication_buffers", self._in_flight)
            self._in_flight = 0


@dataclass(frozen=True)
class _Layer:
    memory: LayerMemory
    parameters: Sequence[LocalParameter]
    is_head: bool


def _layers(
    run: Run, pipeline_stage: int, parameters: Sequence[LocalParameter], device_type: str
) -> list[_Layer]:
    """Return the layers of the pipeline stage, each with its parameters."""
    layers_in_all = layer_count(run.config.model)
    own: dict[str, list[LocalParameter]] = {}
    for parameter in parameters:
        own.setdefault(parameter.layer, []).append(parameter)
    activations = Activations(run, device_type)
    blocks = chain([activations.first_block()], map(activations.block, count(1)))
    layers = []
    for layer in layers_of_stages(run)[pipeline_stage]:
        if layer == 0:
            memory = activations.embedding()
        elif layer < layers_in_all - 1:
            memory = next(blocks)
        else:
            memory = activations.head()
        name, is_head = layer_name(run.config.model, layer), layer == layers_in_all - 1
        layers.append(_Layer(memory, own[name], is_head))
    last, output = layers[-1].memory, hidden_bytes(run)
    if not layers[-1].is_head:  # its output is freed once the next stage has it
        sent = replace(last, kept=last.kept - output, forward_working=last.forward_working + output)
        layers[-1] = replace(layers[-1], memory=sent)
    return layers

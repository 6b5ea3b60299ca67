"""Predict the peak memory of a rank of one pipeline stage in an optimizer step.

The step is simulated layer by layer. The peak is in one of

    forward       of a micro-batch while others are in flight
    backward      of the first micro-batch, or of a later one
    reduction     of the complete gradients, if they are copied for it
    optimizer     the optimizer step

The schedule determines how many micro-batches are in flight: up to P - s for 1f1b at pipeline stage
s of P, and all of them for gpipe (Narayanan et al. 2021, section 2.2; Korthikanti et al. 2022,
section 4.2.3 for the activations of the first stage). With several chunks, ``moments`` counts them.
"""

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count

from megaspeed.config.resolve import Run
from megaspeed.model.parameters import HEAD_WEIGHT, layer_count, layer_name
from megaspeed.pipeline.partition import chunks_of_stages
from megaspeed.pipeline.schedules import Pass, peak_in_flight, pipeline_of
from megaspeed.planning.costs.activations import Activations, LayerMemory, hidden_bytes
from megaspeed.planning.costs.gathers import gathered_chunk_bytes, gathered_in_pass
from megaspeed.planning.costs.memory import (
    Bucket,
    Category,
    MemoryBytes,
    compression_buffer_bytes,
    gradient_buckets,
    gradient_copy_bytes,
    head_gradient_bytes,
    model_states,
    waiting_dtype,
)
from megaspeed.planning.costs.moments import Moment, moments_of
from megaspeed.planning.costs.rank_parameters import (
    BYTES_OF,
    LocalParameter,
    elements_of,
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
    peaks = (ledger.peak for ledger in step.ledgers())
    return StageMemory(states=step.states, peak=max(peaks, key=lambda peak: peak.total))


class _Ledger:
    """Counts the bytes held now by category, and keeps the counts of the highest sum."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.peak = MemoryBytes()
        self._total = self._most = 0

    def hold(self, category: Category, size_bytes: int) -> None:
        """Add bytes, which are held until ``free``."""
        if size_bytes == 0:
            return
        self.held[category] += size_bytes
        self._total += size_bytes
        if self._total > self._most:
            self._most = self._total
            self.peak = MemoryBytes(**self.held)

    def free(self, category: Category, size_bytes: int) -> None:
        assert self.held[category] >= size_bytes, f"{category} {size_bytes} was never held"
        self.hold(category, -size_bytes)

    def touch(self, category: Category, size_bytes: int) -> None:
        """Hold bytes, and free them at once."""
        self.hold(category, size_bytes)
        self.free(category, size_bytes)


class _Step:
    """Simulates one optimizer step of a pipeline stage, layer by layer."""

    def __init__(self, run: Run, pipeline_stage: int, device_type: str) -> None:
        self._run, self._on_host = run, device_type == "cpu"
        self._parameters = local_parameters(run, pipeline_stage)
        self.states = model_states(run, self._parameters, on_host=self._on_host)
        self._chunks = list(_chunks(run, pipeline_stage, self._parameters, device_type))
        self._hidden = hidden_bytes(run)
        self._shared = Activations(run, device_type).shared()
        self._head_gradient = head_gradient_bytes(run, self._parameters)
        self._head = head_weight(self._parameters)
        self._visit = cache(self._visit_bytes)
        self._gathered = cache(
            partial(gathered_chunk_bytes, run, self._parameters, on_host=self._on_host)
        )
        self._buckets = gradient_buckets(run, self._parameters, on_host=self._on_host)
        self._pipeline, self._stage = pipeline_of(run), pipeline_stage
        chunks, last = range(len(self._chunks)), self._pipeline.virtual_stages - 1
        virtual = [self._pipeline.virtual(pipeline_stage, chunk) for chunk in chunks]
        # The bytes of a chunk's input from the stage before, and of its gradient from the next one.
        self._input = [self._hidden * (each > 0) for each in virtual]
        self._gradient = [self._hidden * (each < last) for each in virtual]
        self._kept = [
            received + sum(layer.memory.kept for layer in chunk)
            for received, chunk in zip(self._input, self._chunks, strict=True)
        ]

    def ledgers(self) -> Iterator[_Ledger]:
        """Yield a ledger for each part of the step that may contain the peak."""
        for moment in self._moments():
            yield self._forward(moment) if moment.direction == "forward" else self._backward(moment)
        yield self._reduction()
        yield self._optimizer()

    def _moments(self) -> Iterator[Moment]:
        if len(self._chunks) == 1:
            yield from self._moments_of_one_chunk()
            return
        kinds: dict[Moment, list[Moment]] = {}
        for moment in moments_of(self._pipeline, self._stage, sums_visits=self._run.sums_visits):
            kinds.setdefault(replace(moment, in_flight=(), messages=0), []).append(moment)
        yield from (max(moments, key=self._bytes_beside) for moments in kinds.values())

    def _moments_of_one_chunk(self) -> Iterator[Moment]:
        most = peak_in_flight(self._pipeline, self._stage)
        micro_batches = self._pipeline.micro_batches
        others, continues = most - 1, micro_batches > most
        # The previous output may still be in flight.
        sends = bool(others and self._gradient[0] and not continues)
        # After the forward with the most micro-batches in flight comes a backward.
        yield Moment(
            direction="forward", in_flight=(others,), messages=int(sends), following="backward"
        )
        for done in range(min(2, micro_batches)):
            left = micro_batches - 1 - done
            following: Pass | None = None
            if left:
                following = "forward" if left >= most else "backward"
            yield Moment(
                direction="backward",
                in_flight=(others if continues else others - done,),
                # The previous gradient may still be in flight.
                messages=int(bool(done and self._input[0])),
                has_head_sum=True,
                following=following,
            )

    def _bytes_beside(self, moment: Moment) -> int:
        """Return the bytes of the activations and messages beside a computation."""
        kept = sum(map(operator.mul, moment.in_flight, self._kept))
        return kept + moment.messages * self._hidden

    def _start(self, moment: Moment | None = None) -> _Ledger:
        """Return a ledger with what is held at a moment, or after the last backward."""
        ledger = _Ledger()
        ledger.hold("parameters", self.states.parameters)
        ledger.hold("optimizer_states", self.states.optimizer_states)
        ledger.hold("activations", self._shared)
        ledger.hold("gradients", self.states.gradients)
        if moment is None:
            return ledger
        ledger.hold("activations", self._bytes_beside(moment))
        if moment.has_head_sum:
            ledger.hold("communication_buffers", self._head_gradient)
        if moment.summed is not None:
            ledger.hold("gradients", self._visit(moment.summed))
        for chunk, forward in moment.gathered:
            ledger.hold("communication_buffers", self._gathered(chunk, forward=forward))
        return ledger

    def _forward(self, moment: Moment) -> _Ledger:
        ledger = self._start(moment)
        ledger.hold("activations", self._input[moment.chunk])
        for layer, gathered in self._layers_of(moment):
            ledger.hold("communication_buffers", gathered)
            ledger.hold("activations", layer.memory.kept)
            if layer.is_head and not moment.has_head_sum:
                ledger.hold("communication_buffers", self._head_gradient)
            ledger.touch("activations", layer.memory.forward_working)
            ledger.free("communication_buffers", gathered)
        return ledger

    def _backward(self, moment: Moment) -> _Ledger:
        ledger = self._start(moment)
        ledger.hold("activations", self._kept[moment.chunk] + self._gradient[moment.chunk])
        reductions = _Reductions(self._run, self._buckets, self._head, ledger, moment)
        for layer, gathered in reversed(self._layers_of(moment)):
            # Autograd computes the layer's largest gradient, and then adds it to the sum.
            largest = max(p.elements for p in layer.parameters if p.name != HEAD_WEIGHT)
            ledger.hold("communication_buffers", gathered)
            ledger.hold("activations", layer.memory.backward_working)
            ledger.touch("gradients", _fresh_bytes(self._run, largest))
            ledger.free("activations", layer.memory.backward_working + layer.memory.kept)
            for parameter in reversed(layer.parameters):
                reductions.compute(parameter)
            ledger.free("communication_buffers", gathered)
        return ledger

    def _layers_of(self, moment: Moment) -> list[tuple["_Layer", int]]:
        """Return the layers of a pass, and the bytes that are gathered while each one computes."""
        layers = self._chunks[moment.chunk]
        gathered = [0] * len(layers)
        if self._pipeline.gathers == "layers":
            own = [p for layer in layers for p in layer.parameters]
            gathered = gathered_in_pass(
                self._run, own, moment.direction, moment.following, on_host=self._on_host
            )
        return list(zip(layers, gathered, strict=True))

    def _visit_bytes(self, chunk: int) -> int:
        """Return the bytes of the gradients of a chunk that are summed in a visit."""
        own = (p for p in self._parameters if p.chunk == chunk and p != self._head)
        return elements_of(own) * BYTES_OF[waiting_dtype(self._run)]

    def _reduction(self) -> _Ledger:
        """Return the memory of the reduction: the copy of a bucket, or what compression needs."""
        ledger = self._start()
        copies = [compression_buffer_bytes(self._run, self._parameters, on_host=self._on_host)]
        if self._run.keeps_complete_gradients:
            copies += [bucket.packed_bytes for bucket in self._buckets]
        ledger.hold("communication_buffers", max(copies))
        return ledger

    def _optimizer(self) -> _Ledger:
        """Return the memory of the optimizer step: an fp32 copy of gradients of another type."""
        ledger = self._start()
        ledger.hold("gradients", gradient_copy_bytes(self._run, self._parameters))
        return ledger


class _Reductions:
    """Gradients that wait for their bucket, and the copy that is being reduced, in a backward."""

    def __init__(
        self,
        run: Run,
        buckets: Sequence[Bucket],
        head: LocalParameter | None,
        ledger: _Ledger,
        moment: Moment,
    ) -> None:
        self._run, self._head, self._ledger = run, head, ledger
        self._moment, self._is_partial = moment, not run.keeps_complete_gradients
        self._bucket_of = {name: bucket for bucket in buckets for name in bucket.names}
        self._missing = {bucket.names: len(bucket.names) for bucket in buckets}
        self._in_flight = 0

    def compute(self, parameter: LocalParameter) -> None:
        """Backward has computed the gradient of this parameter."""
        run, ledger = self._run, self._ledger
        bucket, is_partial = self._bucket_of.get(parameter.name), self._is_partial
        # An earlier backward may have reduced what this micro-batch adds to the head's gradient.
        is_reduced = is_partial and parameter is self._head and not self._moment.has_head_sum
        if bucket is None or is_reduced:
            return
        if is_partial and parameter is not self._head and self._moment.summed is None:
            ledger.hold("gradients", parameter.elements * BYTES_OF[waiting_dtype(run)])
        self._missing[bucket.names] -= 1
        is_sent = self._moment.reduces and (is_partial or run.overlaps_reductions)
        if self._missing[bucket.names] > 0 or not is_sent:
            return
        # If a visit sums gradients, the last one of the bucket is beside the sum while it is sent.
        is_beside = self._moment.summed is not None and parameter is not self._head
        beside = _fresh_bytes(run, parameter.elements) if is_beside else 0
        ledger.free("communication_buffers", self._in_flight)
        ledger.hold("communication_buffers", bucket.packed_bytes)
        ledger.touch("gradients", beside)
        self._in_flight = bucket.packed_bytes
        if is_partial:
            ledger.free("gradients", bucket.gradient_bytes)
            if self._head is not None and self._head.name in bucket.names:
                sum_bytes = self._head.elements * BYTES_OF[run.accumulation_dtype]
                ledger.free("communication_buffers", sum_bytes)
        if not run.overlaps_reductions:
            ledger.free("communication_buffers", self._in_flight)
            self._in_flight = 0


def _fresh_bytes(run: Run, elements: int) -> int:
    """Return the bytes of a gradient of autograd, and of its copy if sums have another type."""
    converted = run.precision != waiting_dtype(run)
    return elements * (BYTES_OF[run.precision] + converted * BYTES_OF[waiting_dtype(run)])


@dataclass(frozen=True)
class _Layer:
    memory: LayerMemory
    parameters: Sequence[LocalParameter]
    is_head: bool


def _chunks(
    run: Run, pipeline_stage: int, parameters: Sequence[LocalParameter], device_type: str
) -> Iterator[list[_Layer]]:
    """Yield the layers of each chunk of the pipeline stage, each with its parameters."""
    own: dict[str, list[LocalParameter]] = {}
    for parameter in parameters:
        own.setdefault(parameter.layer, []).append(parameter)
    model, blocks = run.config.model, count()
    activations, head = Activations(run, device_type), layer_count(model) - 1

    def memory_of(layer: int, chunk: range) -> LayerMemory:
        if layer == 0:
            return activations.embedding()
        if layer == head:
            return activations.head()
        is_first = layer == max(1, chunk.start)
        return (activations.first_block if is_first else activations.block)(next(blocks))

    for chunk in chunks_of_stages(run)[pipeline_stage]:
        layers = [
            _Layer(memory_of(layer, chunk), own[layer_name(model, layer)], layer == head)
            for layer in chunk
        ]
        yield _without_sent_output(run, layers)


def _without_sent_output(run: Run, layers: list[_Layer]) -> list[_Layer]:
    """Count the output of a chunk as working memory. It is freed once the next stage has it."""
    last = layers[-1]
    if last.is_head:
        return layers
    output, memory = hidden_bytes(run), last.memory
    working = memory.forward_working + output
    memory = replace(memory, kept=memory.kept - output, forward_working=working)
    return [*layers[:-1], replace(last, memory=memory)]

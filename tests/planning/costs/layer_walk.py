"""The peak memory of a pipeline stage by a walk: layer by layer, gradient by gradient.

``stage_memory`` must find the same peak from runs of equal layers. This walk knows no runs, keeps
nothing from one prediction to the next, and checks that what it frees was held.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, groupby

from megaspeed.config.resolve import BYTES_OF, Run
from megaspeed.data_axis.axis import data_axis_of
from megaspeed.data_axis.parameters import LocalParameter, elements_of
from megaspeed.model.parameters import HEAD_WEIGHT, layer_count
from megaspeed.pipeline.partition import chunks_of_stages
from megaspeed.pipeline.schedules import Forward, Pass, Pipeline, order_of, pipeline_of
from megaspeed.planning.costs.activations import Activations, LayerMemory, hidden_bytes
from megaspeed.planning.costs.memory import (
    Category,
    MemoryBytes,
    compression_buffer_bytes,
    model_states,
)
from megaspeed.planning.costs.moments import Moment, moments_of
from megaspeed.planning.costs.stage_states import held_bytes, states_of
from tests.planning.costs.test_moments import messages_of_the_program


def walked_peak(run: Run, pipeline_stage: int, device_type: str) -> MemoryBytes:
    """Return the memory of a rank at the peak of a step; at the first one if several are equal."""
    peaks = (ledger.peak for ledger in _Walk(run, pipeline_stage, device_type).ledgers())
    return max(peaks, key=lambda peak: peak.total)


class _Ledger:
    """Counts the bytes held now by category, and keeps the counts of the highest sum."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.peak = MemoryBytes()

    def hold(self, category: Category, size_bytes: int) -> None:
        """Add bytes, which are held until ``free``."""
        self.held[category] += size_bytes
        now = MemoryBytes(**self.held)
        if now.total > self.peak.total:
            self.peak = now

    def free(self, category: Category, size_bytes: int) -> None:
        assert self.held[category] >= size_bytes, f"{category} {size_bytes} was never held"
        self.hold(category, -size_bytes)

    def touch(self, category: Category, size_bytes: int) -> None:
        """Hold bytes, and free them at once."""
        self.hold(category, size_bytes)
        self.free(category, size_bytes)


@dataclass(frozen=True)
class _Layer:
    memory: LayerMemory
    parameters: Sequence[LocalParameter]

    @property
    def is_head(self) -> bool:
        return self.parameters[0].layer == "head"


class _Walk:
    """Walks through one optimizer step of a pipeline stage."""

    def __init__(self, run: Run, pipeline_stage: int, device_type: str) -> None:
        self.run, self.on_host = run, device_type == "cpu"
        self.axis = data_axis_of(run, pipeline_stage, device_type)
        self.parameters = self.axis.parameters
        self.states = model_states(run, self.axis, on_host=self.on_host)
        self.chunks = list(_chunks(run, pipeline_stage, self.parameters, device_type))
        self.hidden = hidden_bytes(run)
        self.shared = Activations(run, device_type).shared()
        self.pipeline, self.stage = pipeline_of(run), pipeline_stage
        of_layers = states_of(run, pipeline_stage, self.pipeline.gather_policy, device_type)
        self.head, self.head_gradient = self.parameters.head, of_layers.head_gradient
        self.updating = of_layers.updating
        self.orthogonalizing = of_layers.orthogonalizing
        last = self.pipeline.virtual_stages - 1
        virtual = [self.pipeline.virtual(pipeline_stage, i) for i in range(len(self.chunks))]
        self.input = [self.hidden * (each > 0) for each in virtual]
        self.gradient = [self.hidden * (each < last) for each in virtual]
        self.kept = [
            received + sum(layer.memory.kept for layer in chunk)
            for received, chunk in zip(self.input, self.chunks, strict=True)
        ]

    def ledgers(self) -> Iterator[_Ledger]:
        """Yield a ledger for each part of the step that may contain the peak."""
        for moment in self.moments():
            yield self.forward(moment) if moment.direction == "forward" else self.backward(moment)
        reduction, update = self.start(), self.start()
        copies = [compression_buffer_bytes(self.run, self.axis, on_host=self.on_host)]
        if self.axis.matrix_reduction.keeps == "complete":
            copies += [bucket.message_bytes for bucket in self.axis.buckets]
        reduction.hold("communication_buffers", max(copies))
        update.touch("communication_buffers", self.orthogonalizing)
        update.hold("gradients", self.updating)
        yield from (reduction, update)

    def moments(self) -> Iterator[Moment]:
        if len(self.chunks) > 1:
            sums_visits = self.axis.matrix_reduction.when == "visit"
            yield from chain(*moments_of(self.pipeline, self.stage, sums_visits=sums_visits))
        else:
            yield from _moments_of_one_chunk(self.pipeline, self.stage)

    def start(self, moment: Moment | None = None) -> _Ledger:
        """Return a ledger with what is held at a moment, or after the last backward."""
        ledger = _Ledger()
        ledger.hold("parameters", self.states.parameters)
        ledger.hold("optimizer_states", self.states.optimizer_states)
        ledger.hold("activations", self.shared)
        ledger.hold("gradients", self.states.gradients)
        if moment is None:
            return ledger
        for number, kept in zip(moment.in_flight, self.kept, strict=True):
            ledger.hold("activations", number * kept)
        ledger.hold("activations", moment.messages * self.hidden)
        if moment.has_head_sum:
            ledger.hold("communication_buffers", self.head_gradient)
        if moment.summed is not None:
            own = (p for p in self.parameters if p.chunk == moment.summed and p != self.head)
            ledger.hold(
                "gradients", elements_of(own) * BYTES_OF[self.axis.matrix_reduction.computed]
            )
        for chunk, forward in moment.gathered:
            gathers = [] if self.axis.is_local else self.axis.chunk_gathers(chunk, forward=forward)
            ledger.hold("communication_buffers", sum(each.held_bytes for each in gathers))
        return ledger

    def forward(self, moment: Moment) -> _Ledger:
        ledger = self.start(moment)
        ledger.hold("activations", self.input[moment.chunk])
        for layer, gathered in self.layers_of(moment):
            ledger.hold("communication_buffers", gathered)
            ledger.hold("activations", layer.memory.kept)
            if layer.is_head and not moment.has_head_sum:
                ledger.hold("communication_buffers", self.head_gradient)
            ledger.touch("activations", layer.memory.forward_working)
            ledger.free("communication_buffers", gathered)
        return ledger

    def backward(self, moment: Moment) -> _Ledger:
        ledger = self.start(moment)
        ledger.hold("activations", self.kept[moment.chunk] + self.gradient[moment.chunk])
        reductions = _Reductions(self, ledger, moment)
        for layer, gathered in reversed(self.layers_of(moment)):
            ledger.hold("communication_buffers", gathered)
            ledger.hold("activations", layer.memory.backward_working)
            for parameter in layer.parameters:  # each is computed, and then added to the sum
                if parameter.name != HEAD_WEIGHT:
                    ledger.touch("gradients", reductions.fresh_bytes(parameter))
            ledger.free("activations", layer.memory.backward_working + layer.memory.kept)
            for parameter in reversed(layer.parameters):
                reductions.compute(parameter)
            ledger.free("communication_buffers", gathered)
        return ledger

    def layers_of(self, moment: Moment) -> list[tuple[_Layer, int]]:
        """Return the layers of a pass, and the bytes that are gathered while each one computes."""
        layers = self.chunks[moment.chunk]
        gathered = [0] * len(layers)
        if self.pipeline.gather_policy == "layers" and self.axis.passes and not self.axis.is_local:
            gathered = held_bytes(self.axis, moment.direction, moment.following)
        return list(zip(layers, gathered, strict=True))


class _Reductions:
    """Gradients that wait for their bucket, and the copy that is being reduced, in a backward."""

    def __init__(self, walk: _Walk, ledger: _Ledger, moment: Moment) -> None:
        self.run, self.axis, self.on_host = walk.run, walk.axis, walk.on_host
        self.ledger, self.moment, axis = ledger, moment, walk.axis
        self.head = axis.parameters.head
        self.bucket_of = {p.name: bucket for bucket in axis.buckets for p in bucket.parameters}
        self.missing = Counter(id(bucket) for bucket in axis.buckets for _ in bucket.parameters)
        self.in_flight = 0

    def compute(self, parameter: LocalParameter) -> None:
        """Backward has computed the gradient of this parameter."""
        ledger, moment, is_head = self.ledger, self.moment, parameter is self.head
        bucket = self.bucket_of[parameter.name]
        how = bucket.reduction
        is_partial = how.keeps != "complete"
        # An earlier backward may have reduced what this micro-batch adds to the head's gradient.
        if is_partial and is_head and not moment.has_head_sum:
            return
        if is_partial and not is_head and moment.summed is None:
            ledger.hold("gradients", parameter.elements * BYTES_OF[how.computed])
        self.missing[id(bucket)] -= 1
        is_sent = moment.reduces and (is_partial or how.overlaps) and not bucket.is_sent_compressed
        if self.missing[id(bucket)] > 0 or not is_sent:
            return
        ledger.free("communication_buffers", self.in_flight)
        ledger.hold("communication_buffers", bucket.message_bytes)
        if moment.summed is not None and not is_head and not self.adds(parameter):
            ledger.touch("gradients", self.fresh_bytes(parameter))
        self.in_flight = bucket.message_bytes
        if is_partial:
            computed = elements_of(p for p in bucket.parameters if p is not self.head)
            ledger.free("gradients", computed * BYTES_OF[how.computed])
            if self.head is not None and self.head in bucket.parameters:
                sum_bytes = self.head.elements * BYTES_OF[how.total]
                ledger.free("communication_buffers", sum_bytes)
        if not how.overlaps:
            ledger.free("communication_buffers", self.in_flight)
            self.in_flight = 0

    def adds(self, parameter: LocalParameter) -> bool:
        """Return whether a product adds the gradient to its sum."""
        return parameter.is_product and self.axis.matrix_reduction.added_by == "product"

    def fresh_bytes(self, parameter: LocalParameter) -> int:
        """Return the bytes of a gradient, and of its copy if sums have another type.

        A GPU adds a product without memory for it. The copy is then the sum, if it begins.
        """
        computed = self.axis.matrix_reduction.computed
        own = BYTES_OF[self.run.precision]
        copied = (self.run.precision != computed) * BYTES_OF[computed]
        if self.adds(parameter):
            own = 0
            copied *= self.moment.summed is None
        return parameter.elements * (own + copied)


def _moments_of_one_chunk(pipeline: Pipeline, stage: int) -> Iterator[Moment]:
    """Yield all moments of the complete program that differ."""
    order, in_flight, found = order_of(pipeline, stage), 0, set[Moment]()
    names: list[Pass] = ["forward" if isinstance(each, Forward) else "backward" for each in order]
    for name, following, messages in zip(
        names, [*names[1:], None], messages_of_the_program(pipeline, stage), strict=True
    ):
        in_flight -= name == "backward"
        moment = Moment(
            direction=name,
            in_flight=(in_flight,),
            messages=messages,
            has_head_sum=name == "backward",
            following=following,
        )
        in_flight += name == "forward"
        if moment not in found:
            found.add(moment)
            yield moment


def _chunks(
    run: Run, pipeline_stage: int, parameters: Sequence[LocalParameter], device_type: str
) -> Iterator[list[_Layer]]:
    """Yield the layers of each chunk of the pipeline stage, each with its parameters."""
    own = [list(members) for _, members in groupby(parameters, key=lambda each: each.layer)]
    activations, head = Activations(run, device_type), layer_count(run.config.model) - 1
    blocks, layers = count(), iter(own)

    def memory_of(layer: int, chunk: range) -> LayerMemory:
        if layer == 0:
            return activations.embedding()
        if layer == head:
            return activations.head()
        is_first = layer == max(1, chunk.start)
        return (activations.first_block if is_first else activations.block)(next(blocks))

    for chunk in chunks_of_stages(run)[pipeline_stage]:
        found = [_Layer(memory_of(layer, chunk), next(layers)) for layer in chunk]
        last = found[-1]
        if not last.is_head:  # The output is freed once the next stage has it.
            kept, working = last.memory.kept, last.memory.forward_working
            output = hidden_bytes(run)
            memory = replace(last.memory, kept=kept - output, forward_working=working + output)
            found[-1] = replace(last, memory=memory)
        yield found

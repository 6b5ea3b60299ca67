"""What ZeRO holds on a rank of one pipeline stage in each pass: parameters, gradients, buffers.

    pass of a layer     gathered parameters, held while it computes        (``gathers``)
    in its backward     gradients as they are computed; the copy of each
                        bucket while it is reduced                         (``memory``)

None of this depends on activations. So it is computed once for all variants of a training that
differ in micro-batch, schedule or recomputation. All blocks are alike, but buckets and gathers may
end within a block, so layers are compared. Equal neighbours are counted together.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache, partial
from itertools import chain, groupby, product
from typing import NamedTuple

from megaspeed.config.resolve import Run
from megaspeed.pipeline.partition import chunks_of_stages
from megaspeed.planning.costs.gathers import gathered_chunk_bytes, gathered_in_pass
from megaspeed.planning.costs.memory import (
    Bucket,
    MemoryBytes,
    compression_buffer_bytes,
    gradient_buckets,
    gradient_copy_bytes,
    head_gradient_bytes,
    model_states,
    waiting_dtype,
)
from megaspeed.planning.costs.moments import Moment
from megaspeed.planning.costs.rank_parameters import (
    BYTES_OF,
    Alike,
    LocalLayer,
    RunKey,
    elements_of,
    head_weight,
    local_parameters,
)


class LayerStates(NamedTuple):
    """Bytes of gradients and communication buffers in the pass of a layer, beside those before it.

    After a backward has computed the layer, the gradients of its parameters are added to sums, and
    complete buckets are reduced.
    """

    gradients: int  # while the layer computes
    buffers: int
    most_gradients: int  # at the peak after that
    most_buffers: int
    left_gradients: int  # when the pass of the layer is done; may be negative
    left_buffers: int


def states_of(run: Run, pipeline_stage: int, gathers: str, device_type: str) -> "StageStates":
    """Return the states of a rank of a pipeline stage, on "cuda" or "cpu".

    ``gathers`` is that of the run's pipeline.
    """
    values = (
        *(run.config.model, run.grid, run.config.zero_optimization, run.sequence_parallel),
        *(run.precision, run.accumulation_dtype, run.reduction_dtype, run.compression),
        *(run.gradient_reduction, run.reductions > 1),
        chunks_of_stages(run)[pipeline_stage],
    )
    gathers_layers = run.zero_stage == 3 and gathers == "layers"
    return _states_of(RunKey(values, run), pipeline_stage, gathers_layers, device_type == "cpu")


class StageStates:
    """Parameters, gradients, optimizer states and buffers of a rank of one pipeline stage."""

    def __init__(
        self, key: RunKey, pipeline_stage: int, gathers_layers: bool, on_host: bool
    ) -> None:
        self._run, self._gathers_layers, self._on_host = key.run, gathers_layers, on_host
        self._parameters = local_parameters(key.run, pipeline_stage)
        self._head = head_weight(self._parameters)
        self._runs: dict[tuple[object, ...], Alike[LayerStates]] = {}

    @cached_property
    def between(self) -> MemoryBytes:
        """What is held between two micro-batches of a step."""
        return model_states(self._run, self._parameters, on_host=self._on_host)

    @cached_property
    def head_gradient(self) -> int:
        """Bytes of buffers: the sum of the head's gradients, unless a complete gradient has it."""
        return head_gradient_bytes(self._run, self._parameters)

    @cached_property
    def _buckets(self) -> list[Bucket]:
        return gradient_buckets(self._run, self._parameters, on_host=self._on_host)

    @cached_property
    def reducing(self) -> int:
        """Bytes of buffers while complete gradients are reduced, or what compression needs."""
        copies = [compression_buffer_bytes(self._run, self._parameters, on_host=self._on_host)]
        if self._run.keeps_complete_gradients:
            copies += [bucket.packed_bytes for bucket in self._buckets]
        return max(copies)

    @cached_property
    def updating(self) -> int:
        """Bytes that the optimizer step adds: an fp32 copy of gradients of another type."""
        return gradient_copy_bytes(self._run, self._parameters)

    @cached_property
    def visits(self) -> list[int]:
        """Bytes of the gradients of each chunk that are summed in a visit."""
        element_bytes = BYTES_OF[waiting_dtype(self._run)]
        return [
            element_bytes
            * elements_of(p for p in self._parameters if p.chunk == chunk and p is not self._head)
            for chunk in range(len(self._parameters.layers))
        ]

    @cached_property
    def gathered(self) -> dict[tuple[int, bool], int]:
        """(chunk, whether it is gathered for a forward) -> bytes of the buffers that hold it."""
        chunks = range(len(self._parameters.layers))
        size = partial(gathered_chunk_bytes, self._run, self._parameters, on_host=self._on_host)
        return {each: size(each[0], forward=each[1]) for each in product(chunks, (False, True))}

    def layers_of(self, moment: Moment) -> Alike[LayerStates]:
        """Return the layers of a pass in its order, with equal neighbours counted together."""
        following = moment.following if self._gathers_layers else None
        key: tuple[object, ...] = (moment.chunk, following, moment.has_head_sum)
        if moment.direction == "backward":
            key = (*key, moment.summed is None, moment.reduces)
        if key not in self._runs:
            layers = self._parameters.layers[moment.chunk]
            gathered = [0] * len(layers)
            if self._gathers_layers:
                gathered = gathered_in_pass(
                    self._run,
                    [*chain(*(layer.parameters for layer in layers))],
                    moment.direction,
                    following,
                    on_host=self._on_host,
                )
            of_pass = self._forward if moment.direction == "forward" else self._backward
            found = groupby(of_pass(moment, layers, gathered))
            self._runs[key] = [(len([*alike]), states) for states, alike in found]
        return self._runs[key]

    def _forward(
        self, moment: Moment, layers: Sequence[LocalLayer], gathered: Sequence[int]
    ) -> Iterator[LayerStates]:
        for layer, size in zip(layers, gathered, strict=True):
            adds = layer.parameters[0].layer == "head" and not moment.has_head_sum
            left = self.head_gradient if adds else 0
            yield LayerStates(0, size + left, 0, size + left, 0, left)

    def _backward(
        self, moment: Moment, layers: Sequence[LocalLayer], gathered: Sequence[int]
    ) -> Iterator[LayerStates]:
        """Yield the layers from the last to the first."""
        run, head, is_partial = self._run, self._head, not self._run.keeps_complete_gradients
        is_sent = moment.reduces and (is_partial or run.overlaps_reductions)
        sums, element_bytes = moment.summed is not None, BYTES_OF[waiting_dtype(run)]
        # A backward computes the first parameter of a bucket last.
        complete = {bucket.members[0].name: bucket for bucket in self._buckets}
        in_flight = 0  # bytes of the copy that is being reduced
        for layer, size in zip(reversed(layers), reversed(gathered), strict=True):
            gradients = buffers = most_gradients = most_buffers = 0
            for parameter in reversed(layer.parameters) if self._buckets else ():
                is_head = parameter is head
                # An earlier backward may have reduced what this micro-batch adds to its gradient.
                if is_head and is_partial and not moment.has_head_sum:
                    continue
                if is_partial and not is_head and not sums:
                    gradients += parameter.elements * element_bytes
                    if gradients + buffers > most_gradients + most_buffers:
                        most_gradients, most_buffers = gradients, buffers
                bucket = complete.get(parameter.name)
                if bucket is None or not is_sent:
                    continue
                # If a visit sums gradients, the last one is beside the sum while it is sent.
                beside = _fresh_bytes(run, parameter.elements) if sums and not is_head else 0
                buffers += bucket.packed_bytes - in_flight
                if gradients + beside + buffers > most_gradients + most_buffers:
                    most_gradients, most_buffers = gradients + beside, buffers
                in_flight = bucket.packed_bytes
                if is_partial:
                    gradients -= bucket.gradient_bytes
                    if bucket.has_head:
                        buffers -= self.head_gradient
                if not run.overlaps_reductions:
                    buffers -= in_flight
                    in_flight = 0
            # Autograd computes the largest gradient of the layer, and then adds it to the sum.
            fresh, most = _fresh_bytes(run, layer.largest), (most_gradients, size + most_buffers)
            yield LayerStates(fresh, size, *most, gradients, buffers)


_states_of = lru_cache(maxsize=256)(StageStates)


def _fresh_bytes(run: Run, elements: int) -> int:
    """Return the bytes of a gradient of autograd, and of its copy if sums have another type."""
    converted = run.precision != waiting_dtype(run)
    copy = converted * BYTES_OF[waiting_dtype(run)]
    return elements * (BYTES_OF[run.precision] + copy)

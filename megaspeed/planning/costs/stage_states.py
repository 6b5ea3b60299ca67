"""What ZeRO holds on a rank of one pipeline stage in each pass: parameters, gradients, buffers.

    pass of a layer     gathered parameters, held while it computes
    in its backward     gradients as they are computed; the copy of each bucket while it is reduced

None of this depends on activations. So it is computed once for all variants of a training that
differ in micro-batch, schedule or recomputation. All blocks are alike, but buckets and gathers may
end within a block, so layers are compared. Equal neighbours are counted together.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, product
from operator import add
from typing import NamedTuple, TypeVar

from megaspeed.config.resolve import BYTES_OF, Run, RunKey
from megaspeed.data_axis.axis import DataAxis, data_axis_key, data_axis_of
from megaspeed.data_axis.buckets import Bucket
from megaspeed.data_axis.parameters import LocalLayer, elements_of
from megaspeed.pipeline.schedules import Pass
from megaspeed.planning.costs.memory import MemoryBytes, compression_buffer_bytes, model_states
from megaspeed.planning.costs.moments import Moment
from megaspeed.planning.costs.muon import orthogonalizing_bytes, update_bytes

_Value = TypeVar("_Value")
Alike = Sequence[tuple[int, _Value]]
"""Pairs (count, value): the value occurs this many times in a row."""


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


def states_of(run: Run, pipeline_stage: int, gather_policy: str, device_type: str) -> "StageStates":
    """Return the states of a rank of a pipeline stage, on "cuda" or "cpu".

    ``gather_policy`` is that of the run.
    """
    key = data_axis_key(run, pipeline_stage)
    gathers_layers = run.zero_stage == 3 and gather_policy == "layers"
    return _states_of(key, pipeline_stage, gathers_layers, device_type)


class StageStates:
    """Parameters, gradients, optimizer states and buffers of a rank of one pipeline stage."""

    def __init__(
        self, key: RunKey, pipeline_stage: int, gathers_layers: bool, device_type: str
    ) -> None:
        self._run, self._gathers_layers = key.run, gathers_layers
        self._on_host = device_type == "cpu"
        self.axis = data_axis_of(key.run, pipeline_stage, device_type)
        """What the rank reduces and gathers."""
        self._parameters, self._head = self.axis.parameters, self.axis.parameters.head
        self._runs: dict[tuple[object, ...], Alike[LayerStates]] = {}

    @cached_property
    def between(self) -> MemoryBytes:
        """What is held between two micro-batches of a step."""
        return model_states(self._run, self.axis, on_host=self._on_host)

    @cached_property
    def head_gradient(self) -> int:
        """Bytes of buffers: the sum of the head's gradients, to which the forward of the loss adds
        and which a backward reduces; 0 if the complete gradient contains it.
        """
        if self._head is None or self.axis.matrix_reduction.keeps == "complete":
            return 0
        return self._head.elements * BYTES_OF[self.axis.matrix_reduction.total]

    @cached_property
    def reducing(self) -> int:
        """Bytes of buffers while complete gradients are reduced, or what compression needs."""
        copies = [compression_buffer_bytes(self._run, self.axis, on_host=self._on_host)]
        buckets = (each for each in self.axis.buckets if each.reduction.keeps == "complete")
        return max([*copies, *(bucket.message_bytes for bucket in buckets)])

    @cached_property
    def updating(self) -> int:
        """Bytes that the optimizer step adds: an fp32 copy of gradients of another type, for one
        flat tensor at a time, and the updates of Muon that are not applied yet.
        """
        is_offloaded = self._run.config.zero_optimization.offloads_optimizer
        has_copy = self.axis.matrix_reduction.total != "fp32" and not is_offloaded
        copies = [bucket.part * BYTES_OF["fp32"] * has_copy for bucket in self.axis.buckets]
        left = accumulate(reversed(update_bytes(self._run, self.axis)))
        return max(map(add, reversed(copies), left))

    @cached_property
    def orthogonalizing(self) -> int:
        """Bytes of buffers while Muon computes its updates; 0 without Muon."""
        return orthogonalizing_bytes(self._run, self.axis)

    @cached_property
    def visits(self) -> list[int]:
        """Bytes of the gradients of each chunk that are summed in a visit."""
        sizes = [0] * len(self._parameters.layers)
        for bucket in self.axis.buckets:
            sizes[bucket.chunk] += self._gradient_bytes(bucket)
        return sizes

    def _gradient_bytes(self, bucket: Bucket) -> int:
        """Bytes of the gradients of a bucket as backwards compute them, without the head's."""
        computed = [p for p in bucket.parameters if p is not self._head]
        return elements_of(computed) * BYTES_OF[bucket.reduction.computed]

    @cached_property
    def gathered(self) -> dict[tuple[int, bool], int]:
        """(chunk, whether it is gathered for a forward) -> bytes of the buffers that hold it."""
        chunks = product(range(len(self._parameters.layers)), (False, True))
        if self.axis.is_local or not self.axis.passes:
            return dict.fromkeys(chunks, 0)
        return {
            (chunk, forward): sum(
                gather.held_bytes for gather in self.axis.chunk_gathers(chunk, forward=forward)
            )
            for chunk, forward in chunks
        }

    def layers_of(self, moment: Moment) -> Alike[LayerStates]:
        """Return the layers of a pass in its order, with equal neighbours counted together."""
        following = moment.following if self._gathers_layers else None
        key: tuple[object, ...] = (moment.chunk, following, moment.has_head_sum)
        if moment.direction == "backward":
            key = (*key, moment.summed is None, moment.reduces)
        if key not in self._runs:
            layers = self._parameters.layers[moment.chunk]
            gathered = [0] * len(layers)
            if self._gathers_layers and not self.axis.is_local:
                gathered = held_bytes(self.axis, moment.direction, following)
            layer_states = self._forward if moment.direction == "forward" else self._backward
            found = groupby(layer_states(moment, layers, gathered))
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
        head, sums, buckets = self._head, moment.summed is not None, self.axis.bucket_of
        reduces_in_place = not any(
            bucket.reduction.copies or bucket.message_bytes for bucket in self.axis.buckets
        )
        adds_products = self.axis.matrix_reduction.added_by == "product"
        in_flight = 0  # bytes of the copy that is being reduced
        for layer, size in zip(reversed(layers), reversed(gathered), strict=True):
            gradients = buffers = most_gradients = most_buffers = 0
            for parameter in () if reduces_in_place else reversed(layer.parameters):
                is_head, bucket = parameter is head, buckets[parameter.name]
                how = bucket.reduction
                is_partial = how.keeps != "complete"
                # An earlier backward may have reduced what this micro-batch adds to its gradient.
                if is_head and is_partial and not moment.has_head_sum:
                    continue
                if is_partial and not is_head and not sums:
                    gradients += parameter.elements * BYTES_OF[how.computed]
                    if gradients + buffers > most_gradients + most_buffers:
                        most_gradients, most_buffers = gradients, buffers
                # A backward computes the first parameter of a bucket last.
                is_complete = parameter is bucket.parameters[0]
                is_sent = moment.reduces and how.when != "after"
                if not (is_complete and is_sent) or bucket.is_sent_compressed:
                    continue
                # A visit's sum is sent while autograd still holds the gradient it has just added.
                is_held = sums and not is_head and not (adds_products and parameter.is_product)
                beside = self._fresh_bytes(parameter.elements) if is_held else 0
                buffers += bucket.message_bytes - in_flight
                if gradients + beside + buffers > most_gradients + most_buffers:
                    most_gradients, most_buffers = gradients + beside, buffers
                in_flight = bucket.message_bytes
                if is_partial:
                    gradients -= self._gradient_bytes(bucket)
                    if any(each is head for each in bucket.parameters):
                        buffers -= self.head_gradient
                if not how.overlaps:
                    buffers -= in_flight
                    in_flight = 0
            # Autograd computes the largest gradient of the layer, and then adds it to the sum.
            fresh, most = self._fresh_bytes(layer.largest), (most_gradients, size + most_buffers)
            if adds_products:
                # A product takes memory only for a sum that it begins.
                begun = 0 if sums else layer.largest * self._copy_bytes
                fresh = max(self._fresh_bytes(layer.largest_other), begun)
            yield LayerStates(fresh, size, *most, gradients, buffers)

    def _fresh_bytes(self, elements: int) -> int:
        """Return the bytes of a gradient of autograd, and of its copy if sums have another type."""
        return elements * (BYTES_OF[self._run.precision] + self._copy_bytes)

    @cached_property
    def _copy_bytes(self) -> int:
        """Bytes of an element in the type of a visit's sum; 0 if it has the model's type."""
        computed = self.axis.matrix_reduction.computed
        return (self._run.precision != computed) * BYTES_OF[computed]


def held_bytes(axis: DataAxis, direction: Pass, following: Pass | None) -> list[int]:
    """Return the bytes of gathered parameters while a pass of the only chunk computes each layer.

    The layers are in the order of the forward pass, for both directions. ``following`` is the next
    pass, for which the last layers of this one gather ahead; None if it is the last one of a step.
    Each parameter is received in its final place, which is aligned.
    """
    held = axis.held((direction, 0), None if following is None else (following, 0))
    # The backward of the embedding gathers nothing, and holds what is held after the pass.
    layers = held[: len(axis.parameters.layers[0])]
    sizes = [sum(gather.held_bytes for gather in layer) for layer in layers]
    return sizes if direction == "forward" else sizes[::-1]


_states_of = lru_cache(maxsize=256)(StageStates)

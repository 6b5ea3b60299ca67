"""ZeRO-3: which parameters are gathered, held and freed together.

    forward     embedding, blocks, head     every layer once
    backward    norm of the head, blocks    the forward of the loss computes the head's gradient

A layer is gathered while the layer before it computes, if there is room for both, or when the pass
enters it. It is freed when the pass leaves it. At the end of a pass, the first layer of the next
pass is gathered. The last backward of a step gathers nothing ahead, because the optimizer step
changes the parameters.

Small neighbouring blocks are gathered together, because a message of a few KB takes as long as one
of a few MB (``stage3_prefetch_bucket_size``). A pipeline stage with several chunks of layers
gathers a complete chunk at a time (``pipeline/visits.py``). Small parameters stay gathered
(``stage3_param_persistence_threshold``).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple, Self

from megaspeed.config.deepspeed_keys import ZeroConfig
from megaspeed.data_axis.buckets import neighbours
from megaspeed.data_axis.parameters import LocalParameter, LocalParameters, elements_of
from megaspeed.pipeline.schedules import Pass, Pipeline, passes_of
from megaspeed.topology.grid import Axis, Grid

_ALIGNMENT = 128
"""Bytes. Each parameter is gathered to an address that is a multiple of this number. Vectorized
loads read 16 bytes, and a cache line of a GPU has 128."""

PassOfChunk = tuple[Pass, int]
"""A pass through a chunk of the pipeline stage."""

Turn = tuple[PassOfChunk | None, PassOfChunk, PassOfChunk | None]
"""The pass before, a pass, and the next one; None at the start and at the end of a step."""


def turns_of(pipeline: Pipeline, stage: int) -> Iterator[Turn]:
    """Yield the passes of a step, each with its neighbours."""
    passes = passes_of(pipeline, stage)
    return zip([None, *passes[:-1]], passes, [*passes[1:], None], strict=True)


class PartitionsOf(NamedTuple):
    """How ZeRO-3 partitions parameters."""

    grid: Grid
    element_bytes: int
    on_device: bool  # whether a partition is on the device of its parameter

    def place(self, parameter: LocalParameter) -> tuple[int, Axis]:
        """Return (elements with padding, axis) of the gather of a parameter. There are 0 elements
        if the partition is the parameter, so that nothing is copied.
        """
        copies = self.grid.copies_of(experts=parameter.is_expert)
        is_copied = copies.shard > 1 or not self.on_device
        size = -(-parameter.elements // copies.shard) * copies.shard
        return size * is_copied, copies.shard_axis


@dataclass(frozen=True, kw_only=True, eq=False)  # keys of dictionaries: lists have no hash
class Gather:
    """Parameters that are gathered, held and freed together; there may be none.

    (The instruction ``pipeline.schedules.Gather`` gathers those of a chunk.)
    """

    parameters: Sequence[LocalParameter]
    sizes: Sequence[int]  # with padding: of each parameter at ZeRO-3, else of the bucket
    axes: Sequence[Axis]  # of the ranks that hold the parts, for each of the sizes
    element_bytes: int

    @classmethod
    def of(cls, parameters: Sequence[LocalParameter], partitions: PartitionsOf) -> Self:
        """Return the gather of these parameters, each padded to equal parts."""
        places = [partitions.place(parameter) for parameter in parameters]
        sizes, axes = [size for size, _ in places], [axis for _, axis in places]
        element_bytes = partitions.element_bytes
        return cls(parameters=parameters, sizes=sizes, axes=axes, element_bytes=element_bytes)

    @cached_property
    def elements(self) -> int:
        """The elements of the parameters, without padding."""
        return elements_of(self.parameters)

    @cached_property
    def messages(self) -> Mapping[Axis, int]:
        """Axis -> the bytes of all parts together. There is one message over each axis."""
        found = dict.fromkeys(self.axes, 0)
        for size, axis in zip(self.sizes, self.axes, strict=True):
            found[axis] += size * self.element_bytes
        return {axis: size for axis, size in found.items() if size}

    @property
    def message_bytes(self) -> int:
        return sum(self.sizes) * self.element_bytes

    @cached_property
    def held_bytes(self) -> int:
        """ZeRO-3: the bytes of the buffer that receives them, with alignment."""
        return sum(aligned_elements(n, self.element_bytes) for n in self.sizes) * self.element_bytes


def aligned_elements(elements: int, element_bytes: int) -> int:
    """Return the elements from the start of a gathered parameter to the start of the next one."""
    return -(-elements * element_bytes // _ALIGNMENT) * _ALIGNMENT // element_bytes


def persistent_parameters(
    zero: ZeroConfig, parameters: Sequence[LocalParameter]
) -> Iterator[LocalParameter]:
    """Yield the parameters that every rank keeps gathered: those of at most
    ``stage3_param_persistence_threshold`` elements, and ``stage3_model_persistence_threshold``
    together.

    DeepSpeed 0.19.8, runtime/zero/parameter_offload.py:328.
    """
    threshold, total = zero.stage3_param_persistence_threshold, 0
    assert threshold is not None, "a resolved run states it"
    allowed = zero.stage3_model_persistence_threshold
    for parameter in parameters:
        fits = allowed is None or total + parameter.elements <= allowed
        if parameter.elements <= threshold and fits:
            total += parameter.elements
            yield parameter


def gathers_of_passes(
    zero: ZeroConfig,
    parameters: LocalParameters,
    persistent: Sequence[LocalParameter],
    partitions: PartitionsOf,
) -> Mapping[PassOfChunk, Sequence[Gather]]:
    """Return what each layer of a pass gathers, in the order of the pass."""
    kept, head = {parameter.name for parameter in persistent}, parameters.head

    def gather(members: Sequence[LocalParameter]) -> Gather:
        own = [parameter for parameter in members if parameter.name not in kept]
        return Gather.of(own, partitions)

    found: dict[PassOfChunk, Sequence[Gather]] = {}
    for chunk, layers in enumerate(parameters.layers):
        inner = {layer.parameters[0].layer: layer.parameters for layer in layers}
        ends = {name: inner.pop(name) for name in ("embedding", "head") if name in inner}
        own, blocks = [gather(block) for block in inner.values()], list[Gather]()
        for together in neighbours([g.elements for g in own], most_gathered_together(zero))[::-1]:
            members = chain(*(g.parameters for g in own[together.start : together.stop]))
            blocks += [gather([*members])] * len(together)
        embedding, heads, norms = [], [], []
        if "embedding" in ends:
            embedding = [gather(ends["embedding"])]
        if "head" in ends and head is not None:
            norm = [parameter for parameter in ends["head"] if parameter is not head]
            heads, norms = [gather([*norm, head])], [gather(norm)]
        found["forward", chunk] = [*embedding, *blocks, *heads]
        found["backward", chunk] = [*blocks, *norms][::-1]
    return found


def most_gathered_together(zero: ZeroConfig) -> int:
    """Return the most elements of blocks that ZeRO-3 gathers together.

    They are at most half of ``stage3_max_live_parameters``, so that the next ones fit, too.
    """
    most, bound = zero.stage3_prefetch_bucket_size, zero.stage3_max_live_parameters
    assert most is not None, "a resolved run states it"
    return most if bound is None else min(most, bound // 2)


def held_in_pass(
    zero: ZeroConfig, order: Sequence[Gather], following: Sequence[Gather]
) -> list[list[Gather]]:
    """Return what ZeRO-3 holds at each layer of a pass, and after it.

    ``order`` has the layers of the pass, ``following`` those of the next pass; it is empty if
    nothing is gathered for that.
    """
    held = [_held(zero, [*order[index:], *following]) for index in range(len(order))]
    kept = _held(zero, following)
    return [*held, [layer for layer in held[-1] if layer in kept] if held else []]


def _held(zero: ZeroConfig, coming: Sequence[Gather]) -> list[Gather]:
    """Return what is held while the first of the coming layers computes; empty if none comes.

    This is that layer, and the next other one if there is room for both.
    """
    if not coming:
        return []
    first, bound = coming[0], zero.stage3_max_live_parameters
    # Small blocks that are gathered together are one object, and a layer whose parameters are all
    # persistent gathers nothing.
    later = next((layer for layer in coming if layer is not first and layer.elements), None)
    if later is None or zero.stage3_prefetch_bucket_size == 0:
        return [first]
    has_room = bound is None or first.elements + later.elements <= bound
    return [first, later] if has_room else [first]

"""The parameters of one rank: their optimizer groups, and the flat tensors that ZeRO partitions.

    zero_stage   each data rank owns          padded to a multiple of
    0            every tensor                 2 elements
    1 and 2      1/n of each tensor           2 n, for n shards (dp if there are no replicas)
    3            1/n of each parameter        n for each parameter

A flat tensor is a bucket: parameters of one optimizer group and one chunk of layers whose gradients
are reduced together. With one data rank, it is the complete group, and so it is for compressed
gradients, unless they are reduced over shards before replicas compress them.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import groupby
from operator import attrgetter, itemgetter
from types import MappingProxyType
from typing import NamedTuple, TypeVar, get_args

from megaspeed.config.message_sizes import buckets
from megaspeed.config.model import ModelConfig
from megaspeed.config.resolve import Precision, Run
from megaspeed.config.run import Compression
from megaspeed.model.parameters import EMBEDDING_WEIGHT, HEAD_WEIGHT, parameters_of
from megaspeed.pipeline.partition import chunks_of_stages
from megaspeed.tensor_parallel.plan import OptimizerGroup, is_compressed, optimizer_group, shard_of

BYTES_OF: Mapping[Precision, int] = MappingProxyType({"fp32": 4, "bf16": 2, "fp16": 2})
"""Bytes of one number of each type."""

_ELEMENTS_ALIGNED = 2  # DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py:369: 4 bytes in bf16


@dataclass(frozen=True, kw_only=True)
class LocalParameter:
    """One parameter of one rank, before ZeRO partitions it."""

    name: str  # full name
    layer: str  # name of its layer, such as "blocks.3"
    shape: tuple[int, ...]  # of the local tensor, tensor-parallel padding included
    group: OptimizerGroup  # the optimizer group that it is in
    chunk: int = 0  # of the pipeline stage
    is_compressed: bool = False  # whether its gradient is compressed for the data axis

    @cached_property
    def elements(self) -> int:
        """Elements of the local tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class RunKey:
    """A key of a cache: a run, compared only by the values that a result depends on."""

    values: tuple[Hashable, ...]
    run: Run = field(compare=False)


_Value = TypeVar("_Value")
Alike = Sequence[tuple[int, _Value]]
"""Pairs (count, value): the value occurs this many times in a row."""


def local_parameters(run: Run, pipeline_stage: int) -> "LocalParameters":
    """Return the parameters of a rank of this pipeline stage, in the order of the model.

    All data and tensor ranks of the stage have the same shapes.
    """
    chunks = chunks_of_stages(run)[pipeline_stage]
    split = (run.grid.tp, run.grid.pp > 1, run.sequence_parallel, run.compression)
    return _local_parameters(run.config.model, chunks, *split)


class _Group(NamedTuple):
    """The parameters of a rank in one optimizer group and one chunk."""

    members: Sequence[LocalParameter]
    sizes: Sequence[int]
    is_compressed: bool
    head: int | None  # index of the head's weight


class LocalLayer(NamedTuple):
    """The parameters of one layer of a rank, in the order of the model."""

    parameters: Sequence[LocalParameter]
    largest: int  # elements of the largest one, without the head's weight


class LocalParameters(tuple[LocalParameter, ...]):
    """The parameters of a rank, by layer and by optimizer group, which no ZeRO stage changes."""

    @cached_property
    def head(self) -> LocalParameter | None:
        """The weight of the head, which may be the embedding's; None if there is no head."""
        if all(parameter.layer != "head" for parameter in self):
            return None
        named = {parameter.name: parameter for parameter in self}
        return named.get(HEAD_WEIGHT) or named.get(EMBEDDING_WEIGHT)

    @cached_property
    def layers(self) -> Sequence[Sequence[LocalLayer]]:
        """The layers of each chunk."""
        found: dict[int, list[LocalLayer]] = {}
        for _, own in groupby(self, attrgetter("layer")):
            parameters = [*own]
            largest = max(p.elements for p in parameters if p.name != HEAD_WEIGHT)
            found.setdefault(parameters[0].chunk, []).append(LocalLayer(parameters, largest))
        return [*found.values()]

    @cached_property
    def groups(self) -> Sequence[_Group]:
        """The parameters by optimizer group and chunk."""
        groups: dict[tuple[int, int], list[LocalParameter]] = {}
        order = {name: index for index, name in enumerate(get_args(OptimizerGroup))}
        for parameter in self:
            groups.setdefault((order[parameter.group], parameter.chunk), []).append(parameter)
        return [
            _Group(
                members,
                [parameter.elements for parameter in members],
                any(parameter.is_compressed for parameter in members),
                next((i for i, p in enumerate(members) if p is self.head), None),
            )
            for _, members in sorted(groups.items(), key=itemgetter(0))
        ]


@lru_cache(maxsize=1024)  # a what-if asks for the same layers a thousand times
def _local_parameters(
    model: ModelConfig,
    chunks: tuple[range, ...],
    tp: int,
    has_pipeline: bool,
    splits_sequence: bool,
    compression: Compression | None,
) -> LocalParameters:
    return LocalParameters(
        LocalParameter(
            name=name,
            layer=parameter.layer,
            shape=shard_of(model, parameter, rank=0, size=tp).local_shape,
            group=optimizer_group(
                model,
                parameter,
                compression,
                has_pipeline=has_pipeline,
                size=tp,
                sequence_parallel=splits_sequence,
            ),
            chunk=chunk,
            is_compressed=is_compressed(model, parameter, compression, size=tp),
        )
        for chunk, layers in enumerate(chunks)
        for name, parameter in parameters_of(model, layers).items()
    )


def head_weight(parameters: Sequence[LocalParameter]) -> LocalParameter | None:
    """Return the weight of the head, which may be the embedding's; None if there is no head."""
    return _known(parameters).head


def _known(parameters: Sequence[LocalParameter]) -> LocalParameters:
    if isinstance(parameters, LocalParameters):
        return parameters
    return LocalParameters(parameters)


def elements_of(parameters: Iterable[LocalParameter]) -> int:
    """Return the number of elements of all parameters, without ZeRO's padding."""
    return sum(parameter.elements for parameter in parameters)


def sharded_elements(run: Run, parameters: Iterable[LocalParameter]) -> int:
    """ZeRO-3: return the elements of all parameters, each with its padding."""
    shards = run.grid.shard
    return sum(shards * math.ceil(parameter.elements / shards) for parameter in parameters)


def flat_buckets(
    run: Run, parameters: Sequence[LocalParameter]
) -> list[tuple[Sequence[LocalParameter], int]]:
    """Return the parameters of each flat tensor, and its number of elements with padding."""
    grid, shards = run.grid, run.grid.shard
    # ZeRO-3 pads each parameter, the other stages each flat tensor.
    multiple, padded = (1, shards) if run.zero_stage == 3 else (_ELEMENTS_ALIGNED * shards, 1)
    flat: list[tuple[Sequence[LocalParameter], int]] = []
    for group in _known(parameters).groups:
        members, sizes = group.members, group.sizes
        if padded > 1:
            sizes = [padded * -(-size // padded) for size in sizes]
        together = [range(len(members))]
        if grid.dp_cp > 1 and (grid.is_hybrid or not group.is_compressed):
            together = buckets(run, sizes, group.head)
        for one in together:
            elements = multiple * -(-sum(sizes[one.start : one.stop]) // multiple)
            flat.append((members[one.start : one.stop], elements))
    return flat


def flat_elements(run: Run, parameters: Sequence[LocalParameter]) -> int:
    """Return the elements of all flat tensors together."""
    return sum(elements for _, elements in flat_buckets(run, parameters))


def own_elements(run: Run, parameters: Sequence[LocalParameter]) -> int:
    """Return the elements that one rank's optimizer updates, with padding."""
    return flat_elements(run, parameters) // run.grid.shard

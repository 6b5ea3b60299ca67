"""The parameters of one rank: its tensor shards, before ZeRO partitions them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import NamedTuple, get_args

from megaspeed.config.model import ModelConfig
from megaspeed.config.resolve import Run
from megaspeed.config.run import Compression
from megaspeed.model.parameters import EMBEDDING_WEIGHT, HEAD_WEIGHT, parameters_of
from megaspeed.pipeline.partition import chunks_of_stages
from megaspeed.tensor_parallel.shards import (
    OptimizerGroup,
    gradient_is_product,
    is_compressed,
    optimizer_group,
    shard_of,
)


@dataclass(frozen=True, kw_only=True)
class LocalParameter:
    """One parameter of one rank, before ZeRO partitions it."""

    name: str  # full name
    layer: str  # name of its layer, such as "blocks.3"
    shape: tuple[int, ...]  # of the local tensor, tensor-parallel padding included
    group: OptimizerGroup  # the optimizer group that it is in
    chunk: int = 0  # of the pipeline stage
    is_compressed: bool = False  # whether its gradient is compressed for the data axis
    is_head: bool = False  # whether the forward of the loss computes (a part of) its gradient
    is_product: bool = False  # whether its gradient is a matrix product in a block, and no sum
    is_expert: bool = False  # whether ``Grid.expert_copies`` hold it, and not ``Grid.copies``

    @cached_property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def in_backward(self) -> bool:
        """Whether backwards compute its gradient. Of a tied embedding they compute a part."""
        return self.name != HEAD_WEIGHT


class LocalLayer(NamedTuple):
    """The parameters of one layer of a rank, in the order of the model."""

    parameters: Sequence[LocalParameter]
    largest: int  # elements of the largest one whose gradient a backward computes
    largest_other: int  # the same without ``is_product``


class LocalParameters(tuple[LocalParameter, ...]):
    """The parameters of a rank in the order of the model. They are the same at all ZeRO stages."""

    @cached_property
    def head(self) -> LocalParameter | None:
        """The weight of the head, which may be the embedding's; None if there is no head."""
        return next((parameter for parameter in self if parameter.is_head), None)

    @cached_property
    def layers(self) -> Sequence[Sequence[LocalLayer]]:
        found: dict[int, list[LocalLayer]] = {}
        for _, own in groupby(self, attrgetter("layer")):
            parameters = [*own]
            sizes = [(p.is_product, p.elements) for p in parameters if p.in_backward]
            largest = max(size for _, size in sizes)
            other = max((size for is_product, size in sizes if not is_product), default=0)
            layer = LocalLayer(parameters, largest, other)
            found.setdefault(parameters[0].chunk, []).append(layer)
        return [*found.values()]

    @cached_property
    def groups(self) -> Sequence[tuple[Sequence[LocalParameter], Sequence[int]]]:
        """Return (parameters, elements of each) for each optimizer group and chunk.

        A bucket has parameters of one of them: of one chunk, because a backward computes the
        gradients of one chunk; of one group, because tied and partial gradients are reduced in
        ways of their own; of experts or others, because their copies may be on other ranks.
        """
        order = {name: index for index, name in enumerate(get_args(OptimizerGroup))}
        groups: dict[tuple[int, int, bool], list[LocalParameter]] = {}
        for parameter in self:
            key = (order[parameter.group], parameter.chunk, parameter.is_expert)
            groups.setdefault(key, []).append(parameter)
        in_order = (members for _, members in sorted(groups.items(), key=itemgetter(0)))
        return [(members, [each.elements for each in members]) for members in in_order]


def local_parameters(run: Run, pipeline_stage: int) -> LocalParameters:
    """Return the parameters of a rank. All ranks of this pipeline stage have the same shapes."""
    chunks = chunks_of_stages(run)[pipeline_stage]
    has_muon = run.muon is not None
    split = (run.grid.tp, run.grid.pp > 1, run.sequence_parallel, run.compression, has_muon)
    return _local_parameters(
        run.config.model, chunks, *split, run.grid.ep or 1, run.grid.has_expert_axes
    )


@lru_cache(maxsize=1024)  # a what-if asks for the same layers a thousand times
def _local_parameters(
    model: ModelConfig,
    chunks: tuple[range, ...],
    tp: int,
    has_pipeline: bool,
    splits_sequence: bool,
    compression: Compression | None,
    has_muon: bool,
    ep: int,
    has_expert_axes: bool,
) -> LocalParameters:
    named = [(chunk, parameters_of(model, layers)) for chunk, layers in enumerate(chunks)]
    layers = {parameter.layer for _, own in named for parameter in own.values()}
    head = HEAD_WEIGHT if any(HEAD_WEIGHT in own for _, own in named) else EMBEDDING_WEIGHT
    return LocalParameters(
        LocalParameter(
            name=name,
            layer=parameter.layer,
            # Padding makes the shapes of all tensor ranks equal, so rank 0 serves for all.
            shape=shard_of(model, parameter, rank=0, size=tp, ep=ep).local_shape,
            group=optimizer_group(
                model,
                parameter,
                compression,
                has_pipeline=has_pipeline,
                has_muon=has_muon,
                size=tp,
                sequence_parallel=splits_sequence,
            ),
            chunk=chunk,
            is_compressed=is_compressed(model, parameter, compression, size=tp),
            is_head="head" in layers and name == head,
            is_product=gradient_is_product(model, parameter, size=tp),
            is_expert=parameter.is_expert and has_expert_axes,
        )
        for chunk, own in named
        for name, parameter in own.items()
    )


def elements_of(parameters: Iterable[LocalParameter]) -> int:
    """Return the number of elements of all parameters, without ZeRO's padding."""
    return sum(parameter.elements for parameter in parameters)

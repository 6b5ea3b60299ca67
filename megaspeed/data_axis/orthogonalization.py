"""Muon: which rank orthogonalizes which matrix, and what the ranks send each other for it.

    partitions of all ranks --all-to-all--> matrices of their owners
    matrices --Newton-Schulz, by the owner--> orthogonal matrices
    orthogonal matrices --all-to-all--> partitions of all ranks

A section is what is orthogonalized by itself: the query, key, value, gate or up rows of a matrix, a
complete matrix, or with ``per_head_muon`` each head of a section. Its elements are in the
partitions of several ranks, because tensor parallelism and ZeRO divide it. Its owner has all of it
for a moment. So the update is that of the complete matrix at every layout.

The ranks that exchange are those of a pipeline stage: with several shards, the shard x tp ranks of
a replica, so replicas repeat the work of each other. With one shard, every replica has complete
gradients. Then the replicas share the sections, exchange only over the tensor axis, and an
all-gather over the replicas returns the results.

If ``ep`` or ``tp`` is more than 1, experts are divided in another way than other matrices, so they
have a plan of their own. The ranks that hold the same experts exchange if they are shards, and
share the sections if they are replicas.

Owners have about equal costs. Small sections of equal shapes are orthogonalized together. A batch
depends on the pipeline stage alone, so the kernels do not depend on who owns what.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapreplace
from itertools import chain, groupby, islice, pairwise, zip_longest
from math import prod
from typing import NamedTuple

from megaspeed.config.resolve import Run
from megaspeed.data_axis.buckets import Bucket, OwnedRange
from megaspeed.data_axis.parameters import LocalParameter
from megaspeed.model.parameters import parameter_named
from megaspeed.tensor_parallel.shards import key_value_replicas, shard_of
from megaspeed.topology.grid import Axis, Grid

_BATCH_ELEMENTS = 1 << 22
"""The most elements of a batch of several sections. Products of this size fill a GPU, and a model
with smaller matrices needs fewer kernels."""
_MOST_SECTIONS = 16


@dataclass(frozen=True, kw_only=True, eq=False)  # keys of dictionaries
class Section:
    """Rows of a matrix that are orthogonalized by themselves."""

    parameter: LocalParameter
    name: str  # of the section in the table of the model, such as "query"
    shape: tuple[int, int, int]  # matrices, rows and columns of each, over all tensor ranks
    start: int  # first element of the section in the flat local tensor
    part: int  # elements that a tensor rank holds
    copies: int  # tensor ranks that hold the same part
    splits_columns: bool  # whether a part has some columns of all rows; otherwise complete rows

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def kind(self) -> tuple[tuple[int, int, int], bool]:
        """What sections have in common that can be in one batch."""
        return self.shape, self.splits_columns

    @property
    def block(self) -> int:
        return int(self.parameter.layer.removeprefix("blocks."))

    @property
    def elements_with_copies(self) -> int:
        """Elements that all tensor ranks hold."""
        return self.elements * self.copies


class Part(NamedTuple):
    """A part of a section in the partition of a rank, and its place in the batch of the owner.

    In a batch, the parts of the tensor ranks follow each other, each as the tensor rank holds it.
    """

    bucket: int  # its index
    offset: int  # first element in the partition
    place: int  # first element in the batch
    length: int
    is_copy: bool  # whether another tensor rank sends the same part


@dataclass(frozen=True, kw_only=True, eq=False)  # keys of dictionaries
class Batch:
    """Sections that their owner orthogonalizes together."""

    sections: Sequence[Section]  # of one shape
    owner: int

    @property
    def elements(self) -> int:
        return self.matrices * self.rows * self.columns

    @property
    def matrices(self) -> int:
        return len(self.sections) * self.sections[0].shape[0]

    @property
    def rows(self) -> int:
        return self.sections[0].shape[1]

    @property
    def columns(self) -> int:
        return self.sections[0].shape[2]

    @property
    def cost(self) -> int:
        """Proportional to the FLOPs of a Newton-Schulz step."""
        return self.elements * min(self.rows, self.columns)


@dataclass(frozen=True, kw_only=True)
class OwnerRound:
    """What an owner does in a round. Lists are in the order of messages."""

    batch: Batch | None  # what it orthogonalizes
    sends: Sequence[Sequence[Part]]  # to each member of its group, of the batch of that member
    receives: Sequence[Sequence[Part]]  # from each member, of its batch
    returns: Sequence[Sequence[Part]]  # to each member, of its batch
    results: Sequence[Sequence[Sequence[Part]]]  # for each group: from each member

    @property
    def gathered(self) -> int:
        """Elements that each group gathers from the others, with padding."""
        return max(elements_of_parts(chain(*group)) for group in self.results)


class Orthogonalization:
    """What the ranks of a pipeline stage orthogonalize in a step, and what they send for it.

    Args:
        run: the resolved run, whose optimizer is Muon.
        buckets: of the pipeline stage.
        of_experts: whether the plan is for the experts of a rank, and not for other matrices.
    """

    def __init__(self, run: Run, buckets: Sequence[Bucket], *, of_experts: bool = False) -> None:
        grid, self._buckets = run.grid, buckets
        self.copies = grid.copies_of(experts=of_experts)
        """The ranks that hold the same parts of matrices."""
        self.axis: Axis = self.copies.shard_axis if of_experts else "stage"
        """Along which members exchange."""
        self.tp = 1 if of_experts else grid.tp
        """How many tensor ranks hold different parts of a matrix."""
        self.members = self.copies.shard * self.tp
        """How many ranks send each other parts of sections: (shard, tp), with tp fastest."""
        self.groups = self.copies.replicate if self.copies.shard == 1 else 1
        """How many groups of members share the sections, and gather the results. Member m of group
        g is owner g * members + m."""
        found = (each for bucket in buckets for each in _sections(run, bucket, of_experts))
        self.sections = sorted(found, key=lambda each: (*each.kind, each.block, each.start))
        """All sections of the pipeline stage; those of one kind are neighbours."""
        self.rounds = _rounds(self.sections, self.members * self.groups)
        """What is orthogonalized at the same time: at most one batch of each owner."""

    @property
    def costs(self) -> list[int]:
        """The sum of the costs of each owner."""
        costs = [0] * (self.members * self.groups)
        for batch in chain(*self.rounds):
            costs[batch.owner] += batch.cost
        return costs

    def owner_of(self, grid: Grid, rank: int) -> int:
        """Return which owner a rank is."""
        index = grid.index_along
        group = index(rank, self.copies.replica_axis) if self.groups > 1 else 0
        member = index(rank, self.copies.shard_axis) * self.tp
        member += index(rank, "tp") if self.tp > 1 else 0
        return group * self.members + member

    def parts(self, batch: Batch, member: int) -> Iterator[Part]:
        """Yield the parts of a batch that a member holds, in the order of their messages."""
        shard, tp_rank = divmod(member, self.tp)
        for number, section in enumerate(batch.sections):
            held = self._held[shard].get(section.parameter.name)
            if held is None:
                continue
            bucket, own = held
            first = max(own.start, section.start)
            length = min(own.start + own.length, section.start + section.part) - first
            if length > 0:
                before = number * section.elements + tp_rank // section.copies * section.part
                place, is_copy = before + first - section.start, tp_rank % section.copies > 0
                yield Part(bucket, own.offset + first - own.start, place, length, is_copy)

    def held(self, batches: Iterable[Batch], member: int, *, copies: bool) -> int:
        """Return how many elements of batches a member holds, with or without copies."""
        parts = (part for batch in batches for part in self.parts(batch, member))
        return sum(part.length for part in parts if copies or not part.is_copy)

    def sent_by(self, owner: int) -> int:
        """Return how many elements an owner sends to other members in a step."""
        group, member = divmod(owner, self.members)
        alike = [batch for batch in chain(*self.rounds) if batch.owner // self.members == group]
        own = [batch for batch in alike if batch.owner == owner]
        others = [batch for batch in alike if batch.owner != owner]
        returned = sum(each.elements_with_copies for batch in own for each in batch.sections)
        returned -= self.held(own, member, copies=True)
        return self.held(others, member, copies=False) + returned

    def round_of(self, number: int, owner: int) -> OwnerRound:
        """Return what an owner does in a round."""
        group, member = divmod(owner, self.members)
        owned: dict[int, Batch] = {batch.owner: batch for batch in self.rounds[number]}

        def parts(batch_owner: int, holder: int, *, copies: bool) -> list[Part]:
            found = self.parts(owned[batch_owner], holder) if batch_owner in owned else ()
            return [part for part in found if copies or not part.is_copy]

        members = range(self.members)
        owners = [range(g * self.members, (g + 1) * self.members) for g in range(self.groups)]
        return OwnerRound(
            batch=owned.get(owner),
            sends=[parts(each, member, copies=False) for each in owners[group]],
            receives=[parts(owner, each, copies=False) for each in members],
            returns=[parts(owner, each, copies=True) for each in members],
            results=[[parts(each, member, copies=True) for each in own] for own in owners],
        )

    @cached_property
    def _held(self) -> Sequence[dict[str, tuple[int, OwnedRange]]]:
        """For each shard: full name of a parameter -> index of its bucket, what the shard owns."""
        return [
            {
                own.parameter.name: (index, own)
                for index, bucket in enumerate(self._buckets)
                if bucket.group == "orthogonalized"
                for own in bucket.owned(shard)
            }
            for shard in range(self.members // self.tp)
        ]


def elements_of_parts(parts: Iterable[Part]) -> int:
    """Return the number of elements of all parts."""
    return sum(part.length for part in parts)


def _sections(run: Run, bucket: Bucket, of_experts: bool) -> Iterator[Section]:
    model, muon = run.config.model, run.muon
    tp, ep = run.grid.tp, run.grid.ep or 1
    assert muon is not None
    for local in bucket.parameters if bucket.group == "orthogonalized" else ():
        parameter, start = parameter_named(model, local.name), 0
        is_expert = parameter.is_expert and tp * ep > 1
        if is_expert != of_experts:
            continue
        shard = shard_of(model, parameter, rank=0, size=tp, ep=ep)
        sections, held_rows = parameter.row.sections, [*map(len, shard.rows)]
        if is_expert:  # the experts of a rank
            sections = dict(islice(sections.items(), len(sections) // ep))
        if parameter.split not in ("heads", "rows"):  # the rows of all sections are one range
            held_rows = [*sections.values()]
        for (name, rows), held in zip(sections.items(), held_rows, strict=True):
            is_of_heads = name in ("query", "key", "value")
            heads = rows // model.head_dim if is_of_heads and muon.per_head_muon else 1
            part = held * local.shape[1]
            yield Section(
                parameter=local,
                name=name,
                shape=(heads, rows // heads, parameter.shape[1]),
                start=start,
                part=part,
                copies=key_value_replicas(model, tp) if name in ("key", "value") else 1,
                splits_columns=parameter.split == "columns",
            )
            start += part


def _rounds(sections: Sequence[Section], owners: int) -> list[list[Batch]]:
    """Give each batch, from the most expensive to the cheapest, to the owner with the least cost
    (Graham 1969, "Bounds on Multiprocessing Timing Anomalies": at most 4/3 of the optimum).
    """
    batches: list[Batch] = []
    for _, own in groupby(sections, key=lambda each: each.kind):
        alike = [*own]
        most = max(1, min(_MOST_SECTIONS, _BATCH_ELEMENTS // alike[0].elements))
        count = -(-len(alike) // most)
        cuts = [number * len(alike) // count for number in range(count + 1)]
        batches += [Batch(sections=alike[a:b], owner=-1) for a, b in pairwise(cuts)]
    costs = [(0, owner) for owner in range(owners)]
    owned: list[list[Batch]] = [[] for _ in range(owners)]
    for batch in sorted(batches, key=lambda batch: -batch.cost):
        cost, owner = costs[0]
        heapreplace(costs, (cost + batch.cost, owner))
        owned[owner].append(replace(batch, owner=owner))
    return [[batch for batch in each if batch] for each in zip_longest(*owned)]

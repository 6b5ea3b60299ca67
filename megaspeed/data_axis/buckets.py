"""Buckets of gradients: which parameters are reduced together, when, how, and to whom.

    gradients of micro-batches --add--> kept by this rank --reduce over shards--> partition of the
    rank that owns it --all-reduce over replicas, once a step--> mean

A bucket is a parameter group of DeepSpeed's optimizer, so it is also a flat tensor of master
weights, which ZeRO partitions:

    ZeRO 0         [ a | b | c | padding ]    one shard: every rank owns everything
    ZeRO 1, 2      [ a | b | c | padding ]    shard r owns the r-th of equal parts
    ZeRO 3         [ a_r | b_r | c_r ]        shard r owns the r-th of equal parts of a, b, c
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from megaspeed.config.resolve import BYTES_OF, Precision, Run
from megaspeed.config.run import Compression
from megaspeed.data_axis.parameters import LocalParameter, LocalParameters
from megaspeed.pipeline.schedules import End, Pipeline, passes_of
from megaspeed.topology.grid import Axis

_ELEMENTS_ALIGNED = 2  # DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py:369: 4 bytes in bf16


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """How the gradients of a bucket are added up over micro-batches, and over the data axis."""

    keeps: Literal["complete", "packed", "partition"]
    """What a rank keeps from one micro-batch to the next: the sum of its own gradients in the order
    of the parameters, or as they are sent (norms and biases), or only its part of the mean."""
    collected: End
    """Gradients are collected in the backward that ends this: added to the packed sum, or sent."""
    when: End | Literal["after"]
    """They are reduced in the backward that ends this, or after the last backward."""
    computed: Precision  # the type of a parameter's gradient until it is collected
    total: Precision  # the type of what is kept, and of the partition
    sent: Precision
    axis: Axis  # over which they are reduced: the shards or, if there is one shard, the replicas
    collective: Literal["all_reduce", "reduce_scatter", "all_to_all"] | None  # None: one data rank
    copies: bool  # whether they are copied to be sent; if not, they are reduced in place
    overlaps: bool  # whether the backward continues meanwhile
    ranks: int  # of which the result is the mean
    divides: Literal["before", "after"]  # a sum of fp16 numbers could be too large for fp16
    replicas: Literal["in_place", "copied"] | None
    """How replicas sum the partition, once a step; None if there are not both, shards and replicas.
    """

    @property
    def is_one_at_a_time(self) -> bool:
        """Whether the next bucket waits for this one, which needs memory, or is summed further."""
        return self.copies or self.collective == "all_to_all" or self.replicas is not None

    def collects(self, end: End) -> bool:
        """Whether a backward that ends this collects gradients."""
        return self.when != "after" and _ENDS.index(end) >= _ENDS.index(self.collected)

    def times(self, pipeline: Pipeline) -> int:
        """How many times a step reduces the gradient of a parameter in backwards."""
        return {"micro_batch": pipeline.micro_batches, "visit": pipeline.groups}.get(self.when, 1)


_ENDS: tuple[End, ...] = ("micro_batch", "visit", "step")


class OwnedRange(NamedTuple):
    """The place of a part of a parameter in the partition of a rank."""

    parameter: LocalParameter
    start: int  # first element of the part in the flat local tensor of the parameter
    offset: int  # first element of the part in the partition
    length: int  # elements without padding; may be 0 at ZeRO-3


@dataclass(frozen=True, kw_only=True, eq=False)
class Bucket:
    """Parameters whose gradients are reduced together."""

    parameters: Sequence[LocalParameter]
    sizes: Sequence[int]  # elements of each; if parts are rows, padded to equal parts
    elements: int  # of all, with padding
    shards: int  # ranks that own a part
    layout: Literal["flat", "rows"]  # rows: the part of each parameter that a shard owns
    reduction: Reduction
    compression: Compression | None = None
    """How gradients of matrices are compressed: before they are sent, or if there are shards and
    replicas, before their sum over the shards is sent between replicas."""

    @property
    def chunk(self) -> int:
        """The chunk of the pipeline stage, with which the bucket is reduced."""
        return self.parameters[0].chunk

    @property
    def part(self) -> int:
        """Elements that each shard owns, with padding."""
        return self.elements // self.shards

    @property
    def starts(self) -> list[int]:
        """Where each parameter begins in the complete gradient."""
        return [*accumulate(self.sizes[:-1], initial=0)]

    @property
    def is_in_place(self) -> bool:
        """Whether the partition is a part of the complete gradient, and needs no memory."""
        is_complete = self.reduction.keeps == "complete" and self.layout == "flat"
        return is_complete and self.compression is None

    @property
    def is_of_the_loss(self) -> bool:
        """Whether only the forward of the loss computes its gradients: the head's weight alone."""
        return not any(parameter.in_backward for parameter in self.parameters)

    @property
    def message_bytes(self) -> int:
        """Bytes of memory that its reduction needs: a copy, and what gloo's ranks exchange."""
        how, only = self.reduction, self.parameters[0]
        if self.compression is not None and how.replicas is None:
            return 0
        is_alone = len(self.parameters) == 1 and only.elements == self.elements
        has_layout = how.keeps == "packed" or (how.keeps == "partition" and is_alone)
        is_summed = how.keeps != "partition" or only.is_head
        is_sent_itself = has_layout and how.sent == (how.total if is_summed else how.computed)
        copied = self.elements if how.copies and not is_sent_itself else 0
        copied += self.elements if how.collective == "all_to_all" else 0
        copied += self.part if how.replicas == "copied" and how.overlaps else 0
        return copied * BYTES_OF[how.sent]

    def times(self, pipeline: Pipeline) -> int:
        """How many times a step reduces it.

        The sum of the head's gradients is sent by a backward that follows a forward.
        """
        times = self.reduction.times(pipeline)
        if times == 1 or not self.is_of_the_loss:
            return times
        own = (name for name, c in passes_of(pipeline, pipeline.stages - 1) if c == self.chunk)
        return min(times, sum(turn == ("forward", "backward") for turn in pairwise(own)))

    def owned(self, shard: int) -> Iterator[OwnedRange]:
        """The parts that a shard owns, in the order of its partition."""
        if self.layout == "rows":
            offset = 0
            for parameter, size in zip(self.parameters, self.sizes, strict=True):
                part = size // self.shards
                start = shard * part
                length = max(0, min(part, parameter.elements - start))
                yield OwnedRange(parameter, start, offset, length)
                offset += part
            return
        begin, end = shard * self.part, (shard + 1) * self.part
        for parameter, at in zip(self.parameters, self.starts, strict=True):
            first, last = max(at, begin), min(at + parameter.elements, end)
            if first < last:
                yield OwnedRange(parameter, first - at, first - begin, last - first)


def buckets_of(run: Run, parameters: LocalParameters, device_type: str) -> list[Bucket]:
    """Return the buckets of a rank's parameters, in the order of DeepSpeed's parameter groups.

    Each has at most ``reduce_bucket_size`` elements, or one parameter. With one data rank, nothing
    is reduced, so a bucket is a complete group. So it is if it is compressed, unless it is reduced
    over shards before.

    At ZeRO-1 and 2, DeepSpeed divides every group into equal parts, one for each shard. So a rank
    owns a row of each bucket, and one reduce-scatter sums a bucket for all its owners. If a bucket
    were a part of a group, it would be a part of one or a few rows, and each owner would need a
    message of its own.
    """
    shards, has_rows = run.grid.shard, run.zero_stage == 3
    # ZeRO-3 pads each parameter, the other stages each flat tensor.
    multiple, padded = (1, shards) if has_rows else (_ELEMENTS_ALIGNED * shards, 1)
    of_matrices = _reduction_of_matrices(run, device_type)
    of_vectors = _reduction_of_vectors(run, of_matrices)
    found = []
    for members in parameters.groups:
        first = members[0]
        sizes = [_padded(parameter.elements, padded) for parameter in members]
        together = [range(len(members))]
        if run.grid.dp_cp > 1 and (run.grid.is_hybrid or not first.is_compressed):
            # Until it is reduced, the head's gradient has another type than others.
            has_types = of_matrices.keeps == "partition"
            head = next((i for i, p in enumerate(members) if p.is_head), None)
            together = neighbours(sizes, _most_elements(run), alone=head if has_types else None)
        for one in together:
            own = sizes[one.start : one.stop]
            found.append(
                Bucket(
                    parameters=members[one.start : one.stop],
                    sizes=own,
                    elements=_padded(sum(own), multiple),
                    shards=shards,
                    layout="rows" if has_rows and shards > 1 else "flat",
                    reduction=of_vectors if len(first.shape) == 1 else of_matrices,
                    compression=run.compression if first.is_compressed else None,
                )
            )
    return found


def _reduction_of_matrices(run: Run, device_type: str) -> Reduction:
    config, grid, zero = run.config, run.grid, run.config.zero_optimization
    total, has_data, several = run.accumulation_dtype, run.grid.dp_cp > 1, run.grid.shard > 1
    sent = config.communication_data_type or total
    if config.parallel.gradient_compression == "bf16":
        sent = "bf16"
    overlaps = bool(zero.overlap_comm) and has_data
    keeps_complete = run.zero_stage < 2 or run.gradient_reduction == "per_step" or not several
    ends: End = "visit" if run.gradient_reduction == "per_visit" else "micro_batch"
    is_another = sent != total
    divides_first = sent == "fp16" and has_data
    all_reduces = run.zero_stage < 3 and zero.use_multi_rank_bucket_allreduce
    scatters = several and zero.reduce_scatter and not all_reduces
    has_rows = several and run.zero_stage == 3
    copies = has_rows or not keeps_complete or is_another or divides_first
    # gloo's reduce-scatter (torch 2.13) copies the bucket, and all-reduces the copy.
    scattering: Literal["all_to_all", "reduce_scatter"] = (
        "all_to_all" if device_type == "cpu" else "reduce_scatter"
    )
    collective = scattering if scatters else "all_reduce"
    return Reduction(
        keeps="complete" if keeps_complete else "partition",
        collected="step" if keeps_complete else ends,
        when=("step" if overlaps else "after") if keeps_complete else ends,
        computed=total if ends == "visit" and not keeps_complete else run.precision,
        total=total,
        sent=sent,
        axis="shard" if several else "replica",
        collective=collective if has_data else None,
        copies=has_data and copies,
        overlaps=overlaps,
        ranks=grid.dp_cp,
        divides="before" if divides_first else "after",
        replicas=("copied" if is_another else "in_place") if grid.is_hybrid else None,
    )


def _reduction_of_vectors(run: Run, of_matrices: Reduction) -> Reduction:
    """Norms and biases are small: their sum takes little memory, and saves many collectives."""
    groups = run.config.parallel.micro_batch_groups
    times = groups if of_matrices.when == "visit" else run.batch.gradient_accumulation_steps
    if of_matrices.keeps == "complete" or times == 1:
        return of_matrices
    return replace(of_matrices, keeps="packed", when="step")


def bucket_elements(run: Run) -> int:
    """Return the most elements of gradients that are sent together."""
    elements = run.config.zero_optimization.reduce_bucket_size
    assert elements is not None, "a resolved run states it"
    return elements


def _most_elements(run: Run) -> int:
    """At ZeRO-3 DeepSpeed would split a bucket of which a rank owns more than sub_group_size."""
    most = bucket_elements(run)
    if run.zero_stage < 3:
        return most
    return min(most, run.grid.shard * run.config.zero_optimization.sub_group_size)


def _padded(elements: int, multiple: int) -> int:
    return -(-elements // multiple) * multiple


def neighbours(sizes: Sequence[int], most: int, alone: int | None = None) -> list[range]:
    """Return ranges of neighbours with at most ``most`` elements, or of one, from last to first.

    The neighbour with index ``alone`` has a range of its own.
    """
    before, end, ranges = [*accumulate(sizes, initial=0)], len(sizes), []
    while end:
        last = bisect_left(before, before[end]) - 1  # neighbour that has elements
        start = max(0, min(last, bisect_left(before, before[end] - most)))
        if alone is not None and start <= alone < end:
            start = alone if end == alone + 1 else alone + 1
        ranges.append(range(start, end))
        end = start
    return ranges

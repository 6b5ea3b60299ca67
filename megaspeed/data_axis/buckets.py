"""Buckets of gradients: which parameters are reduced together, when, how, and over which ranks.

    gradients --add--> kept by this rank --reduce over shards--> partition of the rank that owns it
    partition --all-reduce over replicas, once a step--> mean

A bucket is a parameter group of DeepSpeed's optimizer, so it is also a flat tensor of master
weights, which ZeRO partitions:

    ZeRO 0         [ a | b | c | padding ]    one shard: every rank owns everything
    ZeRO 1, 2      [ a | b | c | padding ]    shard r owns the r-th of equal parts
    ZeRO 3         [ a_r | b_r | c_r ]        shard r owns the r-th of equal parts of a, b, c

Between micro-batches, a rank keeps

    ZeRO   gradient_reduction   matrices    reduced by                norms and biases
    0, 1   per_step             complete    ``ReduceGradients``       complete, by the same
    2, 3   per_step             complete    ``ReduceGradients``       complete, by the same
    2, 3   per_visit            partition   last backward of visits   packed, by the last backward
    2, 3   per_micro_batch      partition   each backward             packed, by the last backward

With one shard, all keep complete gradients. With ``overlap_comm``, the last backward of the step
reduces complete gradients while it computes. Packed gradients are added up in the layout of the
message. This sum is small, and saves many collectives; if a step reduces only once, there is none.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from megaspeed.config.resolve import BYTES_OF, Precision, Run
from megaspeed.config.run import Compression
from megaspeed.data_axis.parameters import LocalParameter, LocalParameters
from megaspeed.pipeline.schedules import ENDS, End, Pipeline, passes_of
from megaspeed.tensor_parallel.shards import OptimizerGroup
from megaspeed.topology.grid import Axis, Copies

_ADD_PRODUCTS = ("cuda",)
"""Devices on which products add gradients to their sums. On a CPU this would save nothing, and its
Python code takes longer than a hook."""

_ELEMENTS_ALIGNED = 2  # DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py:369: 4 bytes in bf16


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """How the gradients of a bucket are added up over micro-batches, and over the data axis."""

    keeps: Literal["complete", "packed", "partition"]
    """What a rank keeps between micro-batches: its complete gradients, their sum in the layout of
    the message, or its partition."""
    added_by: Literal["autograd", "hook", "product"]
    """What adds a gradient to what is kept. Autograd can, if both have one type and the sum is
    ``parameter.grad``. A product adds the gradients of ``is_product`` in the type of their sum; a
    hook adds the others."""
    collected: End  # backwards that end this take the gradients of a bucket, to pack or send them
    when: End | Literal["after"]  # backwards that end this reduce; after: ``ReduceGradients`` does
    overlaps: bool  # whether the backward continues meanwhile
    computed: Precision  # of a parameter's gradient until it is collected; the head's has ``total``
    total: Precision  # of what is kept, and of the partition, unless this is on the host
    sent: Precision  # of the message
    copies: bool  # whether the result is added to the partition; if not, it is reduced in place
    axis: Axis  # over which they are reduced: the shards or, if there is one shard, the replicas
    collective: Literal["all_reduce", "reduce_scatter", "all_to_all"] | None  # None: one copy
    replica_axis: Axis | None  # over which the shards' partitions are then summed, if at all
    copies_sums: bool  # whether partitions are copied for that sum
    holders: int  # ranks that hold the parameters, over which their gradients are summed
    ranks: int  # data ranks, over which the mean is taken
    divides: Literal["before", "after"] | None  # before a sum that could be too large for fp16

    @property
    def is_one_at_a_time(self) -> bool:
        """Whether a bucket must be received before the next one is sent: it needs memory for a
        copy, or replicas sum it next.
        """
        return self.copies or self.collective == "all_to_all" or self.replica_axis is not None

    def collects(self, end: End) -> bool:
        """Whether a backward collects gradients, if ``end`` ends with it."""
        return self.when != "after" and ENDS.index(end) >= ENDS.index(self.collected)

    def times(self, pipeline: Pipeline) -> int:
        """How many times a step reduces gradients that backwards compute."""
        return {"micro_batch": pipeline.micro_batches, "visit": pipeline.groups}.get(self.when, 1)


class OwnedRange(NamedTuple):
    """The place of a part of a parameter in the partition of a rank."""

    parameter: LocalParameter
    start: int  # first element of the part in the flat local tensor of the parameter
    offset: int  # first element of the part in the partition
    length: int  # elements without padding; may be 0 at ZeRO-3


@dataclass(frozen=True, kw_only=True, eq=False)  # keys of dictionaries: lists have no hash
class Bucket:
    """Parameters whose gradients are reduced together."""

    parameters: Sequence[LocalParameter]  # of one optimizer group and one chunk
    sizes: Sequence[int]  # elements of each; in rows, padded to equal parts
    elements: int  # of all, with padding
    shards: int  # ranks that own a part
    layout: Literal["flat", "rows"]  # rows: for each shard, its parts of all parameters
    reduction: Reduction
    compression: Compression | None
    """How gradients are compressed before they are sent. If there are shards and replicas, the sum
    over the shards is compressed."""

    @property
    def group(self) -> OptimizerGroup:
        return self.parameters[0].group

    @property
    def chunk(self) -> int:
        return self.parameters[0].chunk

    @property
    def is_expert(self) -> bool:
        return self.parameters[0].is_expert

    @property
    def part(self) -> int:
        """Elements that each shard owns, with padding."""
        return self.elements // self.shards

    @property
    def sent_bytes(self) -> int:
        """Bytes of the message that reduces it."""
        return self.elements * BYTES_OF[self.reduction.sent]

    @property
    def part_bytes(self) -> int:
        """Bytes of the message that sums a part over the replicas."""
        return self.part * BYTES_OF[self.reduction.sent]

    @property
    def starts(self) -> list[int]:
        """Where each parameter begins in the complete gradient."""
        return [*accumulate(self.sizes[:-1], initial=0)]

    @property
    def has_own_partition(self) -> bool:
        """Whether the partition is a tensor of its own, not a part of the complete gradient."""
        is_a_part = self.reduction.keeps == "complete" and self.layout == "flat"
        return not is_a_part or self.compression is not None

    @property
    def is_sent_compressed(self) -> bool:
        """Whether its gradients are compressed instead of being reduced as they are."""
        return self.compression is not None and self.reduction.replica_axis is None

    @property
    def is_from_loss(self) -> bool:
        """Whether only the forward of the loss computes its gradients: the head's weight alone."""
        return not any(parameter.in_backward for parameter in self.parameters)

    @property
    def message_bytes(self) -> int:
        """Bytes of memory that its reduction needs: copies, and what gloo's ranks exchange."""
        how, only = self.reduction, self.parameters[0]
        if self.is_sent_compressed:
            return 0
        is_alone = len(self.parameters) == 1 and only.elements == self.elements
        has_layout = how.keeps == "packed" or (how.keeps == "partition" and is_alone)
        has_type = how.sent == (
            how.computed if how.keeps == "partition" and not only.is_head else how.total
        )
        copied = self.elements if how.copies and not (has_layout and has_type) else 0
        copied += self.elements if how.collective == "all_to_all" else 0
        copied += self.part if how.copies_sums and how.overlaps else 0
        return copied * BYTES_OF[how.sent]

    def times(self, pipeline: Pipeline) -> int:
        """How many times a step reduces it. If only forwards of the loss compute its gradient, a
        backward reduces it only if a forward came directly before.
        """
        times = self.reduction.times(pipeline)
        if times == 1 or not self.is_from_loss:
            return times
        own = (name for name, c in passes_of(pipeline, pipeline.stages - 1) if c == self.chunk)
        return min(times, sum(turn == ("forward", "backward") for turn in pairwise(own)))

    def owned(self, shard: int) -> Iterator[OwnedRange]:
        """Yield the parts that a shard owns, in the order of its partition."""
        offset, begin, end = 0, shard * self.part, (shard + 1) * self.part
        for parameter, size, at in zip(self.parameters, self.sizes, self.starts, strict=True):
            if self.layout == "rows":
                part = size // self.shards
                start = shard * part
                length = max(0, min(part, parameter.elements - start))
                yield OwnedRange(parameter, start, offset, length)
                offset += part
            elif (first := max(at, begin)) < (last := min(at + size, end)):
                yield OwnedRange(parameter, first - at, first - begin, last - first)

    def compressed_by(self, shard: int) -> Iterator[OwnedRange]:
        """Yield the parts of what a shard compresses: all gradients, or what it owns of them."""
        if not self.is_sent_compressed:
            yield from self.owned(shard)
            return
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            yield OwnedRange(parameter, 0, start, parameter.elements)


def buckets_of(
    run: Run,
    parameters: LocalParameters,
    matrix_reduction: Reduction,
    expert_reduction: Reduction,
) -> list[Bucket]:
    """Return the buckets of a rank's parameters, in the order of DeepSpeed's parameter groups.

    A bucket has one parameter, or at most ``reduce_bucket_size`` elements. It may be a complete
    group if there is one data rank, or if its gradients are compressed and not first reduced over
    shards. At ZeRO-3 a rank owns at most ``sub_group_size`` of several parameters, because
    DeepSpeed would split a larger group.

    At ZeRO-1 and 2, DeepSpeed divides every group into equal parts, one for each shard. So a rank
    owns an equal part of each bucket, and one reduce-scatter sums the bucket for all owners. If a
    bucket were a slice of a group, it would belong to one or a few owners, and each would need its
    own message.
    """
    has_rows = run.zero_stage == 3
    vector_reduction = _reduction_of_vectors(run, matrix_reduction)
    found = []
    for members, elements in parameters.groups:
        first = members[0]
        copies = run.grid.copies_of(experts=first.is_expert)
        shards = copies.shard
        # ZeRO-3 pads each parameter, the other stages each flat tensor.
        padded, multiple = (shards, 1) if has_rows else (1, _ELEMENTS_ALIGNED * shards)
        reduction = vector_reduction if len(first.shape) == 1 else matrix_reduction
        reduction = expert_reduction if first.is_expert else reduction
        sizes = elements if padded == 1 else [_ceil(each, padded) for each in elements]
        most, head = sum(sizes), None
        if copies.ranks > 1 and (copies.is_hybrid or not first.is_compressed):
            most = bucket_elements(run)
            # Until it is reduced, the head's gradient may have another type than the others.
            is_apart = matrix_reduction.keeps == "partition"
            head = next((i for i, each in enumerate(members) if each.is_head and is_apart), None)
        found += [
            Bucket(
                parameters=members[one.start : one.stop],
                sizes=sizes[one.start : one.stop],
                elements=_ceil(sum(sizes[one.start : one.stop]), multiple),
                shards=shards,
                layout="rows" if has_rows and shards > 1 else "flat",
                reduction=reduction,
                compression=run.compression if first.is_compressed else None,
            )
            for one in within_a_bucket(run, sizes, most, shards, alone=head)
        ]
    return found


def reduction_of_matrices(run: Run, device_type: str, copies: Copies) -> Reduction:
    """Return how the gradients of matrices are reduced, on "cuda" or "cpu".

    ``copies`` are the ranks that hold the matrices. The sum of gradients is divided by the number
    of data ranks, because each rank multiplies its loss by it (``backward_scale``). This is so for
    experts too, which may have another number of copies.
    """
    zero, total, has_data = run.config.zero_optimization, run.accumulation_dtype, copies.ranks > 1
    is_stage3, has_shards = run.zero_stage == 3, copies.shard > 1
    # Not in the model's type, as by DeepSpeed's default: that rounds each rank's sum to 16 bits.
    sent = run.config.communication_data_type or total
    if run.config.parallel.gradient_compression == "bf16":
        sent = "bf16"
    is_another, divides_first = sent != total, sent == "fp16" and has_data
    overlaps = bool(zero.overlap_comm) and has_data
    is_kept = run.zero_stage < 2 or run.gradient_reduction == "per_step" or not has_shards
    end: End = "visit" if run.gradient_reduction == "per_visit" else "micro_batch"
    added_by: Literal["autograd", "hook", "product"] = "hook"
    is_summed = is_kept or end == "visit"
    if run.precision != total and is_summed and multiplies_once(run):
        added_by = "product" if device_type in _ADD_PRODUCTS else "hook"
    # ZeRO-3's parameters have no shape between passes, and ``grad`` must have that shape.
    elif is_kept and run.precision == total and not is_stage3:
        added_by = "autograd"
    is_copied = (is_stage3 and has_shards) or not is_kept or is_another or divides_first
    collective: Literal["all_reduce", "reduce_scatter", "all_to_all"] = "all_reduce"
    all_reduces = not is_stage3 and zero.use_multi_rank_bucket_allreduce
    if has_shards and zero.reduce_scatter and not all_reduces:
        # gloo's reduce-scatter (torch 2.13) copies the bucket, and all-reduces the copy, which
        # sends twice as many bytes.
        collective = "all_to_all" if device_type == "cpu" else "reduce_scatter"
    return Reduction(
        keeps="complete" if is_kept else "partition",
        added_by=added_by,
        collected="step" if is_kept else end,
        when=("step" if overlaps else "after") if is_kept else end,
        overlaps=overlaps,
        # The gradients of a visit are added up before they are reduced, in the type of the sum.
        computed=total if end == "visit" and not is_kept else run.precision,
        total=total,
        sent=sent,
        copies=has_data and is_copied,
        axis=copies.axis,
        collective=collective if has_data else None,
        replica_axis=copies.replica_axis if copies.is_hybrid else None,
        copies_sums=copies.is_hybrid and is_another,
        holders=copies.ranks,
        ranks=run.grid.dp_cp,
        divides=("before" if divides_first else "after") if run.grid.dp_cp > 1 else None,
    )


def multiplies_once(run: Run) -> bool:
    """Whether a backward computes the gradient of a matrix in one product. If the MLP is computed
    for some tokens at a time, there are several, and the first one does not complete it.
    """
    return run.config.parallel.activation_checkpointing != "full_offloaded"


def _reduction_of_vectors(run: Run, matrix_reduction: Reduction) -> Reduction:
    groups = run.config.parallel.micro_batch_groups
    times = groups if matrix_reduction.when == "visit" else run.batch.gradient_accumulation_steps
    if matrix_reduction.keeps == "complete" or times == 1:
        return matrix_reduction
    return replace(matrix_reduction, keeps="packed", when="step")


def bucket_elements(run: Run) -> int:
    """Return ``reduce_bucket_size``: the most elements of a bucket of several parameters."""
    elements = run.config.zero_optimization.reduce_bucket_size
    assert elements is not None, "a resolved run states it"
    return elements


def within_a_bucket(
    run: Run, sizes: Sequence[int], most: int, shards: int, alone: int | None = None
) -> list[range]:
    """Return the ``neighbours`` that are reduced together, with at most ``most`` elements."""
    if run.zero_stage == 3:
        most = min(most, shards * run.config.zero_optimization.sub_group_size)
    return neighbours(sizes, most, alone)


def _ceil(elements: int, multiple: int) -> int:
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

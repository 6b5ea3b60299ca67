"""Reduces buckets of gradients over the data axis, as the plan states for each of them.

    gradients of a bucket --pack--> one tensor --reduce over the shards--> this rank's part
        --add--> partition --all-reduce over the replicas, once a step--> partition

With one shard, the replicas reduce the gradients of a bucket, and this rank's part is all of them.
Each bucket is one collective, in place. Over gloo, the ranks exchange parts, and each rank adds up
what it has received.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed import comm
from torch import Tensor, nn

from megaspeed.data_axis.buckets import Bucket, OwnedRange
from megaspeed.model.gpt import DTYPES
from megaspeed.topology.context import ParallelContext
from megaspeed.zero.model_states import Fragment


@dataclass(frozen=True, kw_only=True, eq=False)  # keys of a dictionary: == of tensors is no bool
class CompressedGradients:
    """What a compressor reads: the gradients of a bucket, or their sum over the shards."""

    plan: Bucket
    values: Tensor  # what the step does not send is left in it
    partition: Tensor  # to which the mean is written
    ranges: Sequence[OwnedRange]  # the place of each parameter in ``values``
    feedback: Tensor | None = None  # what was not sent, without loss scale; None: it is discarded


@dataclass(kw_only=True, eq=False)
class GradientBucket:
    """A bucket of the plan with this rank's tensors."""

    plan: Bucket
    parameters: Sequence[nn.Parameter]
    own_part: int  # the index of the part that this rank owns
    kept: Tensor | None  # the sum of this rank's gradients; None if only the partition is kept
    partition: Tensor  # the part of the mean that this rank owns
    compressed: CompressedGradients | None = None
    gradients: dict[nn.Parameter, Tensor] = field(default_factory=dict)  # not collected yet
    missing: set[nn.Parameter] = field(default_factory=set)  # not computed yet in this backward
    is_collected: bool = False  # whether this backward collects the gradients
    is_compressed: bool = False  # whether a compressor reduces it in this step
    is_filled: bool = False  # whether the reduction adds to ``sum``; otherwise it overwrites
    is_replicated: bool = False  # whether the replicas have started to sum it in this step

    @property
    def sum(self) -> Tensor:
        """What the reduction adds to: the partition, or the sum that replicas compress."""
        if self.compressed is None or self.plan.is_sent_compressed:
            return self.partition
        return self.compressed.values

    def fragments(self) -> Iterator[Fragment]:
        """What the partition has of each parameter."""
        return fragments_of(self.partition, self.plan.owned(self.own_part))


def fragments_of(flat: Tensor, ranges: Iterable[OwnedRange]) -> Iterator[Fragment]:
    """Yield views of the parts of parameters in a flat tensor."""
    for own in ranges:
        yield Fragment(own.parameter.name, own.start, flat.narrow(0, own.offset, own.length))


@dataclass(frozen=True)
class _PendingSum:
    """A bucket, or its partition, that is being summed."""

    bucket: GradientBucket
    work: Any  # None if nothing is sent
    sent: Tensor  # must not be freed before the work has ended
    received: Tensor  # this rank's part of the sum, a view of ``sent``
    parts: Tensor | None = None  # over gloo: this rank's part of every rank's gradients, in rows
    is_last: bool = False  # whether the replicas sum the partition next


def shape_of(parameter: Any) -> torch.Size:
    """The shape of a parameter, which ZeRO-3 may have partitioned."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


class Reducer:
    """Sends buckets, and adds what it receives to this rank's partition.

    Args:
        context: this rank's groups.
        is_offloaded: whether partitions are in host memory.
    """

    def __init__(self, context: ParallelContext, *, is_offloaded: bool) -> None:
        self._context, self._is_offloaded = context, is_offloaded
        self._in_flight: list[_PendingSum] = []
        self._between_replicas: list[_PendingSum] = []

    def send(self, bucket: GradientBucket, *, last: bool) -> None:
        """Start to reduce a bucket. Without overlap, ``send`` waits for it if it needs a copy.

        Args:
            bucket: with gradients.
            last: whether the replicas sum its partition as soon as it is reduced, because the step
                has no more gradients of it. Otherwise ``receive`` does that.
        """
        how = bucket.plan.reduction
        if how.replica_axis is None and bucket.is_compressed:
            return
        if how.collective is None and not self._is_offloaded:
            return  # with one rank, the partition is the complete gradient
        # Wait first, so only one bucket at a time needs memory for a copy or for exchanged parts. A
        # bucket that is received can be summed over the replicas while the next one is reduced.
        if how.is_one_at_a_time:
            self._receive_parts()
        packed = self._packed(bucket)
        if how.divides == "before":
            packed = packed / how.ranks
        self._in_flight.append(self._start(bucket, packed, last))
        del packed  # only the message holds a copy, so it is freed as soon as it is added
        if how.is_one_at_a_time and not how.overlaps:
            self._receive_parts()

    def receive(self, buckets: Sequence[GradientBucket]) -> None:
        """Wait for all messages. Afterwards what is not compressed is reduced over all ranks."""
        self._receive_parts()
        for bucket in buckets:
            if not bucket.is_replicated:
                self._sum_replicas(bucket)
            bucket.is_replicated = False
        self._receive_replicas()

    def _receive_parts(self) -> None:
        """Wait for the buckets that are being reduced, and add what this rank owns."""
        while self._in_flight:
            message = self._in_flight.pop(0)
            bucket, is_last = message.bucket, message.is_last
            if message.work is not None:
                message.work.wait()
            if message.parts is not None:
                torch.sum(message.parts, 0, out=message.received)
            copies = bucket.plan.reduction.copies or bucket.compressed is not None
            if copies or self._is_offloaded:
                self._add(message)
            del message  # frees a copy
            if is_last:
                self._sum_replicas(bucket)

    def _sum_replicas(self, bucket: GradientBucket) -> None:
        """Start to sum this rank's partition over the replicas."""
        how, bucket.is_replicated = bucket.plan.reduction, True
        if how.replica_axis is None or bucket.is_compressed:
            return
        if how.copies_sums:
            self._receive_replicas()  # so only one copy at a time is in memory
        part = bucket.sum[: bucket.partition.numel()]
        sent = part.to(self._context.device, DTYPES[how.sent], non_blocking=True)
        group = self._context.group_along(how.replica_axis)
        work = comm.all_reduce(sent, group=group, async_op=True)
        self._between_replicas.append(_PendingSum(bucket, work, sent, sent))
        if how.copies_sums and not how.overlaps:
            self._receive_replicas()

    def _receive_replicas(self) -> None:
        for message in self._between_replicas:
            bucket, received = message.bucket, message.received
            how, is_another = bucket.plan.reduction, bucket.sum is not bucket.partition
            message.work.wait()
            if self._is_offloaded and is_another and how.divides == "after":
                received = received / how.ranks  # not on the host, which would wait for the copy
            if is_another or how.copies_sums or self._is_offloaded:
                bucket.partition.copy_(received, non_blocking=True)
        self._between_replicas.clear()

    def pack(self, bucket: GradientBucket, dtype: torch.dtype) -> Tensor:
        """Remove the gradients that are not collected yet from the bucket, and return them as one
        flat tensor, with the layout of the bucket.
        """
        plan = bucket.plan
        gradients = [bucket.gradients.pop(parameter) for parameter in bucket.parameters]
        if len(gradients) == 1 and gradients[0].numel() == plan.elements:
            return gradients[0].to(dtype).reshape(-1)
        packed = torch.empty(plan.elements, dtype=dtype, device=self._context.device)
        flat = [gradient.reshape(-1) for gradient in gradients]
        if plan.layout == "rows":
            # One kernel divides, pads and joins all gradients. (torch's FSDP2 uses it, too.)
            torch._chunk_cat(flat, 0, plan.shards, out=packed.view(plan.shards, -1))
            return packed
        elements = sum(gradient.numel() for gradient in flat)
        torch.cat(flat, out=packed[:elements])
        if elements < packed.numel():
            packed[elements:].zero_()
        return packed

    def _packed(self, bucket: GradientBucket) -> Tensor:
        """The bucket's gradients as one flat tensor, with the layout of the bucket."""
        plan, dtype = bucket.plan, DTYPES[bucket.plan.reduction.sent]
        if bucket.kept is None:
            return self.pack(bucket, dtype)
        if plan.layout == "flat" or plan.reduction.keeps == "packed":
            return bucket.kept[: plan.elements].to(dtype)  # without the padding of compression
        packed = torch.empty(plan.elements, dtype=dtype, device=self._context.device)
        parts = bucket.kept.split(list(plan.sizes))
        rows = packed.view(plan.shards, -1)
        torch.cat([part.view(plan.shards, -1) for part in parts], dim=1, out=rows)
        return packed

    def _start(self, bucket: GradientBucket, packed: Tensor, is_last: bool) -> _PendingSum:
        """Start to sum a bucket, in place: all of it, or this rank's row."""
        how, rows = bucket.plan.reduction, packed.view(bucket.plan.shards, -1)
        group = self._context.group_along(how.axis)
        received, work, parts = rows[bucket.own_part], None, None
        if how.collective == "all_to_all":
            parts = torch.empty_like(rows)
            work = comm.all_to_all_single(parts, rows, group=group, async_op=True)
        elif how.collective == "reduce_scatter":
            work = comm.reduce_scatter_fn(received, packed, group=group, async_op=True)
        elif how.collective == "all_reduce":
            work = comm.all_reduce(packed, group=group, async_op=True)
        return _PendingSum(bucket, work, packed, received, parts, is_last)

    def _add(self, message: _PendingSum) -> None:
        bucket, received = message.bucket, message.received
        how, is_on_host = bucket.plan.reduction, bucket.sum.device != received.device
        if how.divides == "after" and self._is_offloaded and bucket.sum is bucket.partition:
            received = received / how.ranks  # not on the host, which would wait for the copy
        partition = bucket.sum[: received.numel()]  # without the padding of compression
        if bucket.is_filled and is_on_host:
            # The device adds, so the host does not wait for it.
            before = partition.to(received.device, non_blocking=True)
            partition.copy_(received.to(partition.dtype) + before, non_blocking=True)
        elif bucket.is_filled:
            partition.add_(received)
        else:
            partition.copy_(received, non_blocking=True)
        bucket.is_filled = True

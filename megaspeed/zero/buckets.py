"""Reduces buckets of gradients over the data axis: over the shards, then over the replicas.

    gradients of a bucket --pack--> one tensor --reduce over the shards--> this rank's part
        --add--> partition --all-reduce over the replicas, once a step--> partition

With one shard, the replicas reduce the gradients of a bucket, and this rank's part is all of them.

    ZeRO 0         flat                        one shard: every rank owns everything
    ZeRO 1, 2      flat, with padding          a reduce-scatter: rank r of the shards owns part r
    ZeRO 3         (shards, elements / shards) a reduce-scatter: row r is the part of rank r

A bucket is a parameter group of the optimizer (``build``): consecutive parameters with at most
``reduce_bucket_size`` elements, or one larger parameter.

Each bucket is one collective, in place. gloo's reduce-scatter (torch 2.13) copies the bucket and
all-reduces the copy, which sends twice as many bytes. So over gloo, the ranks exchange parts, and
each rank adds up what it has received.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import comm
from torch import Tensor, nn

from megaspeed.config.resolve import Run
from megaspeed.model.gpt import DTYPES
from megaspeed.topology.context import ParallelContext
from megaspeed.zero.model_states import HeldRange


@dataclass(kw_only=True, eq=False)
class Bucket:
    """The gradients of a parameter group of the optimizer, which are reduced together.

    They are one flat tensor with the layout of DeepSpeed's master weights:

        ZeRO 0         [ a | b | c | padding ]    every rank owns everything
        ZeRO 1, 2      [ a | b | c | padding ]    shard r owns the r-th of equal parts
        ZeRO 3         [ a_r | b_r | c_r ]        shard r owns the r-th of equal parts of a, b, c
    """

    parameters: Sequence[Any]  # in the order of the flat tensor; with DeepSpeed's attributes
    sizes: Sequence[int]  # elements of each parameter; at ZeRO-3 with padding
    complete: Tensor | None  # the sum of this rank's gradients; None if only the partition is kept
    partition: Tensor  # the part that this rank owns
    # To which the reduction adds: the partition, or ``compressed`` if replicas have several shards.
    sum: Tensor
    total: Tensor | None = None  # packed sum over the micro-batches; None if each one is reduced
    # ``complete`` or ``sum``, if it is compressed. Then ``partition`` shares no memory with it.
    compressed: Tensor | None = None
    ranges: Sequence[HeldRange] = ()  # the place of each parameter in ``compressed``
    # What was not sent, without loss scale, with the layout of ``compressed``.
    feedback: Tensor | None = None
    gradients: dict[nn.Parameter, Tensor] = field(default_factory=dict)  # not reduced yet
    missing: set[nn.Parameter] = field(default_factory=set)  # not computed yet in this backward
    is_filled: bool = False  # whether ``sum`` contains gradients of this step
    is_replicated: bool = False  # whether the replicas have started to sum it in this step

    @property
    def starts(self) -> list[int]:
        """Where each parameter begins in the complete gradient."""
        return [end - size for end, size in zip(accumulate(self.sizes), self.sizes, strict=True)]


@dataclass(frozen=True)
class _Message:
    """A bucket that is being reduced."""

    bucket: Bucket
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

    The mean over the data ranks: either gradients are divided by dp before they are summed, because
    a sum of fp16 numbers could be too large for fp16, or the sum is divided by dp.

    Args:
        run: the resolved run.
        context: this rank's groups.
    """

    def __init__(self, run: Run, context: ParallelContext) -> None:
        self._run = run
        self._has_rows = run.zero_stage == 3 and run.grid.shard > 1
        self._is_offloaded = run.config.zero_optimization.offloads_optimizer
        self._sent_dtype = DTYPES[run.reduction_dtype]
        self._device = context.device
        self._group, self._shards = context.data_group, run.grid.shard
        self._replica_group = context.replica_group if run.grid.is_hybrid else None
        self._dp = context.grid.dp_cp
        self._exchanges = run.scatters_reductions and dist.get_backend(self._group) == "gloo"
        # So only one bucket at a time needs memory for a copy, or for what is exchanged. A bucket
        # that is received can be summed over the replicas while the next one is reduced.
        self._is_one_at_a_time = run.copies_gradients or self._exchanges or run.grid.is_hybrid
        self.averages_later = run.grid.dp_cp > 1 and not run.divides_gradients_first
        """Whether ``receive`` leaves a sum that is not yet divided by dp."""
        self.own_part = context.shard_rank
        """The index of the part of each flat gradient that this rank owns."""
        self.compresses = False
        """Whether another object (``compression``) reduces the compressed buckets of this step."""
        self._in_flight: list[_Message] = []
        self._between_replicas: list[_Message] = []

    def is_compressed_now(self, bucket: Bucket) -> bool:
        """Whether another object reduces this bucket in this step."""
        return self.compresses and bucket.compressed is not None

    def send(self, bucket: Bucket, *, last: bool) -> None:
        """Start to reduce a bucket. Without overlap, a copy is received before ``send`` returns.

        Args:
            bucket: with gradients.
            last: whether the step has no more gradients of the bucket, so that the replicas can sum
                its partition as soon as it is reduced.
        """
        if self._replica_group is None and self.is_compressed_now(bucket):
            return
        if self._dp == 1 and not self._is_offloaded:
            return  # with one rank, the partition is the complete gradient
        if self._is_one_at_a_time:
            self._receive_parts()
        packed = self._packed(bucket)
        if self._run.divides_gradients_first:
            packed = packed / self._dp
        self._in_flight.append(self._start(bucket, packed, last))
        del packed
        if self._is_one_at_a_time and not self._run.overlaps_reductions:
            self._receive_parts()

    def receive(self, buckets: Sequence[Bucket]) -> None:
        """Wait for all messages. Afterwards the partitions are sums over all data ranks."""
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
            if self._run.copies_gradients or bucket.compressed is not None or self._is_offloaded:
                self._add(message)
            del message  # frees a copy
            if is_last:
                self._sum_replicas(bucket)

    def _sum_replicas(self, bucket: Bucket) -> None:
        """Start to sum this rank's partition over the replicas."""
        bucket.is_replicated = True
        if self._replica_group is None or self.is_compressed_now(bucket):
            return
        if self._run.copies_partitions:
            self._receive_replicas()
        part = bucket.sum[: bucket.partition.numel()]
        sent = part.to(self._device, self._sent_dtype, non_blocking=True)
        work = comm.all_reduce(sent, group=self._replica_group, async_op=True)
        self._between_replicas.append(_Message(bucket, work, sent, sent))
        if self._run.copies_partitions and not self._run.overlaps_reductions:
            self._receive_replicas()

    def _receive_replicas(self) -> None:
        for message in self._between_replicas:
            bucket, received = message.bucket, message.received
            message.work.wait()
            is_another = bucket.sum is not bucket.partition
            if self._is_offloaded and is_another and self.averages_later:
                received = received / self._dp  # not on the host, which would wait for the copy
            if is_another or self._run.copies_partitions or self._is_offloaded:
                bucket.partition.copy_(received, non_blocking=True)
        self._between_replicas.clear()

    def shape_of(self, bucket: Bucket) -> tuple[int, ...]:
        """Return the shape of packed gradients: flat, or at ZeRO-3 a row for each shard."""
        part = bucket.partition.numel()
        return (self._shards, part) if self._has_rows else (self._shards * part,)

    def pack(self, bucket: Bucket, dtype: torch.dtype) -> Tensor:
        """Remove the gradients of one micro-batch from the bucket, and return them in its shape."""
        shape = self.shape_of(bucket)
        gradients = [bucket.gradients.pop(parameter) for parameter in bucket.parameters]
        if len(gradients) == 1 and gradients[0].numel() == math.prod(shape):
            return gradients[0].to(dtype).reshape(shape)
        packed = torch.empty(shape, dtype=dtype, device=self._device)
        flat = [gradient.reshape(-1) for gradient in gradients]
        if self._has_rows:
            torch._chunk_cat(flat, 0, self._shards, out=packed)
            return packed
        elements = sum(gradient.numel() for gradient in flat)
        torch.cat(flat, out=packed[:elements])
        if elements < packed.numel():
            packed[elements:].zero_()
        return packed

    def _packed(self, bucket: Bucket) -> Tensor:
        """The bucket's gradients: flat, or at ZeRO-3 one row for each shard."""
        complete = bucket.complete
        if complete is not None and not self._has_rows:
            return complete[: math.prod(self.shape_of(bucket))].to(self._sent_dtype)
        if bucket.total is not None:
            return bucket.total.to(self._sent_dtype)
        if complete is None:
            return self.pack(bucket, self._sent_dtype)
        shape, dtype = self.shape_of(bucket), self._sent_dtype
        packed = torch.empty(shape, dtype=dtype, device=self._device)
        parts = complete.split(bucket.sizes)
        torch.cat([part.view(self._shards, -1) for part in parts], dim=1, out=packed)
        return packed

    def _start(self, bucket: Bucket, packed: Tensor, is_last: bool) -> _Message:
        """Start to sum a bucket, in place: all of it, or this rank's row."""
        rows = packed.view(self._shards, -1)
        received, work, parts = rows[self.own_part], None, None
        if self._exchanges:
            parts = torch.empty_like(rows)
            work = comm.all_to_all_single(parts, rows, group=self._group, async_op=True)
        elif self._run.scatters_reductions:
            sent = packed.view(-1)
            work = comm.reduce_scatter_fn(received, sent, group=self._group, async_op=True)
        elif self._dp > 1:
            work = comm.all_reduce(packed, group=self._group, async_op=True)
        return _Message(bucket, work, packed, received, parts, is_last)

    def _add(self, message: _Message) -> None:
        received = message.received
        is_on_host = self._is_offloaded and message.bucket.sum is message.bucket.partition
        if self.averages_later and is_on_host:
            received = received / self._dp  # not on the host, which would wait for the copy
        partition = message.bucket.sum[: received.numel()]  # without the padding of compression
        if message.bucket.is_filled and partition.device != received.device:
            # The device adds, so the host does not wait for it.
            before = partition.to(received.device, non_blocking=True)
            partition.copy_(received.to(partition.dtype) + before, non_blocking=True)
        elif message.bucket.is_filled:
            partition.add_(received)
        else:
            partition.copy_(received, non_blocking=True)
        message.bucket.is_filled = True

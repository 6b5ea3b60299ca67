"""Reduces buckets of gradients over the data axis.

    gradients of a bucket --pack--> one tensor --reduce--> this rank's part --add--> partition

    ZeRO 0         flat                     an all-reduce: every rank owns everything
    ZeRO 1, 2      flat, with padding       a reduce-scatter: rank r owns the r-th of dp equal parts
    ZeRO 3         (dp, elements / dp)      a reduce-scatter: row r is the part of rank r

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


@dataclass(kw_only=True, eq=False)
class Bucket:
    """The gradients of a parameter group of the optimizer, which are reduced together.

    They are one flat tensor with the layout of DeepSpeed's master weights:

        ZeRO 0         [ a | b | c | padding ]    every rank owns everything
        ZeRO 1, 2      [ a | b | c | padding ]    rank r owns the r-th of dp equal parts
        ZeRO 3         [ a_r | b_r | c_r ]        rank r owns the r-th of dp equal parts of a, b, c
    """

    parameters: Sequence[Any]  # in the order of the flat tensor; with DeepSpeed's attributes
    sizes: Sequence[int]  # elements of each parameter; at ZeRO-3 with padding
    complete: Tensor | None  # the sum of this rank's gradients; None if only the partition is kept
    partition: Tensor  # the part that this rank owns
    total: Tensor | None = None  # packed sum over the micro-batches; None if each one is reduced
    is_compressed: bool = False  # if so, ``partition`` shares no memory with ``complete``
    # What was not sent, without loss scale, with the layout of ``complete``. None without feedback.
    feedback: Tensor | None = None
    gradients: dict[nn.Parameter, Tensor] = field(default_factory=dict)  # not reduced yet
    missing: set[nn.Parameter] = field(default_factory=set)  # not computed yet in this backward
    is_filled: bool = False  # whether the partition contains gradients of this step

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
    parts: Tensor | None  # over gloo: this rank's part of every rank's gradients, a row each
    received: Tensor  # this rank's part of the sum, a view of ``sent``


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
        self._is_stage3 = run.zero_stage == 3
        self._is_offloaded = run.config.zero_optimization.offloads_optimizer
        self._sent_dtype = DTYPES[run.reduction_dtype]
        self._device = context.device
        self._axis = context.dp_group
        self._dp = context.dp_size
        self._exchanges = run.scatters_reductions and dist.get_backend(self._axis) == "gloo"
        # So only one bucket at a time needs memory for a copy, or for what is exchanged.
        self._is_one_at_a_time = run.copies_gradients or self._exchanges
        self.averages_later = run.grid.dp > 1 and not run.divides_gradients_first
        """Whether ``receive`` leaves a sum that is not yet divided by dp."""
        self.own_part = context.dp_rank if run.owners > 1 else 0
        """The index of the part of each flat gradient that this rank owns."""
        self._in_flight: list[_Message] = []

    def send(self, bucket: Bucket) -> None:
        """Start to reduce a bucket. Without overlap, a copy is received before ``send`` returns."""
        if self._is_one_at_a_time:
            self.receive()
        packed = self._packed(bucket)
        if self._run.divides_gradients_first:
            packed = packed / self._dp
        self._in_flight.append(self._start(bucket, packed))
        if self._is_one_at_a_time and not self._run.overlaps_reductions:
            self.receive()

    def receive(self) -> None:
        """Wait for all messages, and add what this rank owns to its partition."""
        for message in self._in_flight:
            if message.work is not None:
                message.work.wait()
            if message.parts is not None:
                torch.sum(message.parts, 0, out=message.received)
            is_copied = self._run.copies_gradients or message.bucket.is_compressed
            if is_copied or self._is_offloaded:
                self._add(message)
        self._in_flight.clear()

    def shape_of(self, bucket: Bucket) -> tuple[int, ...]:
        """Return the shape of packed gradients: flat, or at ZeRO-3 a row for each rank."""
        part = bucket.partition.numel()
        return (self._dp, part) if self._is_stage3 else (self._run.owners * part,)

    def pack(self, bucket: Bucket, dtype: torch.dtype) -> Tensor:
        """Remove the gradients of one micro-batch from the bucket, and return them in its shape."""
        shape = self.shape_of(bucket)
        gradients = [bucket.gradients.pop(parameter) for parameter in bucket.parameters]
        if len(gradients) == 1 and gradients[0].numel() == math.prod(shape):
            return gradients[0].to(dtype).reshape(shape)
        packed = torch.empty(shape, dtype=dtype, device=self._device)
        flat = [gradient.reshape(-1) for gradient in gradients]
        if self._is_stage3:
            torch._chunk_cat(flat, 0, self._dp, out=packed)
            return packed
        elements = sum(gradient.numel() for gradient in flat)
        torch.cat(flat, out=packed[:elements])
        if elements < packed.numel():
            packed[elements:].zero_()
        return packed

    def _packed(self, bucket: Bucket) -> Tensor:
        """The bucket's gradients: flat, or at ZeRO-3 (dp, elements / dp), one row for each rank."""
        complete = bucket.complete
        if complete is not None and not self._is_stage3:
            return complete[: math.prod(self.shape_of(bucket))].to(self._sent_dtype)
        if bucket.total is not None:
            return bucket.total.to(self._sent_dtype)
        if complete is None:
            return self.pack(bucket, self._sent_dtype)
        shape, dtype = self.shape_of(bucket), self._sent_dtype
        packed = torch.empty(shape, dtype=dtype, device=self._device)
        parts = complete.split(bucket.sizes)
        torch.cat([part.view(self._dp, -1) for part in parts], dim=1, out=packed)
        return packed

    def _start(self, bucket: Bucket, packed: Tensor) -> _Message:
        """Start to sum a bucket over the data ranks, in place: all of it, or this rank's row."""
        rows = packed.view(self._run.owners, -1)
        received, work, parts = rows[self.own_part], None, None
        if self._dp > 1 and not self._run.scatters_reductions:
            work = comm.all_reduce(packed, group=self._axis, async_op=True)
        elif self._dp > 1 and self._exchanges:
            parts = torch.empty_like(rows)
            work = comm.all_to_all_single(parts, rows, group=self._axis, async_op=True)
        elif self._dp > 1:
            sent = packed.view(-1)
            work = comm.reduce_scatter_fn(received, sent, group=self._axis, async_op=True)
        return _Message(bucket, work, packed, parts, received)

    def _add(self, message: _Message) -> None:
        received = message.received
        if self.averages_later and self._is_offloaded:
            received = received / self._dp  # not on the host, which would wait for the copy
        partition = message.bucket.partition
        if message.bucket.is_filled and partition.device != received.device:
            # The device adds, so the host does not wait for it.
            before = partition.to(received.device, non_blocking=True)
            partition.copy_(received.to(partition.dtype) + before, non_blocking=True)
        elif message.bucket.is_filled:
            partition.add_(received)
        else:
            partition.copy_(received, non_blocking=True)
        message.bucket.is_filled = True

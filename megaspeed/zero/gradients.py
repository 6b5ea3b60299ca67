"""Accumulates the gradients of a step, and reduces them over the data axis.

    complete      autograd --add--> complete gradient      --reduce--> partition of this rank
    partitioned   autograd -------> gradients of a bucket  --reduce--> partition of this rank, added

The gradient of the head's weight comes from the forward of the loss instead (``sum_of``).

ZeRO-0 and 1 accumulate the complete gradient, and reduce it once a step. ZeRO-2 and 3 do the same
with ``gradient_reduction: per_step``. With ``per_micro_batch`` they keep only the partition: a
bucket is reduced as soon as a backward has computed its gradients. Only buckets of norms and biases
are summed over the micro-batches first, and reduced once a step: they are so small that a
collective for each micro-batch costs time, and the sum no memory to speak of.

A bucket is a list of consecutive parameters with at most ``reduce_bucket_size`` elements, or one
larger parameter. With ``overlap_comm`` it is reduced while the backward continues. A complete
gradient is reduced during the last backward of a step.

The gradient of an optimizer group is one flat tensor with the layout of DeepSpeed's master weights:

    ZeRO 0, 1, 2   [ a | b | c | padding ]    rank r owns the r-th of dp equal parts; ZeRO-0: all
    ZeRO 3         [ a_r | b_r | c_r ]        rank r owns the r-th of dp equal parts of a, b, c

This replaces the hooks and buckets of DeepSpeed 0.19.8. They run Python code for each parameter in
every backward and in the step, copy each gradient several times, and expect every forward to be
followed by its backward, which is not so in a pipeline.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup
from torch import Tensor, nn

from megaspeed.config.deepspeed_keys import ZeroConfig
from megaspeed.config.resolve import Run
from megaspeed.model.gpt import DTYPES
from megaspeed.topology.context import ParallelContext
from megaspeed.zero.model_states import (
    GradientFragment,
    HeldRange,
    held_ranges,
    master_partitions,
)


@dataclass(frozen=True, kw_only=True)
class _Group:
    """The flat gradient of a parameter group of the optimizer (ZeRO-3: of a sub-group)."""

    parameters: Sequence[Any]  # in the order of the flat tensor; with DeepSpeed's attributes
    starts: Sequence[int]  # where each parameter begins in the complete gradient
    ends: Sequence[int]
    complete: Tensor | None  # None if only the partition is kept
    own: Tensor  # this rank's partition


@dataclass
class _Bucket:
    """Consecutive parameters of a group, which are reduced together."""

    group: _Group
    parameters: Sequence[Any]
    start: int  # where the first parameter begins in the complete gradient
    end: int  # where the last parameter ends
    shape: tuple[int, ...]  # of packed gradients: flat; ZeRO-3: a row for each rank
    total: Tensor | None  # of the micro-batches, packed; None if each of them is reduced
    gradients: dict[nn.Parameter, Tensor] = field(default_factory=dict)  # not reduced yet
    missing: set[nn.Parameter] = field(default_factory=set)  # not computed yet in this backward
    is_due: bool = True  # whether it is reduced in this backward
    is_filled: bool = False  # whether the partition has gradients of this step


@dataclass(frozen=True)
class _Message:
    """A bucket that is being reduced."""

    bucket: _Bucket
    works: Sequence[Any]
    sent: Tensor  # must not be freed before the works have ended
    received: Tensor  # this rank's part of the sum
    start: int  # of ``received`` in this rank's partition


@dataclass(frozen=True, kw_only=True)
class _Rules:
    """How the gradients of a run are accumulated and sent."""

    parts: int  # of the flat gradient; each data rank owns one, at ZeRO-0 all own everything
    is_stage3: bool
    is_complete: bool  # whether a complete gradient is accumulated
    is_offloaded: bool  # whether the partition is in host memory
    dtype: torch.dtype
    sent_dtype: torch.dtype
    uses_all_reduce: bool
    overlaps: bool
    divides_first: bool  # a sum of fp16 numbers could be too large for fp16
    sends_copies: bool  # otherwise the complete gradient is sent as it is
    sums_vectors: bool  # whether gradients of norms and biases are summed over the micro-batches
    # whether autograd adds to ``grad`` in place. It does so in the dtype of the parameter.
    autograd_adds: bool

    @classmethod
    def of(cls, run: Run) -> "_Rules":
        """The rules of ``run``."""
        zero, dp = run.config.zero_optimization, run.grid.dp
        is_stage3, is_complete = run.zero_stage == 3, run.keeps_complete_gradients
        multi_rank = zero.use_multi_rank_bucket_allreduce and not is_stage3
        return cls(
            parts=1 if run.zero_stage == 0 else dp,
            is_stage3=is_stage3,
            is_complete=is_complete,
            is_offloaded=zero.offloads_optimizer,
            dtype=DTYPES[run.accumulation_dtype],
            sent_dtype=DTYPES[run.reduction_dtype],
            uses_all_reduce=run.zero_stage == 0 or multi_rank or not zero.reduce_scatter,
            overlaps=bool(zero.overlap_comm) and dp > 1,
            divides_first=run.reduction_dtype == "fp16" and dp > 1,
            sends_copies=run.copies_gradients,
            sums_vectors=not is_complete and run.batch.gradient_accumulation_steps > 1,
            autograd_adds=is_complete and run.precision == run.accumulation_dtype and not is_stage3,
        )


class Gradients:
    """This rank's gradients, from autograd to the optimizer.

    Args:
        optimizer: DeepSpeed's ZeRO optimizer, without hooks.
        run: the resolved run.
        context: this rank's groups.
        partial: the parameters of whose gradient each tensor rank computes a part, in groups of
            their own.
        without_autograd: the parameters whose gradient is added to ``sum_of`` alone.
    """

    def __init__(
        self,
        optimizer: Any,
        run: Run,
        context: ParallelContext,
        *,
        partial: Sequence[nn.Parameter] = (),
        without_autograd: Sequence[nn.Parameter] = (),
    ) -> None:
        self._rules = _Rules.of(run)
        self._optimizer = optimizer
        self._timeline = context.timeline
        self._device = context.device
        self._axis, self._tensor_axis = context.dp_group, context.tp_group
        self._axis_ranks = dist.get_process_group_ranks(context.dp_group)
        self._dp = context.dp_size
        self._averages_later = self._dp > 1 and not self._rules.divides_first
        self._own_part = context.dp_rank if self._rules.parts > 1 else 0
        self._groups = [
            self._make_group(index) for index in range(len(master_partitions(optimizer)))
        ]
        members = {id(parameter) for parameter in partial}
        self._partial = [group for group in self._groups if id(group.parameters[0]) in members]
        zero = run.config.zero_optimization
        self._buckets = [
            bucket for group in self._groups for bucket in self._make_buckets(group, zero)
        ]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._sums = dict(self._sums_of_parameters()) if self._rules.is_complete else {}
        if self._rules.overlaps or not self._rules.autograd_adds:
            for parameter in self._bucket_of:
                parameter.register_post_accumulate_grad_hook(self._take)
        self._without_autograd = frozenset(without_autograd)
        self._is_first = True
        self._sends_in_backward = False
        self._in_flight: list[_Message] = []
        fragments = [
            (held.group, GradientFragment(held.parameter, held.start, self._values_of(held)))
            for held in held_ranges(optimizer)
        ]
        self.fragments = tuple(fragment for _, fragment in fragments)
        """Views of this rank's reduced gradients, without padding."""
        self._partitions = [
            [group.own]
            if self._rules.is_stage3
            else GradPartitionBufferGroup([f.values for g, f in fragments if g == index], group.own)
            for index, group in enumerate(self._groups)
        ]

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that hold gradients between two micro-batches."""
        for group in self._groups:
            yield group.own
            if group.complete is not None:
                yield group.complete
        for bucket in self._buckets:
            if bucket.total is not None:
                yield bucket.total

    def begin_forward(self) -> None:
        """Called before each forward that a backward will follow."""
        if self._is_first:
            self._begin_step()

    def sum_of(self, parameter: nn.Parameter) -> Tensor:
        """Where a forward adds the gradient of ``parameter``, outside of autograd.

        Autograd computes another part of the gradient in the backward, or none if
        ``without_autograd`` contains the parameter.
        """
        if parameter in self._sums:
            return self._sums[parameter]
        gradients = self._bucket_of[parameter].gradients
        if parameter not in gradients:
            gradients[parameter] = self._zeros_like(parameter)
        return gradients[parameter]

    def begin_backward(self, *, last: bool) -> None:
        """Called before each backward. ``last``: whether it is the last one of the step."""
        self._sends_in_backward = not self._rules.is_complete or (self._rules.overlaps and last)
        if self._sends_in_backward:
            for bucket in self._buckets:
                bucket.missing = set(bucket.parameters) - self._without_autograd
                bucket.is_due = last or bucket.total is None
                if not bucket.missing:
                    self._send_in_backward(bucket)

    def missing(self) -> list[nn.Parameter]:
        """The parameters of which the last backward has computed no gradient.

        Their buckets have not been sent. Empty if everything is sent at the end of the step.
        """
        return [parameter for bucket in self._buckets for parameter in bucket.missing]

    def reduce(self) -> None:
        """Complete the reduction. Afterwards the partition is the average over the data axis.

        What each tensor rank has computed a part of is then summed over the tensor axis. So norms
        and biases need one collective a step, not one for each layer and micro-batch.
        """
        with self._timeline.part("data"):
            if (
                self._rules.is_complete
                and not self._rules.overlaps
                and (self._dp > 1 or self._rules.is_offloaded)
            ):
                for bucket in self._buckets:
                    self._send(bucket)
            self._receive()
            if self._averages_later and not self._rules.is_offloaded:
                torch._foreach_div_([group.own for group in self._groups], self._dp)
        with self._timeline.part("tensor"):
            for group in self._partial:
                total = group.own.to(self._device)
                comm.all_reduce(total, group=self._tensor_axis)
                if self._rules.is_offloaded:
                    group.own.copy_(total, non_blocking=True)
        if self._rules.is_offloaded and not get_accelerator().is_synchronized_device():
            get_accelerator().current_stream().synchronize()  # the host reads the partition
        self._is_first = True

    def hand_over(self) -> None:
        """Give the partition to DeepSpeed's optimizer, just before its step."""
        if self._rules.is_offloaded:
            return  # it is the gradient of the master weights already
        self._optimizer.averaged_gradients.update(enumerate(self._partitions))

    def _make_group(self, index: int) -> _Group:
        master = master_partitions(self._optimizer)[index]
        part = master.numel()
        if self._rules.is_stage3:
            parameters = self._optimizer.fp16_groups[index]
            ends = list(itertools.accumulate(self._dp * p.partition_numel() for p in parameters))
            starts = [0, *ends[:-1]]
        else:
            parameters = self._optimizer.round_robin_bit16_groups[index]
            starts = self._optimizer.round_robin_bit16_offsets[index]
            ends = [start + p.numel() for start, p in zip(starts, parameters, strict=True)]

        def zeros(elements: int) -> Tensor:
            return torch.zeros(elements, dtype=self._rules.dtype, device=self._device)

        complete = zeros(self._rules.parts * part) if self._rules.is_complete else None
        if self._rules.is_offloaded:
            assert master.grad is not None, "DeepSpeed allocates it in host memory"
            own = master.grad.view(-1)
        elif complete is not None and (self._rules.parts == 1 or not self._rules.is_stage3):
            own = complete.narrow(0, self._own_part * part, part)
        else:
            own = zeros(part)
        return _Group(parameters=parameters, starts=starts, ends=ends, complete=complete, own=own)

    def _make_buckets(self, group: _Group, zero: ZeroConfig) -> Iterator[_Bucket]:
        # Without a copy, everything is sent together.
        members_of_buckets = [range(len(group.parameters))]
        if self._rules.sends_copies or self._rules.overlaps:
            sizes = [end - start for start, end in zip(group.starts, group.ends, strict=True)]
            members_of_buckets = zero.buckets(sizes)
        for members in members_of_buckets:
            parameters = group.parameters[members.start : members.stop]
            start, end = group.starts[members.start], group.ends[members.stop - 1]
            elements = end - start
            shape = (self._dp, elements // self._dp) if self._rules.is_stage3 else (elements,)
            total = None
            if self._rules.sums_vectors and all(map(self._is_vector, parameters)):
                total = torch.zeros(shape, dtype=self._rules.dtype, device=self._device)
            yield _Bucket(group, parameters, start, end, shape, total)

    def _is_vector(self, parameter: Any) -> bool:
        return len(parameter.ds_shape if self._rules.is_stage3 else parameter.shape) == 1

    def _values_of(self, held: HeldRange) -> Tensor:
        return self._groups[held.group].own.narrow(0, held.offset, held.length)

    def _sums_of_parameters(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter's place in the complete gradient, with the shape of the parameter."""
        for group in self._groups:
            assert group.complete is not None
            for parameter, start in zip(group.parameters, group.starts, strict=True):
                shape = parameter.ds_shape if self._rules.is_stage3 else parameter.shape
                yield parameter, group.complete[start : start + shape.numel()].view(shape)

    def _begin_step(self) -> None:
        self._is_first = False
        for group in self._groups:
            if group.complete is not None:
                group.complete.zero_()
        for bucket in self._buckets:
            bucket.is_filled = False
            if bucket.total is not None:
                bucket.total.zero_()
        if self._rules.autograd_adds:
            for parameter, total in self._sums.items():
                parameter.grad = total

    def _take(self, parameter: nn.Parameter) -> None:
        """Called by autograd when the gradient of one micro-batch is in ``parameter.grad``."""
        gradient, bucket = parameter.grad, self._bucket_of[parameter]
        assert gradient is not None
        if not self._rules.autograd_adds:
            parameter.grad = None
            if self._rules.is_complete:
                self._sums[parameter].add_(gradient)
            elif parameter in bucket.gradients:  # the part of ``sum_of``
                bucket.gradients[parameter].add_(gradient)
            else:
                bucket.gradients[parameter] = gradient
        bucket.missing.discard(parameter)
        if self._sends_in_backward and not bucket.missing:
            if bucket.total is not None:
                bucket.total.add_(self._packed_gradients(bucket, gradient.dtype))
            if bucket.is_due:
                self._send_in_backward(bucket)

    def _send_in_backward(self, bucket: _Bucket) -> None:
        with self._timeline.part("data"):
            self._send(bucket)

    def _send(self, bucket: _Bucket) -> None:
        """Start the reduction of a bucket. Without overlap, copies are reduced one at a time."""
        if self._rules.sends_copies:
            self._receive()
        packed = self._packed(bucket)
        if self._rules.divides_first:
            packed = packed / self._dp
        message = (
            self._rows(bucket, packed) if self._rules.is_stage3 else self._pieces(bucket, packed)
        )
        self._in_flight.append(message)
        if self._rules.sends_copies and not self._rules.overlaps:
            self._receive()

    def _packed(self, bucket: _Bucket) -> Tensor:
        """The bucket's gradients: flat, or at ZeRO-3 (dp, elements / dp), one row for each rank."""
        complete = bucket.group.complete
        if complete is not None and not self._rules.is_stage3:
            return complete[bucket.start : bucket.end].to(self._rules.sent_dtype)
        if bucket.total is not None:
            return bucket.total.to(self._rules.sent_dtype)
        if complete is None:
            return self._packed_gradients(bucket, self._rules.sent_dtype)
        packed = torch.empty(bucket.shape, dtype=self._rules.sent_dtype, device=self._device)
        sizes = [self._dp * parameter.partition_numel() for parameter in bucket.parameters]
        parts = complete[bucket.start : bucket.end].split(sizes)
        torch.cat([part.view(self._dp, -1) for part in parts], dim=1, out=packed)
        return packed

    def _packed_gradients(self, bucket: _Bucket, dtype: torch.dtype) -> Tensor:
        """The gradients of one micro-batch, in the same shape."""
        gradients = [self._pop(bucket, parameter) for parameter in bucket.parameters]
        if len(gradients) == 1 and gradients[0].numel() == math.prod(bucket.shape):
            return gradients[0].to(dtype).reshape(bucket.shape)
        packed = torch.empty(bucket.shape, dtype=dtype, device=self._device)
        flat = [gradient.reshape(-1) for gradient in gradients]
        if len({gradient.dtype for gradient in flat}) > 1:  # one is of ``sum_of``
            flat = [gradient.to(dtype) for gradient in flat]
        if self._rules.is_stage3:
            torch._chunk_cat(flat, 0, self._dp, out=packed)
        else:
            torch.cat(flat, out=packed)
        return packed

    def _pop(self, bucket: _Bucket, parameter: Any) -> Tensor:
        gradient = bucket.gradients.pop(parameter, None)
        # If all forwards precede the first backward, it has sent the sum of all micro-batches.
        return self._zeros_like(parameter) if gradient is None else gradient

    def _zeros_like(self, parameter: Any) -> Tensor:
        shape = parameter.ds_shape if self._rules.is_stage3 else parameter.shape
        return torch.zeros(shape, dtype=self._rules.dtype, device=self._device)

    def _pieces(self, bucket: _Bucket, packed: Tensor) -> _Message:
        """ZeRO 0 to 2: reduce each piece of the bucket to the rank that owns it."""
        part = bucket.group.own.numel()
        works = []
        if self._dp > 1 and self._rules.uses_all_reduce:
            works = [comm.all_reduce(packed, group=self._axis, async_op=True)]
        received, start = packed[:0], 0
        for owner in range(bucket.start // part, -(-bucket.end // part)):
            first = max(bucket.start, owner * part)
            end = min(bucket.end, (owner + 1) * part)
            piece = packed[first - bucket.start : end - bucket.start]
            if self._dp > 1 and not self._rules.uses_all_reduce:
                rank = self._axis_ranks[owner]
                works.append(comm.reduce(piece, dst=rank, group=self._axis, async_op=True))
            if owner == self._own_part:
                received, start = piece, first - owner * part
        return _Message(bucket, works, packed, received, start)

    def _rows(self, bucket: _Bucket, packed: Tensor) -> _Message:
        """ZeRO-3: reduce-scatter the rows of the bucket."""
        received, start = packed[self._own_part], bucket.start // self._dp
        works = []
        if self._dp > 1 and self._rules.uses_all_reduce:
            works = [comm.all_reduce(packed, group=self._axis, async_op=True)]
        elif self._dp > 1:
            received = torch.empty_like(received)
            works = [
                comm.reduce_scatter_fn(received, packed.view(-1), group=self._axis, async_op=True)
            ]
        return _Message(bucket, works, packed, received, start)

    def _receive(self) -> None:
        """Wait for all messages, and add what this rank owns to its partition."""
        for message in self._in_flight:
            for work in message.works:
                work.wait()
            if self._rules.sends_copies or self._rules.is_offloaded:
                self._add(message)
        self._in_flight.clear()

    def _add(self, message: _Message) -> None:
        received = message.received
        if self._averages_later and self._rules.is_offloaded:
            received = received / self._dp  # not on the host, which would wait for the copy
        own = message.bucket.group.own.narrow(0, message.start, received.numel())
        if message.bucket.is_filled and own.device != received.device:
            # The device adds, so the host does not wait for it.
            received = received.to(own.dtype) + own.to(received.device, non_blocking=True)
            own.copy_(received, non_blocking=True)
        elif message.bucket.is_filled:
            own.add_(received)
        else:
            own.copy_(received, non_blocking=True)
        message.bucket.is_filled = True

r"""Accumulates the gradients of a step, and reduces them over the data axis.

    complete      autograd --add--> complete gradient      --reduce--> partition of this rank
    partitioned   autograd -------> gradients of a bucket  --reduce--> partition of this rank, added

The gradient of the head's weight comes from the forward of the loss instead (``sum_of``).

ZeRO-0 and 1 accumulate the complete gradient, and reduce it once a step. ZeRO-2 and 3 do the same
with ``gradient_reduction: per_step``. With ``per_micro_batch`` they keep only the partition: a
bucket is reduced as soon as a backward has computed its gradients. Buckets of norms and biases are
an exception: they are summed over the micro-batches, and reduced once a step. They are small, so
the sum takes little memory, and it saves a collective in every other micro-batch.

With ``overlap_comm`` a bucket is reduced while the backward continues. A complete gradient is then
reduced during the last backward of a step. ``buckets`` states how a bucket is reduced.

A compressed gradient (``compression``) is complete, too. It starts as the feedback, which is what
the previous step has not sent. What this step does not send stays in ``complete`` until
``end_step`` copies it to the feedback:

    feedback --x loss scale--> complete --autograd adds, reduce--> what was not sent --> feedback
                                                   \-> partition: the mean

The gradient of an optimizer group is one flat tensor with the layout of DeepSpeed's master weights:

    ZeRO 0, 1, 2   [ a | b | c | padding ]    rank r owns the r-th of dp equal parts; ZeRO-0: all
    ZeRO 3         [ a_r | b_r | c_r ]        rank r owns the r-th of dp equal parts of a, b, c

This replaces the hooks and buckets of DeepSpeed 0.19.8. They run Python code for each parameter in
every backward and in the step, copy each gradient several times, and expect every forward to be
followed by its backward, which is not so in a pipeline.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup
from torch import Tensor, nn

from megaspeed.config.message_sizes import buckets
from megaspeed.config.resolve import Run
from megaspeed.topology.context import ParallelContext
from megaspeed.zero.buckets import Bucket, Group, Reducer, Rules, shape_of
from megaspeed.zero.compression import Compressor, make_compressor
from megaspeed.zero.model_states import (
    GradientFragment,
    HeldRange,
    held_ranges,
    master_partitions,
)


class Gradients:
    """This rank's gradients, from autograd to the optimizer.

    Args:
        optimizer: DeepSpeed's ZeRO optimizer, without hooks.
        run: the resolved run.
        context: this rank's groups.
        partial: the parameters of whose gradient each tensor rank computes a part, in groups of
            their own.
        compressed: the parameters whose gradients are compressed, in groups of their own.
        head_weight: the head's weight, whose gradient the forward of the loss computes; None if
            this rank has no head.
        head_is_tied: whether this rank's embedding has the same weight. Then autograd computes the
            embedding's part of the gradient.
    """

    def __init__(
        self,
        optimizer: Any,
        run: Run,
        context: ParallelContext,
        *,
        partial: Sequence[nn.Parameter] = (),
        compressed: Sequence[nn.Parameter] = (),
        head_weight: nn.Parameter | None = None,
        head_is_tied: bool = False,
    ) -> None:
        self._rules = Rules.of(run)
        self._optimizer = optimizer
        self._timeline = context.timeline
        self._device = context.device
        self._tensor_axis = context.tp_group
        self._dp = context.dp_size
        self._reducer = Reducer(self._rules, context)
        self._head_weight = head_weight
        self._keeps_error = run.compression is not None and run.compression.error_feedback
        self._compressed_parameters = {id(parameter) for parameter in compressed}
        self._groups = [
            self._make_group(index) for index in range(len(master_partitions(optimizer)))
        ]
        members = {id(parameter) for parameter in partial}
        self._partial = [group for group in self._groups if id(group.parameters[0]) in members]
        self._compressed = [group for group in self._groups if group.is_compressed]
        self._compressor: Compressor | None = None
        if self._compressed:
            self._compressor = make_compressor(run, context, self._compressed)
        self._compresses = False  # in this step
        self._loss_scale = 1.0  # of this step
        self.steps_taken = 0
        """Optimizer steps that were not skipped."""
        self._buckets = [
            bucket for group in self._groups for bucket in self._make_buckets(group, run)
        ]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._sums = dict(self._sums_of_parameters()) if self._rules.is_complete else {}
        if self._rules.overlaps or not self._rules.autograd_adds:
            for parameter in self._bucket_of:
                parameter.register_post_accumulate_grad_hook(self._take)
        self._without_autograd = set() if head_is_tied else {head_weight}
        self._is_first = True
        self._sends_in_backward = False
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
            if group.feedback is not None:
                yield group.feedback
        if self._compressor is not None:
            yield from self._compressor.tensors()
        for bucket in self._buckets:
            if bucket.total is not None:
                yield bucket.total

    def begin_forward(self) -> None:
        """Called before each forward that is followed by a backward."""
        if self._is_first:
            self._begin_step()

    def sum_of(self, parameter: nn.Parameter) -> Tensor:
        """The tensor to which the forward of the loss adds the gradient of the head's weight."""
        if parameter in self._sums:
            return self._sums[parameter]
        gradients = self._bucket_of[parameter].gradients
        if parameter not in gradients:
            gradients[parameter] = self._zeros(shape_of(parameter))
        return gradients[parameter]

    def begin_backward(self, *, last: bool) -> None:
        """Called before each backward. ``last``: whether it is the last one of the step."""
        self._sends_in_backward = not self._rules.is_complete or (self._rules.overlaps and last)
        if self._sends_in_backward:
            for bucket in self._buckets:
                bucket.missing = set(bucket.parameters) - self._without_autograd
                bucket.is_due = last or bucket.total is None
                # If all forwards precede the first backward, the sum of all micro-batches is sent.
                has_gradients = self._rules.is_complete or bool(bucket.gradients)
                if not bucket.missing and has_gradients:
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
                    if not (self._compresses and bucket.group.is_compressed):
                        self._reducer.send(bucket)
            self._reducer.receive()
            if self._compresses and self._compressor is not None:
                self._compressor.reduce(self._compressed)
            if self._rules.averages_later and not self._rules.is_offloaded:
                sums = [g for g in self._groups if not (self._compresses and g.is_compressed)]
                if sums:
                    torch._foreach_div_([group.own for group in sums], self._dp)
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

    def end_step(self, *, taken: bool) -> None:
        """Called after each optimizer step. A step that was skipped changes no feedback."""
        if not taken:
            return
        self.steps_taken += 1
        if self._compresses:
            assert self._compressor is not None
            self._compressor.keep()
        for group in self._compressed:
            if group.feedback is None or group.complete is None:
                continue
            if self._compresses:
                torch.div(group.complete, self._loss_scale, out=group.feedback)
            else:
                group.feedback.zero_()  # it was a part of the sum, which was sent completely

    def feedback(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """(parameter, flat view of the part of its gradient that this rank has not sent yet)."""
        for group in self._compressed:
            if group.feedback is not None:
                for parameter, start in zip(group.parameters, group.starts, strict=True):
                    yield parameter, group.feedback.narrow(0, start, shape_of(parameter).numel())

    def factors(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """PowerSGD's Q (columns, rank) of each compressed parameter, equal on all data ranks."""
        return iter(()) if self._compressor is None else self._compressor.factors()

    def _make_group(self, index: int) -> Group:
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

        is_compressed = id(parameters[0]) in self._compressed_parameters
        elements = self._rules.parts * part
        if is_compressed:  # equal parts for all data ranks at ZeRO-0, too
            elements = -(-elements // self._dp) * self._dp
        complete = self._zeros(elements) if self._rules.is_complete else None
        if self._rules.is_offloaded:
            assert master.grad is not None, "DeepSpeed allocates it in host memory"
            own = master.grad.view(-1)
        elif is_compressed:
            own = self._zeros(elements // self._rules.parts)[:part]
        elif complete is not None and (self._rules.parts == 1 or not self._rules.is_stage3):
            own = complete.narrow(0, self._reducer.own_part * part, part)
        else:
            own = self._zeros(part)
        keeps_error = is_compressed and self._keeps_error
        return Group(
            parameters=parameters,
            starts=starts,
            ends=ends,
            complete=complete,
            own=own,
            is_compressed=is_compressed,
            feedback=self._zeros(elements) if keeps_error else None,
        )

    def _make_buckets(self, group: Group, run: Run) -> Iterator[Bucket]:
        # Without a copy, everything is sent together.
        members_of_buckets = [range(len(group.parameters))]
        is_split = self._rules.sends_copies or self._rules.overlaps
        if is_split and not self._rules.has_bucket_groups:
            sizes = [end - start for start, end in zip(group.starts, group.ends, strict=True)]
            of_head = (i for i, p in enumerate(group.parameters) if p is self._head_weight)
            members_of_buckets = buckets(run, sizes, next(of_head, None))
        for members in members_of_buckets:
            parameters = group.parameters[members.start : members.stop]
            start, end = group.starts[members.start], group.ends[members.stop - 1]
            if self._rules.has_bucket_groups:
                end = self._rules.parts * group.own.numel()  # with the padding
            elements = end - start
            shape = (self._dp, elements // self._dp) if self._rules.is_stage3 else (elements,)
            total = None
            if self._rules.sums_vectors and all(len(shape_of(p)) == 1 for p in parameters):
                total = self._zeros(shape)
            yield Bucket(group, parameters, start, end, shape, total)

    def _zeros(self, shape: int | Sequence[int]) -> Tensor:
        return torch.zeros(shape, dtype=self._rules.dtype, device=self._device)

    def _values_of(self, held: HeldRange) -> Tensor:
        return self._groups[held.group].own.narrow(0, held.offset, held.length)

    def _sums_of_parameters(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter's place in the complete gradient, with the shape of the parameter."""
        for group in self._groups:
            assert group.complete is not None
            for parameter, start in zip(group.parameters, group.starts, strict=True):
                shape = shape_of(parameter)
                yield parameter, group.complete[start : start + shape.numel()].view(shape)

    def _begin_step(self) -> None:
        self._is_first = False
        self._loss_scale = float(self._optimizer.loss_scale)
        if self._compressor is not None:
            self._compresses = self._compressor.is_due(self.steps_taken + 1)
        for group in self._groups:
            if group.feedback is not None:
                torch.mul(group.feedback, self._loss_scale, out=group.complete)
            elif group.complete is not None:
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
                # Not _foreach_add_ over a bucket: if the dtypes differ, it also launches a kernel
                # for each tensor (torch 2.13, ForeachUtils.h), and it would keep all gradients.
                self._sums[parameter].add_(gradient)
            elif parameter in bucket.gradients:  # a tied weight: the head's part, see ``sum_of``
                bucket.gradients[parameter].add_(gradient)
            else:
                bucket.gradients[parameter] = gradient
        bucket.missing.discard(parameter)
        if self._sends_in_backward and not bucket.missing:
            if bucket.total is not None:
                bucket.total.add_(self._reducer.pack(bucket, gradient.dtype))
            if bucket.is_due:
                self._send_in_backward(bucket)

    def _send_in_backward(self, bucket: Bucket) -> None:
        with self._timeline.part("data"):
            self._reducer.send(bucket)

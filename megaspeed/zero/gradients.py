r"""Accumulates the gradients of a step, and reduces them over the data axis.

    complete      autograd --add--> complete gradient      --reduce--> partition of this rank
    partitioned   autograd -------> gradients of a bucket  --reduce--> partition of this rank, added
    replicas      partition of this rank --sum, once a step--> partition of this rank

    complete    this rank's sum over the micro-batches of a step, of all parameters of a bucket
    total       the same of norms and biases, packed as it is sent, if only partitions are kept
    partition   the part of the mean over the data ranks that this rank owns
    partial     a gradient of which each tensor rank computes a part; its partition is summed over
                the tensor axis at the end
    feedback    what a compressed step has not sent

The gradient of the head's weight comes from the forward of the loss instead (``sum_of``).

ZeRO-0 and 1 accumulate the complete gradient, and reduce it once a step. ZeRO-2 and 3 do the same
with ``gradient_reduction: per_step``. With ``per_micro_batch`` they keep only the partition: a
bucket is reduced as soon as a backward has computed its gradients. With ``per_visit``, the
gradients of a chunk are summed while a visit lasts, and reduced in its last backward. Buckets of
norms and biases are an exception: they are summed over the micro-batches, and reduced once a step.
They are small, so the sum takes little memory, and it saves many collectives.

With ``overlap_comm`` a bucket is reduced while the backward continues. A complete gradient is then
reduced during the last backward of a step, and replicas sum a partition as soon as it is complete.
``buckets`` states how a bucket is reduced.

A compressed gradient (``compression``) is complete, or with replicas the sum that they compress. It
starts as the feedback, which is what the previous step has not sent. What this step does not send
stays in it until ``end_step`` copies it to the feedback:

    feedback --x loss scale--> gradient --autograd adds, reduce--> what was not sent --> feedback
                                                   \-> partition: the mean

This replaces the hooks and buckets of DeepSpeed 0.19.8. They run Python code for each parameter in
every backward and in the step, copy each gradient several times, and expect every forward to be
followed by its backward, which is not so in a pipeline.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup
from torch import Tensor, nn

from megaspeed.config.resolve import Run
from megaspeed.model.gpt import DTYPES
from megaspeed.pipeline.schedules import End
from megaspeed.topology.context import ParallelContext
from megaspeed.zero.buckets import Bucket, Reducer, shape_of
from megaspeed.zero.compression import Compressor, make_compressor
from megaspeed.zero.model_states import GradientFragment, HeldRange, held_ranges, master_partitions


class Gradients:
    """This rank's gradients, from autograd to the optimizer.

    Args:
        optimizer: DeepSpeed's ZeRO optimizer, without hooks.
        run: the resolved run.
        context: this rank's groups.
        partial: parameters with partial gradients: each tensor rank computes a part of the sum.
            They are in parameter groups without others.
        compressed: parameters with compressed gradients, in parameter groups without others.
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
        partial: Sequence[nn.Parameter],
        compressed: Sequence[nn.Parameter],
        head_weight: nn.Parameter | None,
        head_is_tied: bool,
        chunks: Sequence[Sequence[nn.Parameter]],
    ) -> None:
        self._run = run
        self._is_stage3 = run.zero_stage == 3
        self._is_complete = run.keeps_complete_gradients
        self._sums_visits = run.sums_visits
        self._is_offloaded = run.config.zero_optimization.offloads_optimizer
        self._overlaps = run.overlaps_reductions
        # whether autograd adds to ``grad`` in place. It does so in the dtype of the parameter.
        has_dtype = run.precision == run.accumulation_dtype
        self._autograd_adds = self._is_complete and has_dtype and not self._is_stage3
        self._optimizer = optimizer
        self._timeline = context.timeline
        self._device = context.device
        self._tensor_axis = context.tp_group
        self._dp, self._shards = context.grid.dp_cp, run.grid.shard
        self._reducer = Reducer(run, context)
        self._keeps_error = run.compression is not None and run.compression.error_feedback
        self._compressed_parameters = {id(parameter) for parameter in compressed}
        self._buckets = [
            self._make_bucket(index) for index in range(len(master_partitions(optimizer)))
        ]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._buckets_of_chunks = [
            [bucket for bucket in self._buckets if bucket.parameters[0] in members]
            for members in map(set, chunks)
        ]
        members = {id(parameter) for parameter in partial}
        self._partial = [bucket for bucket in self._buckets if id(bucket.parameters[0]) in members]
        self._compressed = [bucket for bucket in self._buckets if bucket.compressed is not None]
        self._compressor: Compressor | None = None
        if self._compressed:
            self._compressor = make_compressor(run, context, self._compressed)
        self._loss_scale = 1.0  # of this step
        self.steps_taken = 0
        """Optimizer steps that were not skipped."""
        self._sums = dict(self._sums_of_parameters()) if self._is_complete else {}
        if self._overlaps or not self._autograd_adds:
            for parameter in self._bucket_of:
                parameter.register_post_accumulate_grad_hook(self._take)
        self._without_autograd = set() if head_is_tied else {head_weight}
        self._begins_step = True  # whether the next forward is the first one of a step
        self._is_last = False  # whether this backward is the last one of the step
        self._sends_in_backward = False
        fragments = [
            (held.bucket, GradientFragment(held.parameter, held.start, self._values_of(held)))
            for held in held_ranges(optimizer)
        ]
        self.fragments = tuple(fragment for _, fragment in fragments)
        """Views of this rank's reduced gradients, without padding."""
        self._partitions = [
            [bucket.partition]
            if self._is_stage3
            else GradPartitionBufferGroup(
                [f.values for b, f in fragments if b == at], bucket.partition
            )
            for at, bucket in enumerate(self._buckets)
        ]

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that hold gradients between two micro-batches."""
        for bucket in self._buckets:
            held = (bucket.partition, bucket.sum, bucket.complete, bucket.feedback, bucket.total)
            yield from (tensor for tensor in held if tensor is not None)
        if self._compressor is not None:
            yield from self._compressor.tensors()

    def begin_forward(self) -> None:
        """Called before each forward that is followed by a backward."""
        if self._begins_step:
            self._begin_step()

    def sum_of(self, parameter: nn.Parameter) -> Tensor:
        """The tensor to which the forward of the loss adds the gradient of the head's weight."""
        if parameter in self._sums:
            return self._sums[parameter]
        gradients = self._bucket_of[parameter].gradients
        if parameter not in gradients:
            gradients[parameter] = self._zeros(shape_of(parameter))
        return gradients[parameter]

    def begin_backward(self, chunk: int, end: End) -> None:
        """Called before each backward of a chunk. ``end``: what ends for the chunk with it."""
        self._is_last = end == "step"
        self._sends_in_backward = self._overlaps and self._is_last
        if not self._is_complete:
            self._sends_in_backward = not self._sums_visits or end != "micro_batch"
        if self._sends_in_backward:
            for bucket in self._buckets_of_chunks[chunk]:
                bucket.missing = set(bucket.parameters) - self._without_autograd
                # If all forwards precede the first backward, the sum of all micro-batches is sent.
                has_gradients = self._is_complete or bool(bucket.gradients)
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
            if self._is_complete and not self._overlaps:
                for bucket in self._buckets:
                    self._reducer.send(bucket, last=True)
            self._reducer.receive(self._buckets)
            if self._reducer.compresses and self._compressor is not None:
                self._compressor.reduce(self._compressed)
            if self._reducer.averages_later and not self._is_offloaded:
                plain = [b for b in self._buckets if not self._reducer.is_compressed_now(b)]
                if plain:
                    torch._foreach_div_([bucket.partition for bucket in plain], self._dp)
        with self._timeline.part("tensor"):
            for bucket in self._partial:
                total = bucket.partition.to(self._device)
                comm.all_reduce(total, group=self._tensor_axis)
                if self._is_offloaded:
                    bucket.partition.copy_(total, non_blocking=True)
        if self._is_offloaded and not get_accelerator().is_synchronized_device():
            get_accelerator().current_stream().synchronize()  # the host reads the partition
        self._begins_step = True

    def hand_over(self) -> None:
        """Give the partition to DeepSpeed's optimizer, just before its step."""
        if self._is_offloaded:
            return  # it is the gradient of the master weights already
        self._optimizer.averaged_gradients.update(enumerate(self._partitions))

    def end_step(self, *, taken: bool) -> None:
        """Called after each optimizer step. A step that was skipped changes no feedback."""
        if not taken:
            return
        self.steps_taken += 1
        if self._reducer.compresses:
            assert self._compressor is not None
            self._compressor.keep()
        for bucket in self._compressed:
            if bucket.feedback is None or bucket.compressed is None:
                continue
            if self._reducer.compresses:
                torch.div(bucket.compressed, self._loss_scale, out=bucket.feedback)
            else:
                bucket.feedback.zero_()  # it was a part of the sum, which was sent completely

    def feedback(self) -> Iterator[GradientFragment]:
        """What this rank has not sent yet of each compressed gradient."""
        for bucket in self._compressed:
            if bucket.feedback is not None:
                for held in bucket.ranges:
                    values = bucket.feedback.narrow(0, held.offset, held.length)
                    yield GradientFragment(held.parameter, held.start, values)

    def factors(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """PowerSGD's Q (columns, rank) of each compressed parameter, equal on all data ranks."""
        return iter(()) if self._compressor is None else self._compressor.factors()

    def _make_bucket(self, index: int) -> Bucket:
        master, shards = master_partitions(self._optimizer)[index], self._shards
        part, replicas = master.numel(), self._run.grid.replicate
        if self._is_stage3:
            parameters = self._optimizer.fp16_groups[index]
            sizes = [shards * parameter.partition_numel() for parameter in parameters]
        else:
            parameters = self._optimizer.round_robin_bit16_groups[index]
            sizes = [parameter.numel() for parameter in parameters]
        is_compressed = id(parameters[0]) in self._compressed_parameters
        # Compression divides what replicas sum into equal parts.
        padded = -(-part // replicas) * replicas if is_compressed else part
        elements = shards * part if shards > 1 else padded
        complete = self._zeros(elements) if self._is_complete else None
        if self._is_offloaded:
            assert master.grad is not None, "DeepSpeed allocates it in host memory"
            partition = master.grad.view(-1)
        elif is_compressed:
            partition = self._zeros(padded)[:part]
        elif complete is not None and (shards == 1 or not self._is_stage3):
            partition = complete.narrow(0, self._reducer.own_part * part, part)
        else:
            partition = self._zeros(part)
        total, compressed = partition, complete if is_compressed else None
        if is_compressed and self._run.grid.is_hybrid:
            total = compressed = self._zeros(padded)
        bucket = Bucket(
            parameters=parameters,
            sizes=sizes,
            complete=complete,
            partition=partition,
            sum=total,
            compressed=compressed,
        )
        if compressed is not None:
            bucket.feedback = torch.zeros_like(compressed) if self._keeps_error else None
            bucket.ranges = [
                HeldRange(p, 0, index, start, shape_of(p).numel())
                for p, start in zip(parameters, bucket.starts, strict=True)
            ]
            if compressed is not complete:
                bucket.ranges = [h for h in held_ranges(self._optimizer) if h.bucket == index]
        if self._run.sums_vector_gradients and all(len(shape_of(p)) == 1 for p in parameters):
            bucket.total = self._zeros(self._reducer.shape_of(bucket))
        return bucket

    def _zeros(self, shape: int | Sequence[int]) -> Tensor:
        return torch.zeros(shape, dtype=DTYPES[self._run.accumulation_dtype], device=self._device)

    def _values_of(self, held: HeldRange) -> Tensor:
        return self._buckets[held.bucket].partition.narrow(0, held.offset, held.length)

    def _sums_of_parameters(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter's place in the complete gradient, with the shape of the parameter."""
        for bucket in self._buckets:
            assert bucket.complete is not None
            for parameter, start in zip(bucket.parameters, bucket.starts, strict=True):
                shape = shape_of(parameter)
                yield parameter, bucket.complete[start : start + shape.numel()].view(shape)

    def _begin_step(self) -> None:
        self._begins_step = False
        self._loss_scale = float(self._optimizer.loss_scale)
        if self._compressor is not None:
            self._reducer.compresses = self._compressor.is_due(self.steps_taken + 1)
        for bucket in self._buckets:
            if bucket.complete is not None and bucket.complete is not bucket.compressed:
                bucket.complete.zero_()
            if bucket.compressed is not None and bucket.feedback is not None:
                torch.mul(bucket.feedback, self._loss_scale, out=bucket.compressed)
            elif bucket.compressed is not None:
                bucket.compressed.zero_()
            bucket.is_filled = bucket.sum is bucket.compressed
            if bucket.total is not None:
                bucket.total.zero_()
        if self._autograd_adds:
            for parameter, total in self._sums.items():
                parameter.grad = total

    def _take(self, parameter: nn.Parameter) -> None:
        """Called by autograd when the gradient of one micro-batch is in ``parameter.grad``."""
        gradient, bucket = parameter.grad, self._bucket_of[parameter]
        assert gradient is not None
        if not self._autograd_adds:
            parameter.grad = None
            if self._sums_visits:
                gradient = gradient.to(DTYPES[self._run.accumulation_dtype])
            if self._is_complete:
                # Not _foreach_add_ over a bucket: if the dtypes differ, it also launches a kernel
                # for each tensor (torch 2.13, ForeachUtils.h), and it would keep all gradients.
                self._sums[parameter].add_(gradient)
            elif parameter in bucket.gradients:
                # of a visit, or of a tied weight: the head's part, see ``sum_of``
                bucket.gradients[parameter].add_(gradient)
            else:
                bucket.gradients[parameter] = gradient
        bucket.missing.discard(parameter)
        if self._sends_in_backward and not bucket.missing:
            if bucket.total is not None:
                bucket.total.add_(self._reducer.pack(bucket, gradient.dtype))
            if self._is_last or bucket.total is None:
                self._send_in_backward(bucket)

    def _send_in_backward(self, bucket: Bucket) -> None:
        with self._timeline.part("data"):
            self._reducer.send(bucket, last=self._is_last and self._overlaps)

r"""Adds up the gradients of a step, and reduces them, as the plan states for each bucket.

    complete     autograd --add--> complete gradient      --reduce--> partition of this rank
    packed       autograd -------> gradients of a bucket  --add--> packed sum --reduce--> partition
    partition    autograd -------> gradients of a bucket  --reduce--> partition, added to it
    replicas     partition of this rank --sum, once a step--> partition of this rank

The gradient of the head's weight comes from the forward of the loss instead (``sum_of``). If the
sum of a matrix has another type than its weight, the product that computes the gradient adds it.

What is compressed (``compression``) is the complete gradient or, with several shards and replicas,
the sum over the shards. A step begins with the feedback in it: what the steps before have not sent.
The reduction leaves in it what this step has not sent, which ``end_step`` copies to the feedback:

    feedback --x loss scale--> gradient --autograd adds, reduce--> what was not sent --> feedback
                                                   \-> partition: the mean

This replaces the hooks and buckets of DeepSpeed 0.19.8. They run Python code for each parameter in
every backward and in the step, copy each gradient several times, and expect every forward to be
followed by its backward, which is not so in a pipeline.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup
from torch import Tensor, nn

from megaspeed.config.resolve import Precision, Run
from megaspeed.data_axis.axis import DataAxis
from megaspeed.data_axis.buckets import Bucket
from megaspeed.model.gpt import DTYPES
from megaspeed.pipeline.schedules import End
from megaspeed.tensor_parallel.shards import PARTIAL
from megaspeed.tensor_parallel.weight_gradients import MatrixLayer, add_product
from megaspeed.topology.context import ParallelContext
from megaspeed.zero.buckets import (
    CompressedGradients,
    GradientBucket,
    Reducer,
    fragments_of,
    shape_of,
)
from megaspeed.zero.compression import Compressor, make_compressor
from megaspeed.zero.model_states import (
    Fragment,
    master_partitions,
    own_part,
    partitions_parameters,
)


class Gradients:
    """This rank's gradients, from autograd to the optimizer.

    Args:
        optimizer: DeepSpeed's ZeRO optimizer, without hooks. Its parameter groups are the buckets.
        axis: which gradients are reduced together, when and how.
        context: this rank's groups.
        parameters: full name -> parameter.
        layers: parameter -> the layer that adds its gradient in a product.
    """

    def __init__(
        self,
        optimizer: Any,
        run: Run,
        axis: DataAxis,
        context: ParallelContext,
        parameters: Mapping[str, nn.Parameter],
        layers: Mapping[nn.Parameter, MatrixLayer],
    ) -> None:
        self._optimizer = optimizer
        self._timeline = context.timeline
        self._context, self._device = context, context.device
        self._is_offloaded = run.config.zero_optimization.offloads_optimizer
        self._reducer = Reducer(context, is_offloaded=self._is_offloaded)
        self._buckets = [
            self._make_bucket(plan, [parameters[each.name] for each in plan.parameters], master)
            for plan, master in zip(axis.buckets, master_partitions(optimizer), strict=True)
        ]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._of_chunks: dict[int, list[GradientBucket]] = {}
        for bucket in self._buckets:
            self._of_chunks.setdefault(bucket.plan.chunk, []).append(bucket)
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._in_backward = {parameters[p.name] for p in axis.parameters if p.in_backward}
        self._partial = [bucket for bucket in self._buckets if bucket.plan.group in PARTIAL]
        self._compressed = [b.compressed for b in self._buckets if b.compressed is not None]
        self._compressor: Compressor | None = None
        if self._compressed:
            self._compressor = make_compressor(run, context, self._compressed)
        self._compresses = False  # whether the compressor reduces the gradients of this step
        self._loss_scale = 1.0  # of this step
        self.steps_taken = 0
        """Optimizer steps that were not skipped."""
        self._sums = dict(self._sums_of_parameters())
        for parameter, bucket in self._bucket_of.items():
            how = bucket.plan.reduction
            # A hook is Python code in every backward, so no other parameters have one.
            if parameter in layers:
                layers[parameter].add_products_by(partial(self._add_product, parameter))
            elif how.added_by != "autograd" or how.when != "after":
                parameter.register_post_accumulate_grad_hook(self._take)
        self._begins_step = True  # whether the next forward is the first one of a step
        self._end: End = "step"  # what this backward ends
        fragments = [[*each.fragments()] for each in self._buckets]
        self.fragments = tuple(chain(*fragments))
        """Views of this rank's reduced gradients, without padding."""
        # DeepSpeed takes the flat tensor of this class as it is. From a list, it would make a copy
        # (0.19.8, runtime/zero/stage_1_and_2.py:2904, 3107).
        self._partitions = [
            [bucket.partition]
            if partitions_parameters(optimizer)
            else GradPartitionBufferGroup([each.values for each in own], bucket.partition)
            for own, bucket in zip(fragments, self._buckets, strict=True)
        ]

    @property
    def partitions(self) -> list[Tensor]:
        """This rank's part of the mean of each bucket, flat, with padding."""
        return [bucket.partition for bucket in self._buckets]

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that hold gradients between two micro-batches."""
        for bucket in self._buckets:
            yield from (bucket.partition, bucket.sum)
            if bucket.kept is not None:
                yield bucket.kept
        yield from (each.feedback for each in self._compressed if each.feedback is not None)
        if self._compressor is not None:
            yield from self._compressor.tensors()

    def begin_forward(self) -> None:
        """Called before each forward that is followed by a backward."""
        if self._begins_step:
            self._begin_step()

    def sum_of(self, parameter: nn.Parameter) -> Tensor:
        """The tensor to which a product adds the gradient of a parameter."""
        if parameter in self._sums:
            return self._sums[parameter]
        gradients = self._bucket_of[parameter].gradients
        if parameter not in gradients:
            total = self._bucket_of[parameter].plan.reduction.total
            gradients[parameter] = self._zeros(shape_of(parameter), total)
        return gradients[parameter]

    def begin_backward(self, chunk: int, end: End) -> None:
        """Called before each backward of a chunk. ``end``: what ends for the chunk with it."""
        self._end = end
        for bucket in self._of_chunks[chunk]:
            bucket.is_collected = bucket.plan.reduction.collects(end)
            if bucket.is_collected:
                bucket.missing = self._in_backward.intersection(bucket.parameters)
                # Only the loss computes these gradients, so they are complete. With GPipe they are
                # the sum of all micro-batches.
                if not bucket.missing and (bucket.kept is not None or bucket.gradients):
                    self._collect(bucket)

    def missing(self) -> list[str]:
        """Full names of the parameters of which the last backward has computed no gradient.

        Their buckets have not been sent. Empty if everything is sent at the end of the step.
        """
        return [self._names[each] for bucket in self._buckets for each in bucket.missing]

    def reduce(self) -> None:
        """Complete the reduction. Afterwards the partition is the average over the data axis.

        What each tensor rank has computed a part of is then summed over the tensor axis. So norms
        and biases need one collective a step, not one for each layer and micro-batch.
        """
        with self._timeline.part("data"):
            for bucket in self._buckets:
                if bucket.plan.reduction.when == "after":
                    self._reducer.send(bucket, last=True)
            self._reducer.receive(self._buckets)
            if self._compressor is not None and self._compresses:
                self._compressor.reduce(self._compressed)
            # Offloaded ones were divided on the device, before the copy to the host.
            sums = [b for b in self._buckets if not (b.is_compressed or self._is_offloaded)]
            sums = [bucket for bucket in sums if bucket.plan.reduction.divides == "after"]
            if sums:
                ranks = [float(bucket.plan.reduction.ranks) for bucket in sums]
                torch._foreach_div_([bucket.partition for bucket in sums], ranks)
        with self._timeline.part("tensor"):
            for bucket in self._partial:
                total = bucket.partition.to(self._device)
                comm.all_reduce(total, group=self._context.tp_group)
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
        if self._compressor is not None and self._compresses:
            self._compressor.keep()
        for compressed in self._compressed:
            if compressed.feedback is None:
                continue
            if self._compresses:
                # Without the loss scale, which may change before the next step.
                torch.div(compressed.values, self._loss_scale, out=compressed.feedback)
            else:
                compressed.feedback.zero_()  # it was a part of the sum, which was sent completely

    def feedback(self) -> Iterator[Fragment]:
        """What this rank has not sent yet of each compressed gradient."""
        for each in self._compressed:
            if each.feedback is not None:
                yield from fragments_of(each.feedback, each.ranges)

    def factors(self) -> Iterator[tuple[str, Tensor]]:
        """(full name, PowerSGD's Q (columns, rank)) of each compressed parameter, equal on all data
        ranks.
        """
        return iter(()) if self._compressor is None else self._compressor.factors()

    def _make_bucket(
        self, plan: Bucket, parameters: Sequence[nn.Parameter], master: Tensor
    ) -> GradientBucket:
        """Allocate what the plan states. ``master`` is the flat tensor of this rank's weights."""
        total, part, how = plan.reduction.total, plan.part, plan.compression
        index = own_part(plan, self._context)
        # Compression divides what replicas sum into equal parts.
        replicas = self._context.grid.replicate
        padded = part if how is None else -(-part // replicas) * replicas
        kept = None
        if plan.reduction.keeps != "partition":
            kept = self._zeros(plan.elements if plan.shards > 1 else padded, total)
        if self._is_offloaded:
            assert master.grad is not None, "DeepSpeed allocates it in host memory"
            partition = master.grad.view(-1)
        elif plan.has_own_partition:
            partition = self._zeros(padded, total)[:part]
        else:
            assert kept is not None
            partition = kept.narrow(0, index * part, part)
        compressed = None
        if how is not None:
            values = kept if plan.is_sent_compressed else self._zeros(padded, total)
            assert values is not None, "a rule checked that ranks keep complete gradients"
            compressed = CompressedGradients(
                plan=plan,
                values=values,
                partition=partition,
                ranges=[*plan.compressed_by(index)],
                feedback=torch.zeros_like(values) if how.error_feedback else None,
            )
        return GradientBucket(
            plan=plan,
            parameters=parameters,
            own_part=index,
            kept=kept,
            partition=partition,
            compressed=compressed,
        )

    def _zeros(self, shape: int | Sequence[int], dtype: Precision) -> Tensor:
        return torch.zeros(shape, dtype=DTYPES[dtype], device=self._device)

    def _sums_of_parameters(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter's place in a complete gradient, with the shape of the parameter."""
        for bucket in self._buckets:
            if bucket.kept is None or bucket.plan.reduction.keeps != "complete":
                continue
            for parameter, start in zip(bucket.parameters, bucket.plan.starts, strict=True):
                shape = shape_of(parameter)
                yield parameter, bucket.kept[start : start + shape.numel()].view(shape)

    def _begin_step(self) -> None:
        self._begins_step = False
        self._loss_scale = float(self._optimizer.loss_scale)
        if self._compressor is not None:
            self._compresses = self._compressor.is_due(self.steps_taken + 1)
        for bucket in self._buckets:
            compressed = bucket.compressed
            # If it is compressed, it starts as the feedback instead.
            if bucket.kept is not None and (
                compressed is None or compressed.values is not bucket.kept
            ):
                bucket.kept.zero_()
            if compressed is not None and compressed.feedback is not None:
                torch.mul(compressed.feedback, self._loss_scale, out=compressed.values)
            elif compressed is not None:
                compressed.values.zero_()
            bucket.is_filled = bucket.sum is not bucket.partition
            bucket.is_compressed = compressed is not None and self._compresses
        for parameter, total in self._sums.items():
            if self._bucket_of[parameter].plan.reduction.added_by == "autograd":
                parameter.grad = total  # autograd adds in place to a gradient that is there

    def _take(self, parameter: nn.Parameter) -> None:
        """Called by autograd when the gradient of one micro-batch is in ``parameter.grad``."""
        gradient, bucket = parameter.grad, self._bucket_of[parameter]
        assert gradient is not None
        how = bucket.plan.reduction
        if how.added_by != "autograd":
            parameter.grad = None  # else autograd would add the next gradient to it, in its type
            gradient = gradient.to(DTYPES[how.computed])
            if how.keeps == "complete":
                # Not _foreach_add_ over a bucket: if the dtypes differ, it also launches a kernel
                # for each tensor (torch 2.13, ForeachUtils.h), and it would keep all gradients.
                self._sums[parameter].add_(gradient)
            elif parameter in bucket.gradients:
                # of a visit, or of a tied weight: the head's part, see ``sum_of``
                bucket.gradients[parameter].add_(gradient)
            else:
                bucket.gradients[parameter] = gradient
        self._note(parameter)

    def _add_product(self, parameter: nn.Parameter, gradient: Tensor, inputs: Tensor) -> None:
        """Called by the backward of a linear layer instead of ``_take``."""
        add_product(self.sum_of(parameter), gradient, inputs)
        self._note(parameter)

    def _note(self, parameter: nn.Parameter) -> None:
        """Collect the bucket of a parameter if this backward has computed all its gradients."""
        bucket = self._bucket_of[parameter]
        if bucket.is_collected:
            assert parameter in bucket.missing, "a backward adds to each gradient once"
            bucket.missing.remove(parameter)
        if bucket.is_collected and not bucket.missing:
            self._collect(bucket)

    def _collect(self, bucket: GradientBucket) -> None:
        """Add a bucket's gradients to the packed sum, if it has one, and send what is due."""
        how = bucket.plan.reduction
        if how.keeps == "packed" and bucket.gradients:
            assert bucket.kept is not None
            bucket.kept.add_(self._reducer.pack(bucket, DTYPES[how.computed]))
        if how.keeps != "packed" or self._end == how.when:
            with self._timeline.part("data"):
                self._reducer.send(bucket, last=self._end == "step" and how.overlaps)

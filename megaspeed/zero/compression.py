"""Compresses the gradients of matrices before they are sent over the data axis.

With several replicas, the gradients are reduced over the shards as they are, and compressed before
they are sent between the replicas.

    gradients of a step + feedback = sum --compress--> messages --reduce--> mean of what was sent
                                     sum - what this rank sent = feedback for the next step

Error feedback (Seide et al. 2014, "1-bit stochastic gradient descent", section 3): what a step does
not send, a later step sends. ``gradients`` draws how it passes through the complete gradient.

    int8       blocks of 8-bit integers with an fp32 scale. Each rank sums the parts that it owns in
               fp32 (as ZeRO++ does: Wang et al. 2023, section 3.3). A replica then sends its sum to
               all others, also as such blocks.
    powersgd   a matrix of n x m as the product of (n, rank) and (rank, m), which are all-reduced
               (Vogels et al. 2019, "PowerSGD", algorithms 1 and 2)

Neither hides an infinity or NaN: if an element is not finite on one rank, the mean is not finite.
No kernel is launched for a single parameter, and the host does not wait for the device.

Why not a library: torch's hooks need DDP's buckets, and its PowerSGD waits for the device (torch
2.13, powerSGD_hook.py, ``decompress``). DeepSpeed 0.19.8 compiles its kernels, and has no feedback
(runtime/comm/coalesced_collectives.py). So only torch's orthogonalization is used.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize_gram_schmidt

from megaspeed.config.resolve import Run
from megaspeed.config.run import Int8Compression, PowerSgdCompression
from megaspeed.data_axis.compression import int8_parts, powersgd_matrix
from megaspeed.tensor_parallel.collectives import all_gather_tensor
from megaspeed.topology.context import ParallelContext
from megaspeed.zero.buckets import CompressedGradients

_LEVELS = 127
_SMALLEST = torch.finfo(torch.float32).tiny

_SMALL_NORM = 1e-16
"""A column is divided by its norm plus this number, so a column of zeros stays zero. The squares of
much smaller numbers are 0 in fp32."""


class Compressor(ABC):
    """Reduces the compressed buckets over the data axis. By default without a state."""

    def is_due(self, step: int) -> bool:
        """Whether step ``step``, counted from 1 without skipped steps, is compressed."""
        return True

    @abstractmethod
    def reduce(self, compressed: Sequence[CompressedGradients]) -> None:
        """Write the mean to each ``partition``, and leave in ``compressed`` what was not sent."""

    def keep(self) -> None:  # noqa: B027 - there may be no state
        """Use the state of this step in the next one. Called after a step that was not skipped."""

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that are held from step to step."""
        return iter(())

    def factors(self) -> Iterator[tuple[str, Tensor]]:
        """(full name of a parameter, state of the method for it), equal on all data ranks."""
        return iter(())


def make_compressor(
    run: Run, context: ParallelContext, compressed: Sequence[CompressedGradients]
) -> Compressor:
    if isinstance(run.compression, PowerSgdCompression):
        return PowerSgd(run, context, compressed)
    return Int8(run, context)


# --- int8 -----------------------------------------------------------------------------------------


def quantized(values: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers from -127 to 127, and the scales by which to multiply them.

    An element differs from the product by at most half of its block's scale, which is 1/127 of the
    block's largest absolute value. If the scale is below fp32's smallest normal number, the
    difference is at most 1.5e-36. If an element is not finite, the scale is not finite.

    Args:
        values: (..., block), fp32.

    Returns:
        (..., block) and (..., 1), both fp32.
    """
    scales = torch.linalg.vector_norm(values, math.inf, dim=-1, keepdim=True) / _LEVELS
    # A block of zeros has the scale 0, and 0 / 0 would be NaN.
    return (values / scales.clamp_min(_SMALLEST)).round_(), scales


def packed(levels: Tensor, scales: Tensor) -> Tensor:
    """(..., block + 4) in int8: the whole numbers, and the bytes of their scale."""
    return torch.cat([levels.to(torch.int8), scales.view(torch.int8)], dim=-1)


def unpacked(message: Tensor) -> Tensor:
    """(..., block) in fp32, from (..., block + 4) in int8."""
    # A view as fp32 must begin at a multiple of 4 bytes, and so must each of its rows.
    scales = message[..., -4:].contiguous().view(torch.float32)
    return message[..., :-4].float().mul_(scales)


class Int8(Compressor):
    """Reduces gradients as blocks of 8-bit integers.

    The gradient is a matrix with a row for each rank, which sums that row. Columns of about
    ``reduce_bucket_size`` elements together are sent at a time:

        columns --quantize--> all-to-all: row r to rank r --sum in fp32--> partition
    """

    def __init__(self, run: Run, context: ParallelContext) -> None:
        assert isinstance(run.compression, Int8Compression)
        self._block = run.compression.block
        self._keeps_error = run.compression.error_feedback
        self._run, self._dp = run, run.grid.dp_cp
        self._is_replica = context.replica_group is not None
        self._axis = context.replica_group or context.shard_group
        self._rank, self._rows = context.sender_rank, run.grid.senders

    def reduce(self, compressed: Sequence[CompressedGradients]) -> None:
        for bucket in compressed:
            mean = bucket.partition
            if self._is_replica and self._run.config.zero_optimization.offloads_optimizer:
                mean = torch.empty_like(bucket.values)  # the other has no padding
            for rows, own in self._parts(bucket, mean):
                self._reduce(rows, own)
            if mean is not bucket.partition:
                bucket.partition.copy_(mean[: bucket.partition.numel()], non_blocking=True)

    def _parts(
        self, bucket: CompressedGradients, mean: Tensor
    ) -> Iterator[tuple[list[Tensor], Tensor]]:
        """(columns of the gradient, (ranks, width) each; their place in the mean)."""
        matrix = bucket.values.view(self._rows, -1)
        # Replicas have all rows of the partition, whose memory also has the padding after it.
        own = mean.as_strided(matrix.shape, (matrix.shape[1], 1)) if self._is_replica else mean
        sizes = list(bucket.plan.sizes)
        for start, columns, parameters in int8_parts(self._run, bucket.plan):
            rows = [matrix[:, start : start + columns]]
            if parameters is not None:
                members = bucket.values.split(sizes)[parameters.start : parameters.stop]
                rows = [each.view(self._rows, -1) for each in members]
            yield rows, own[..., start : start + columns]

    def _reduce(self, rows: list[Tensor], own: Tensor) -> None:
        width = sum(row.shape[1] for row in rows)
        padding = rows[0].new_zeros(self._rows, -width % self._block)
        values = torch.cat([*rows, padding], dim=1).view(self._rows, -1, self._block)
        levels, scales = quantized(values)
        message = packed(levels, scales)
        values -= levels.mul_(scales)
        del levels
        received = torch.empty_like(message)
        dist.all_to_all_single(received, message, group=self._axis)
        total = unpacked(received).sum(0)
        if self._is_replica:
            levels, scales = quantized(total)
            message = packed(levels, scales)
            # The owner of these elements sends the error of the sum in the next step.
            values[self._rank] += total - levels.mul_(scales)
            all_gather_tensor(received.flatten(0, 1), message, group=self._axis)
            total = unpacked(received)
        own.copy_(total.div_(self._dp).view(*own.shape[:-1], -1)[..., :width], non_blocking=True)
        if self._keeps_error:
            errors = values.view(self._rows, -1)[:, :width].split([r.shape[1] for r in rows], dim=1)
            torch._foreach_copy_(rows, errors)


# --- PowerSGD -------------------------------------------------------------------------------------


@dataclass
class _Batch:
    """Matrices of one shape (n, m) at equal distances in a flat gradient."""

    bucket: CompressedGradients  # which contains the matrices
    shape: tuple[int, int]
    names: list[str] = field(default_factory=list)  # of their parameters
    starts: list[int] = field(default_factory=list)

    @property
    def distance(self) -> int:
        """Elements from the beginning of one matrix to that of the next."""
        return self.starts[1] - self.starts[0] if len(self.starts) > 1 else math.prod(self.shape)

    def continues(self, start: int) -> bool:
        """Whether a matrix that begins at ``start`` is at the same distance from the last one."""
        return len(self.starts) == 1 or start - self.starts[-1] == self.distance

    def of(self, flat: Tensor) -> Tensor:
        """The matrices as a view (matrices, n, m) of the flat gradient."""
        size, step = (len(self.starts), *self.shape), (self.distance, self.shape[1], 1)
        return flat.as_strided(size, step, flat.storage_offset() + self.starts[0])


def batches_of(
    compressed: Sequence[CompressedGradients], rank: int
) -> tuple[list[_Batch], list[tuple[CompressedGradients, slice]]]:
    """All matrices of the buckets in few batches, and the ranges that are in none.

    Blocks of the model have equal matrices at equal distances, so the number of batches does not
    depend on the number of blocks.
    """
    batches: list[_Batch] = []
    latest: dict[tuple[CompressedGradients, int, int], _Batch] = {}
    rest: list[tuple[CompressedGradients, slice]] = []
    for bucket, held in ((one, held) for one in compressed for held in one.ranges):
        before, rows, columns = powersgd_matrix(held, rank)
        start, end = held.offset + before, held.offset + before + rows * columns
        around = slice(held.offset, start), slice(end, held.offset + held.length)
        rest += [(bucket, part) for part in around if part.start < part.stop]
        if rows == 0:
            continue
        batch = latest.get((bucket, rows, columns))
        if batch is None or not batch.continues(start):
            batch = latest[bucket, rows, columns] = _Batch(bucket, (rows, columns))
            batches.append(batch)
        batch.names.append(held.parameter.name)
        batch.starts.append(start)
    return batches, rest


def orthogonalize(matrices: Tensor) -> None:
    """Make the columns of each matrix orthonormal, in place.

    Gram-Schmidt with torch's kernels, for all matrices together. It runs twice. If a column depends
    on those before it, the first pass leaves a rounding error, which is not orthogonal to them. Two
    passes are enough (Giraud et al. 2005, "The loss of orthogonality in the Gram-Schmidt process").

    Args:
        matrices: (matrices, n, rank), fp32.
    """
    for _ in range(2):
        _orthogonalize_gram_schmidt(matrices, epsilon=_SMALL_NORM)


class PowerSgd(Compressor):
    """All-reduces two thin matrices instead of each gradient, and what is in no matrix as it is.

    P = sum (n, m) x Q of the previous step   --all-reduce, orthogonalize--> P
    Q = sum transposed (m, n) x P             --all-reduce, mean-----------> Q
    mean = P x Q transposed                   on every rank, the same bits
    """

    def __init__(
        self, run: Run, context: ParallelContext, compressed: Sequence[CompressedGradients]
    ) -> None:
        assert isinstance(run.compression, PowerSgdCompression)
        self._compression, self._rank_of = run.compression, run.compression.rank
        self._run, self._dp, self._device = run, run.grid.dp_cp, context.device
        self._is_replica = context.replica_group is not None
        self._axis = context.replica_group or context.shard_group
        self._shard = context.shard_rank
        self._batches, self._rest = batches_of(compressed, self._rank_of)
        elements = sum(self._sizes(1))
        # The same on every data rank. Computed on the host, so that all devices have the same.
        generator = torch.Generator().manual_seed(run.config.training.seed)
        self._initial = torch.randn(elements, generator=generator).to(self._device)
        self._right = self._initial.clone()  # Q of all matrices, flat
        self._next = torch.empty_like(self._right)

    def is_due(self, step: int) -> bool:
        return step >= self._compression.start_step

    def keep(self) -> None:
        self._right.copy_(self._next)

    def tensors(self) -> Iterator[Tensor]:
        yield from (self._initial, self._right, self._next)

    def factors(self) -> Iterator[tuple[str, Tensor]]:
        for batch, right in zip(self._batches, self._parts(self._right, 1), strict=True):
            yield from zip(batch.names, right, strict=True)

    def reduce(self, compressed: Sequence[CompressedGradients]) -> None:
        sums = [batch.of(batch.bucket.values) for batch in self._batches]
        rest = [bucket.values[part] for bucket, part in self._rest]
        elements = sum(self._sizes(0))
        sent = torch.empty(elements + sum(map(len, rest)), device=self._device)
        left = sent[:elements]
        if rest:
            torch.cat(rest, out=sent[elements:])
        lefts, rights = self._parts(left, 0), self._parts(self._next, 1)
        for matrices, p, q, initial in zip(
            sums, lefts, self._parts(self._right, 1), self._parts(self._initial, 1), strict=True
        ):
            # Only the directions of Q and P matter. Their squares could be too large for fp32.
            # A gradient of zeros makes Q zero. Then all later products would be zero, too.
            largest = torch.linalg.vector_norm(q, math.inf, dim=1, keepdim=True)
            torch.bmm(matrices, torch.where(largest == 0, initial, q / largest), out=p)
        dist.all_reduce(sent, group=self._axis)
        for matrices, p, q in zip(sums, lefts, rights, strict=True):
            largest = torch.linalg.vector_norm(p, math.inf, dim=1, keepdim=True)
            p /= torch.where(largest == 0, 1.0, largest)
            orthogonalize(p)
            torch.bmm(matrices.mT, p, out=q)
        dist.all_reduce(self._next, group=self._axis)
        self._next /= self._dp
        means = {}
        for bucket in compressed:
            in_place = self._is_replica and bucket.partition.device == self._device
            means[bucket] = bucket.partition if in_place else torch.zeros_like(bucket.values)
        for batch, p, q in zip(self._batches, lefts, rights, strict=True):
            torch.bmm(p, q.mT, out=batch.of(means[batch.bucket]))
        if rest:
            averages = (sent[elements:] / self._dp).split([*map(len, rest)])
            torch._foreach_copy_([means[bucket][part] for bucket, part in self._rest], averages)
        for bucket, mean in means.items():
            if self._compression.error_feedback:
                # Each sender compresses the sum of this many ranks' gradients.
                count = self._dp // self._run.grid.senders
                bucket.values[: mean.numel()].sub_(mean, alpha=count)
            if mean is not bucket.partition:
                bucket.partition.copy_(self._partition(bucket, mean), non_blocking=True)
        if self._compression.error_feedback and rest:
            torch._foreach_zero_(rest)  # all of it was sent

    def _partition(self, bucket: CompressedGradients, mean: Tensor) -> Tensor:
        if self._is_replica:
            return mean[: bucket.partition.numel()]
        shards = bucket.plan.shards
        if bucket.plan.layout == "flat":
            return mean.view(shards, -1)[self._shard]
        parts = mean.split(list(bucket.plan.sizes))
        return torch.cat([part.view(shards, -1)[self._shard] for part in parts])

    def _sizes(self, side: int) -> list[int]:
        return [len(each.names) * each.shape[side] * self._rank_of for each in self._batches]

    def _parts(self, flat: Tensor, side: int) -> list[Tensor]:
        """Views (matrices, n, rank) of all P, or (matrices, m, rank) of all Q if ``side`` is 1."""
        return [
            part.view(len(batch.names), batch.shape[side], self._rank_of)
            for batch, part in zip(self._batches, flat.split(self._sizes(side)), strict=True)
        ]

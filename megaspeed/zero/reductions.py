"""Sums of reduced gradients over axes that DeepSpeed does not know of.

Both run on the fragments, after ZeRO's own reduction: ranks that are compared here hold the same
ranges of the same parameters, so a sum of fragments is the fragment of the sum.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaspeed.zero.fragments import GradientFragment

_BUCKET_ELEMENTS = 1 << 26


def average_over_replicas(
    fragments: Iterable[GradientFragment], group: dist.ProcessGroup, device: torch.device
) -> None:
    """ZeRO-0, where every rank holds all gradients: averages them over the data axis, in place."""
    size = dist.get_world_size(group)
    if size == 1:
        return
    tensors = [fragment.values for fragment in fragments]
    for tensor in tensors:
        tensor.div_(size)
    _all_reduce_in_place(tensors, group, device)


def add_gradients_of_other_end(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, *, peer: int, device: torch.device
) -> None:
    """Adds the gradients that ``peer`` holds of a tied weight to this rank's, in place.

    The first and the last pipeline stage call this together. Each sends its gradients to the other.
    Both compute a + b, which has the same bits as b + a, so the copies stay equal.

    Args:
        tensors: this rank's gradients of the tied weight. ``peer`` has tensors of the same shapes.
        group: the process group along the pipeline axis.
        peer: the global rank of the other end of the pipeline.
        device: where messages are sent from; offloaded gradients travel through it.
    """
    for bucket in _buckets(tensors):
        own = torch.cat(bucket).to(device)
        others = torch.empty_like(own)
        exchange = [
            dist.P2POp(dist.isend, own, peer, group),
            dist.P2POp(dist.irecv, others, peer, group),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        _spread(own + others, bucket)


def _all_reduce_in_place(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Sums each tensor over the group, a bucket at a time; offloaded ones travel through
    ``device``.
    """
    for bucket in _buckets(tensors):
        flat = torch.cat(bucket).to(device)
        dist.all_reduce(flat, group=group)
        _spread(flat, bucket)


def _spread(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copies a bucket's sum back to where its parts came from."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors as flat pieces, in lists of one dtype and at most ``_BUCKET_ELEMENTS``."""
    bucket: list[Tensor] = []
    elements = 0
    for tensor in tensors:
        for piece in tensor.view(-1).split(_BUCKET_ELEMENTS):
            full = elements + piece.numel() > _BUCKET_ELEMENTS
            if bucket and (full or bucket[0].dtype != piece.dtype):
                yield bucket
                bucket, elements = [], 0
            bucket.append(piece)
            elements += piece.numel()
    if bucket:
        yield bucket


# The gradient norm over all logical parameters, each element counted once at every layout.
#
#     norm^2 = sum over ranks, fragments, owned elements of g^2
#
# "Owned" excludes the copies that tensor parallelism and tied weights make, and vocabulary padding.
# ``ParameterShard.owned_rows`` states which leading elements of a local parameter a rank owns.
#
# Before each optimizer step, one collective carries each rank's sum and everything else that the
# ranks must agree on, and the host reads the result once:
#
#     rank 0   squares  loss  notes...
#     rank 1   squares  loss  notes...       every rank receives all rows
#     ...


def owned_squares(
    fragments: Iterable[GradientFragment], owned_elements: Mapping[nn.Parameter, int]
) -> Tensor:
    """Sum of squares of the elements that this rank counts, a scalar in fp64.

    It is not finite if any element is not finite, including those that another rank counts.

    Args:
        fragments: this rank's reduced gradients.
        owned_elements: how many leading elements of each local parameter this rank counts.
    """
    owned: list[Tensor] = []
    others: list[Tensor] = []
    for fragment in fragments:
        length = max(0, owned_elements[fragment.parameter] - fragment.start)
        owned.append(fragment.values[:length])
        others.append(fragment.values[length:])
    squares = sum_of_squares(owned)
    others = [values for values in others if values.numel()]
    return squares + sum_of_squares(others) * 0.0 if others else squares


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of all elements, a scalar in fp64 on the first tensor's device.

    torch's multi-tensor norm launches a few kernels for any number of tensors. It accumulates in
    fp64, because in fp32 a CPU adds numbers one after another: 67 million of them lose half a
    percent of their sum.
    """
    present = [tensor for tensor in tensors if tensor.numel()]
    if not present:
        device = tensors[0].device if tensors else None
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(present, 2, dtype=torch.float64)
    return torch.stack(norms).square().sum()


def exchange(
    own: Sequence[Tensor | float | None], group: dist.ProcessGroup, device: torch.device
) -> list[list[float]]:
    """Every rank's numbers in fp64, by rank of ``group``: one collective, one host read.

    Each rank adds its row to the other ranks' zeros, which is exact. NCCL can run an all-reduce
    as a tree, whose latency grows with the logarithm of the number of ranks. An all-gather usually
    runs as a ring, whose latency grows with the number of ranks.

    Args:
        own: this rank's numbers, as many on every rank; scalars on any device, or None for 0.
        group: all ranks that take part.
        device: where the collective runs.
    """
    rows = torch.zeros(dist.get_world_size(group), len(own), dtype=torch.float64, device=device)
    row = rows[dist.get_rank(group)]
    for place, number in enumerate(own):
        if isinstance(number, Tensor):
            row[place].copy_(number.detach(), non_blocking=True)
        elif number is not None:
            # fill_ passes the number to a kernel; a tensor made from it would be copied to the
            # device, and the host would wait for the copy.
            row[place].fill_(number)
    dist.all_reduce(rows, group=group)
    numbers: list[list[float]] = rows.tolist()
    return numbers


def first_non_finite(
    fragments: Iterable[GradientFragment], names: Mapping[nn.Parameter, str]
) -> str | None:
    """Full name of this rank's first parameter whose gradient is not finite, if there is one."""
    for fragment in fragments:
        if not bool(torch.isfinite(fragment.values).all()):
            return names[fragment.parameter]
    return None

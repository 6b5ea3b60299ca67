"""Sums of reduced gradients over axes that DeepSpeed does not know of.

Both run on the fragments, after ZeRO's own reduction: ranks that are compared here hold the same
ranges of the same parameters, so a sum of fragments is the fragment of the sum.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

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

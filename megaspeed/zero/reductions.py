"""Sums of reduced gradients over axes that DeepSpeed does not know of.

Both run on the fragments, after ZeRO's own reduction: ranks that are compared here hold the same
ranges of the same parameters, so a sum of fragments is the fragment of the sum.
"""

from collections.abc import Iterable, Iterator, Sequence

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


def sum_tied_gradients(
    fragments: Iterable[GradientFragment],
    tied: nn.Parameter | None,
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """The two copies of a tied weight, on the first and the last pipeline stage, receive the sum of
    their gradients, in place. Nothing happens where this stage has no copy.
    """
    if tied is None:
        return
    own = [fragment.values for fragment in fragments if fragment.parameter is tied]
    _all_reduce_in_place(own, group, device)


def _all_reduce_in_place(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Sums each tensor over the group, a bucket at a time; offloaded ones travel through
    ``device``.
    """
    for bucket in _buckets(tensors):
        flat = torch.cat(bucket).to(device)
        dist.all_reduce(flat, group=group)
        parts = flat.split([part.numel() for part in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
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

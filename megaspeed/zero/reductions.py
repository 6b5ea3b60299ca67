"""Sums of reduced gradients over axes that DeepSpeed does not know of.

Both run on the fragments, after ZeRO's own reduction: ranks that are compared here hold the same
ranges of the same parameters, so a sum of fragments is the fragment of the sum.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaspeed.zero.fragments import GradientFragment


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
    """Sums each tensor over the group; offloaded ones travel through ``device``."""
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in same]).to(device)
        dist.all_reduce(flat, group=group)
        parts = flat.split([tensor.numel() for tensor in same])
        for tensor, part in zip(same, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

"""Sums that follow the reduction over the data axis: of a tied weight, and of the gradient norm.

They use the reduced fragments. The two pipeline stages that share a tied weight hold the same
ranges of it, so the sum of their fragments is the fragment of the sum.

The gradient norm counts each element of all logical parameters once, at every layout:

    norm^2 = sum over ranks, fragments, owned elements of g^2

A rank does not own copies that tensor parallelism or tied weights make, nor vocabulary padding.
``ParameterShard.owned_rows`` states which leading elements of a local parameter it owns.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from megaspeed.pipeline.p2p import as_message
from megaspeed.zero.model_states import Fragment

_MESSAGE_ELEMENTS = 1 << 26
"""A message needs a second one of its size in memory."""


def add_gradients_of_other_end(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, *, peer: int, device: torch.device
) -> None:
    """Add the gradients of a tied weight that ``peer`` holds to this rank's, in place.

    The first and the last pipeline stage call this together, and send each other their gradients.
    a + b has the same bits as b + a, so the copies stay equal.

    Args:
        tensors: this rank's gradients of the tied weight; ``peer`` has the same shapes.
        group: the process group along the pipeline axis.
        peer: the global rank of the other end of the pipeline.
        device: of the messages; offloaded gradients are copied to it.
    """
    for piece in chain.from_iterable(t.view(-1).split(_MESSAGE_ELEMENTS) for t in tensors):
        own = piece.to(device)
        others = torch.empty_like(own)
        messages = [
            dist.P2POp(dist.isend, as_message(own), peer, group),
            dist.P2POp(dist.irecv, as_message(others), peer, group),
        ]
        # One batch: if both ranks waited in their sends, neither would receive. A synchronisation
        # of the device between a send and its receive is enough for that.
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        piece.copy_(own + others)


class OwnedSquares:
    """Sum of squares of the elements that this rank owns, a scalar in fp64.

    It is not finite if any element is not finite, including those that another rank owns.

    Args:
        fragments: this rank's reduced gradients; views, which are read at each call.
        owned_elements: full name of a parameter -> how many leading elements this rank owns.
        weights: full name -> the factor of the parameter's squares; 1 if omitted.
    """

    def __init__(
        self,
        fragments: Iterable[Fragment],
        owned_elements: Mapping[str, int],
        weights: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        pieces: dict[float, list[Tensor]] = {1.0: []}  # by weight
        for fragment in fragments:
            length = max(0, owned_elements[fragment.name] - fragment.start)
            weight = weights.get(fragment.name, 1.0)
            pieces.setdefault(weight, []).append(fragment.values[:length])
            pieces.setdefault(0.0, []).append(fragment.values[length:])
        self._pieces = {weight: _joined(members) for weight, members in pieces.items()}

    def __call__(self) -> Tensor:
        squares = sum_of_squares(self._pieces[1.0])
        for weight, pieces in self._pieces.items():
            # What other ranks own has the weight 0. 0 times infinity is NaN, so it counts only if
            # it is not finite.
            if weight != 1.0 and pieces:
                squares = squares + sum_of_squares(pieces) * weight
        return squares


def _joined(pieces: Iterable[Tensor]) -> list[Tensor]:
    """The same elements in fewer tensors: pieces that follow each other in memory are one."""
    joined: list[Tensor] = []
    for piece in pieces:
        before = joined[-1] if joined else None
        if piece.numel() == 0:
            continue
        if before is not None and _follows(piece, before):
            whole = before.numel() + piece.numel()
            joined[-1] = before.as_strided((whole,), (1,), before.storage_offset())
        else:
            joined.append(piece)
    return joined


def _follows(piece: Tensor, before: Tensor) -> bool:
    same_memory = piece.untyped_storage()._cdata == before.untyped_storage()._cdata
    return same_memory and piece.storage_offset() == before.storage_offset() + before.numel()


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


def all_gather_numbers(
    own: Sequence[Tensor | float | None],
    group: dist.ProcessGroup,
    device: torch.device,
    summed: Tensor | None = None,
) -> list[list[float]]:
    """All-gather some numbers in fp64, with one collective and one read by the host:

        rank 0   squares  loss  notes...
        rank 1   squares  loss  notes...       every rank receives all rows
        ...

    Each rank adds its row to the zeros of the others, which is exact. The latency of NCCL's
    all-reduce can grow with the logarithm of the number of ranks (a tree), that of its all-gather
    usually grows with the number of ranks (a ring).

    Args:
        own: this rank's numbers, equally many on every rank; scalars on any device, or None for 0.
        group: all ranks that take part.
        device: of the collective.
        summed: (n,) fp64 on the device. It is replaced in place by its sum over the ranks.

    Returns:
        The numbers of each rank, in the order of ranks. With ``summed``, a last list has the sums.
    """
    # fp32 would round bytes of memory, which are among the numbers.
    each, sums = len(own), 0 if summed is None else len(summed)
    count = dist.get_world_size(group) * each  # of the numbers that are not summed
    all_numbers = torch.zeros(count + sums, dtype=torch.float64, device=device)
    rows, total = all_numbers[:count].view(-1, each), all_numbers[count:]
    if summed is not None:
        total.copy_(summed)
    row = rows[dist.get_rank(group)]
    for place, number in enumerate(own):
        if isinstance(number, Tensor):
            row[place].copy_(number.detach(), non_blocking=True)
        elif number is not None:
            # fill_ passes the number to a kernel; a tensor made from it would be copied to the
            # device, and the host would wait for the copy.
            row[place].fill_(number)
    dist.all_reduce(all_numbers, group=group)
    if summed is not None:
        summed.copy_(total)
    numbers: list[float] = all_numbers.tolist()
    by_rank = [numbers[start : start + each] for start in range(0, count, each)]
    return by_rank if summed is None else [*by_rank, numbers[count:]]


def first_non_finite(fragments: Iterable[Fragment]) -> str | None:
    """Full name of this rank's first parameter with a non-finite gradient, or None."""
    return next((one.name for one in fragments if not bool(one.values.isfinite().all())), None)

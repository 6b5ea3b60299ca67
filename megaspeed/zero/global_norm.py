"""The gradient norm over all logical parameters, each element counted once at every layout.

    norm^2 = sum over ranks, fragments, owned elements of g^2

"Owned" leaves out the copies that tensor parallelism and tied weights make, and vocabulary padding:
which leading elements of a local parameter a rank owns, the plan says
(``ParameterShard.owned_rows``).
"""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaspeed.zero.fragments import GradientFragment

_ELEMENTS_AT_ONCE = 1 << 22


def global_norm(
    fragments: Iterable[GradientFragment],
    owned_elements: Mapping[nn.Parameter, int],
    *,
    group: dist.ProcessGroup,
    copies: int,
    device: torch.device,
    loss: Tensor | None = None,
) -> Tensor:
    """The norm before clipping, the same scalar (fp32, on ``device``) on every rank.

    It is not finite where any gradient, counted here or not, or any rank's loss is not.

    Args:
        fragments: this rank's reduced gradients.
        owned_elements: how many leading elements of each local parameter this rank counts.
        group: all ranks, so that they agree on one number.
        copies: how many times their fragments together are the whole gradient.
        device: where the collective runs.
        loss: this rank's share of the step's loss, taken in so that all ranks agree on whether it
            is finite.
    """
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for fragment in fragments:
        length = max(0, owned_elements[fragment.parameter] - fragment.start)
        owned, others = fragment.values[:length], fragment.values[length:]
        if owned.numel():
            squares += sum_of_squares(owned).to(device)
        if others.numel():  # counted elsewhere, but they must be finite here too
            squares += sum_of_squares(others).to(device) * 0.0
    if loss is not None:
        squares += loss.detach().to(device, torch.float64) * 0.0
    dist.all_reduce(squares, group=group)
    return (squares / copies).sqrt().float()


def sum_of_squares(values: Tensor) -> Tensor:
    """Sum of the squares of a flat tensor, a scalar in fp64, to fp32's precision at any length.

    torch's vector_norm adds up one by one on a CPU: of 67 million fp32 elements it loses half a
    percent. Sums add up in a tree; they are taken in parts so that the squares need little memory.
    """
    parts = [part.float().square().sum() for part in values.split(_ELEMENTS_AT_ONCE)]
    return torch.stack(parts).sum(dtype=torch.float64)


def first_non_finite(
    fragments: Iterable[GradientFragment], names: Mapping[nn.Parameter, str]
) -> str | None:
    """Full name of this rank's first parameter whose gradient is not finite, if there is one."""
    for fragment in fragments:
        if not bool(torch.isfinite(fragment.values).all()):
            return names[fragment.parameter]
    return None

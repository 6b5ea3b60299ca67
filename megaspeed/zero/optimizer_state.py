"""The optimizer's state that this rank holds: fp32 master weights and AdamW's two moments.

ZeRO keeps each of the three as a flat tensor for every parameter group, laid out alike. Here they
are one list of fragments, each a flat range of one parameter, as the gradients are
(``fragments.py``). All of them are views: what is written to a fragment is the state.

    stage      a rank's fragments
    0          every parameter, whole
    1, 2       flat ranges: one partition of the parameters laid end to end
    3          an equal flat range of every parameter
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megaspeed.zero.fragments import held_ranges, partitions_parameters


@dataclass(frozen=True)
class StateFragment:
    """Elements [start, start + len(weights)) of ``parameter``'s flattened local state, fp32."""

    parameter: nn.Parameter
    start: int
    weights: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


def state_fragments(optimizer: Any) -> Iterator[StateFragment]:
    """This rank's fragments, padding left out; moments that do not exist yet are made, of zeros."""
    masters = master_partitions(optimizer)
    for held in held_ranges(optimizer):
        master = masters[held.group]
        moments = _moments(optimizer.optimizer, master)
        flat = (master.data, moments["exp_avg"], moments["exp_avg_sq"])
        views = [tensor.view(-1).narrow(0, held.offset, held.length) for tensor in flat]
        yield StateFragment(held.parameter, held.start, *views)


def load_state(optimizer: Any, steps_taken: int) -> None:
    """Lets the optimizer go on from fragments that were written to.

    The parameters that the model computes with are made from the master weights, on all ranks of
    the data axis: a collective over it.

    Args:
        optimizer: DeepSpeed's ZeRO optimizer.
        steps_taken: AdamW's step count, of which its bias correction is a function.
    """
    for master in master_partitions(optimizer):
        _moments(optimizer.optimizer, master)["step"].fill_(steps_taken)
    if partitions_parameters(optimizer):
        for sub_group in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)
    else:
        optimizer.update_lp_params()


def master_partitions(optimizer: Any) -> list[Tensor]:
    """The flat master weights of each parameter group (ZeRO-3: sub-group)."""
    if partitions_parameters(optimizer):
        return list(optimizer.fp32_partitioned_groups_flat)
    return list(optimizer.single_partition_of_fp32_groups)


def _moments(adamw: torch.optim.Optimizer, master: Tensor) -> dict[str, Tensor]:
    """torch's state of one flat parameter, which it makes in the first step."""
    state: dict[str, Tensor] = adamw.state[master]
    if not state:
        # As torch.optim.adam does for fused=True: an fp32 step count beside the parameter.
        state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
        state["exp_avg"] = torch.zeros_like(master.data)
        state["exp_avg_sq"] = torch.zeros_like(master.data)
    return state

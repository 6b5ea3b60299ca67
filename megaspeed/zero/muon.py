"""Muon (Jordan et al. 2024): orthogonalizes the updates of matrices, as the plan states.

    momentum       B = momentum B + G, in the partitions of this rank
    update         U = G + momentum B
    exchange       the parts of each section to its owner
    owner          O = about the orthogonal matrix nearest to U, by Newton-Schulz steps
    exchange       scale O back to the partitions; the scale depends on the shape
    optimizer      W = (1 - lr weight_decay) W - lr scale O

G is reduced, without the loss scale, and clipped by the norm over all parameters.

DeepSpeed 0.19.8 divides, clips and updates one parameter group before it reads the gradient of the
next one (runtime/zero/stage_1_and_2.py:3075-3145, runtime/zero/stage3.py:2910-2927). An exchange in
its step could overlap with nothing, and most owners would wait. So all updates are computed before
its step, which then applies them.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaspeed.config.deepspeed_keys import MuonParams
from megaspeed.config.resolve import Run
from megaspeed.data_axis.axis import DataAxis
from megaspeed.data_axis.orthogonalization import (
    Orthogonalization,
    OwnerRound,
    Part,
    elements_of_parts,
)
from megaspeed.model.gpt import DTYPES
from megaspeed.tensor_parallel.collectives import all_gather_tensor
from megaspeed.topology.context import ParallelContext
from megaspeed.zero.model_states import master_partitions, optimizer_state

_SMALLEST_NORM = 1e-7  # as in torch.optim.Muon

_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
"""The coefficients of each step; further steps use the last row (Amsel et al. 2025, "The Polar
Express", algorithm 1). They are for singular values of at most 1. Rounding can make one larger, so
all rows but the last are used for the input divided by 1.01."""
_POLAR_MARGIN = 1.01


class AdamWOrMuon(torch.optim.AdamW):
    """torch's AdamW, which applies Muon's ``updates`` to groups with ``is_orthogonalized``.

    It omits the wrappers that keep ``torch.compile`` out of an optimizer. Each of them imports
    torch's compiler, which takes 0.7 s of each rank's processor time. A run compiles no optimizer.
    """

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    _adamw = inspect.unwrap(torch.optim.AdamW.step)

    def __init__(self, groups: list[dict[str, Any]], **defaults: Any) -> None:
        super().__init__(groups, **defaults)
        self.updates: dict[Tensor, Tensor] = {}
        """Flat weights -> what the next step subtracts, without the learning rate."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply Muon's updates to its groups, whose gradients are not read; AdamW to the others."""
        groups = self.param_groups
        for group in groups:
            for weights in group["params"] if group["is_orthogonalized"] else ():
                weights.mul_(1 - group["lr"] * group["weight_decay"])
                weights.add_(self.updates.pop(weights), alpha=-group["lr"])
        self.param_groups = [group for group in groups if not group["is_orthogonalized"]]
        self._adamw()
        self.param_groups = groups


def orthogonalized(matrices: Tensor, coefficients: Sequence[tuple[float, float, float]]) -> Tensor:
    """Return about U V^T for matrices U S V^T (b, n, m), by one Newton-Schulz step for each of the
    coefficients.
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = x / norm.clamp(min=_SMALLEST_NORM).to(x.dtype)  # so no singular value is above 1
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def coefficients_of(params: MuonParams) -> Sequence[tuple[float, float, float]]:
    """Return the coefficients of each Newton-Schulz step."""
    if params.ns_coefficients != "polar_express":
        return [params.ns_coefficients] * params.ns_steps
    further = [_POLAR_EXPRESS[-1]] * params.ns_steps
    margin = [
        (a / _POLAR_MARGIN, b / _POLAR_MARGIN**3, c / _POLAR_MARGIN**5)
        for a, b, c in _POLAR_EXPRESS[:-1]
    ]
    return [*margin, *further][: params.ns_steps]


def shape_factor(params: MuonParams, rows: int, columns: int) -> float:
    """Return the factor of the update of a matrix (``adjust_lr_fn``)."""
    if params.adjust_lr_fn == "original":
        return float(max(1.0, rows / columns) ** 0.5)
    return float(0.2 * max(rows, columns) ** 0.5)


class MuonUpdates:
    """Computes the updates of this rank's partitions.

    Args:
        optimizer: DeepSpeed's, of an ``AdamWOrMuon``. Its groups are the buckets of the plan.
        gradients: this rank's part of the mean gradient of each bucket.
        axis: which rank orthogonalizes what.
        context: this rank's groups.
    """

    def __init__(
        self,
        optimizer: Any,
        gradients: Sequence[Tensor],
        run: Run,
        axis: DataAxis,
        context: ParallelContext,
    ) -> None:
        assert run.muon is not None
        self._optimizer, self._params = optimizer, run.muon
        self._context, self._dtype = context, DTYPES[run.muon_dtype]
        masters, buckets = master_partitions(optimizer), axis.buckets
        own = [i for i, bucket in enumerate(buckets) if bucket.group == "orthogonalized"]
        self._flat = {i: (buckets[i], masters[i], gradients[i]) for i in own}
        self._coefficients = coefficients_of(run.muon)
        context.create_stage_group()
        self._rounds: list[tuple[_Members, OwnerRound]] = []
        for plan in axis.orthogonalizations:
            members = _Members(plan, context)
            numbers = range(len(plan.rounds))
            self._rounds += [(members, plan.round_of(n, members.owner)) for n in numbers]
        self.sections_in_step = 0
        """How many sections this rank has orthogonalized in the last step."""

    def compute(self, gradient_scale: float) -> None:
        """Compute the updates of a step; a collective over the ranks of the pipeline stage.

        A round is sent to its owners while the one before is orthogonalized, and its results are
        sent back while the next one is.

        Args:
            gradient_scale: what gradients are multiplied by, for loss scale and clipping.
        """
        self.sections_in_step = 0
        updates = self._momentum_updates(gradient_scale)
        rounds = self._rounds
        arriving = [self._send_to_owners(*each, updates) for each in rounds[:1]]
        returning: list[tuple[OwnerRound, _Message]] = []
        for number, (members, own) in enumerate(rounds):
            for following in rounds[number + 1 : number + 2]:
                arriving.append(self._send_to_owners(*following, updates))
            results = self._orthogonalize(members, own, self._wait_for(arriving.pop(0)))
            while returning:
                self._take_back(*returning.pop(), updates)
            returning.append((own, self._send_back(members, own, results)))
            del results  # not held while the next batch is orthogonalized
        while returning:
            self._take_back(*returning.pop(), updates)
        for index, (_, weights, _) in self._flat.items():
            self._optimizer.optimizer.updates[weights] = updates[index]

    def _momentum_updates(self, gradient_scale: float) -> dict[int, Tensor]:
        """Advance the momentum. Return what is to be orthogonalized, for each bucket."""
        factor, updates = self._params.momentum, dict[int, Tensor]()
        for index, (bucket, weights, gradient) in self._flat.items():
            momentum = optimizer_state(self._optimizer, bucket, weights)["momentum"]
            momentum.mul_(factor).add_(gradient, alpha=gradient_scale)
            update = momentum
            if self._params.nesterov:
                update = (momentum * factor).add_(gradient, alpha=gradient_scale)
            updates[index] = update.to(self._dtype, copy=update is momentum)
        return updates

    def _send_to_owners(
        self, members: "_Members", own: OwnerRound, updates: Mapping[int, Tensor]
    ) -> "_Message":
        views = [_view(updates, part) for part in chain(*own.sends)]
        return self._exchange(members, views, own.sends, own.receives)

    def _orthogonalize(self, members: "_Members", own: OwnerRound, received: Tensor) -> Tensor:
        """Return the orthogonalized batch of this rank, flat; empty if it has none."""
        batch = own.batch
        if batch is None:
            return received
        rows, columns = batch.rows, batch.columns
        parts, tp = [*chain(*own.receives)], members.plan.tp
        flat = received.new_empty(batch.elements)
        places = [flat.narrow(0, part.place, part.length) for part in parts]
        torch._foreach_copy_(places, received.split([part.length for part in parts]))
        self.sections_in_step += len(batch.sections)
        # Parts are one after the other. A part with some columns of all rows is a matrix.
        parts_in_rows = tp if batch.sections[0].splits_columns else 1
        by_part = flat.view(batch.matrices, parts_in_rows, rows, columns // parts_in_rows)
        stacked = by_part.transpose(1, 2).reshape(-1, rows, columns)
        del received, flat, places, by_part  # their memory
        result = orthogonalized(stacked, self._coefficients)
        result = result * shape_factor(self._params, rows, columns)
        return (
            result.reshape(-1, rows, parts_in_rows, columns // parts_in_rows)
            .transpose(1, 2)
            .reshape(-1)
        )

    def _send_back(self, members: "_Members", own: OwnerRound, results: Tensor) -> "_Message":
        """Start to return the results. With several groups, wait, and start to gather them."""
        views = [results.narrow(0, part.place, part.length) for part in chain(*own.returns)]
        message = self._exchange(members, views, own.returns, own.results[members.number])
        if members.plan.groups == 1:
            return message
        gathered = results.new_empty(members.plan.groups, own.gathered)
        part, row = self._wait_for(message), gathered[members.number]
        row[: part.numel()] = part
        row[part.numel() :].zero_()
        group = members.replica_group
        return _Message(
            all_gather_tensor(gathered.view(-1), row, group=group, async_op=True), gathered, row
        )

    def _take_back(
        self, own: OwnerRound, message: "_Message", updates: Mapping[int, Tensor]
    ) -> None:
        """Copy returned results to their places in the updates."""
        rows = self._wait_for(message).view(len(own.results), -1)
        for row, of_members in zip(rows, own.results, strict=True):
            parts = [*chain(*of_members)]
            lengths = [part.length for part in parts]
            if parts:
                views = row[: sum(lengths)].split(lengths)
                torch._foreach_copy_([_view(updates, part) for part in parts], views)

    def _exchange(
        self,
        members: "_Members",
        views: list[Tensor],
        sent: Sequence[Sequence[Part]],
        received: Sequence[Sequence[Part]],
    ) -> "_Message":
        """Start an all-to-all among the members. ``views`` are what this rank sends, in order."""
        device = self._context.device
        message = torch.cat(views) if views else torch.empty(0, dtype=self._dtype, device=device)
        if members.plan.members == 1:
            return _Message(None, message, message)
        sizes, arriving = [*map(elements_of_parts, sent)], [*map(elements_of_parts, received)]
        arrived = message.new_empty(sum(arriving))
        group = members.group
        work = dist.all_to_all_single(arrived, message, arriving, sizes, group=group, async_op=True)
        return _Message(work, arrived, message)

    def _wait_for(self, message: "_Message") -> Tensor:
        """Make the current stream wait for what is received, and return it."""
        if message.work is not None:
            with self._context.timeline.part("data"):
                message.work.wait()
        return message.received


class _Members:
    """The ranks that exchange sections with this rank, and its place among them."""

    def __init__(self, plan: Orthogonalization, context: ParallelContext) -> None:
        self.plan = plan
        self.group = context.group_along(plan.axis)
        self.replica_group = context.group_along(plan.copies.replica_axis)
        self.owner = plan.owner_of(context.grid, context.rank)
        """The number of this rank as an owner."""
        self.number = self.owner // plan.members
        """The group of members that this rank is in."""


@dataclass(frozen=True)
class _Message:
    """A collective that may still run."""

    work: Any  # None if nothing is sent
    received: Tensor
    sent: Tensor  # must not be freed before the work has ended


def _view(updates: Mapping[int, Tensor], part: Part) -> Tensor:
    return updates[part.bucket].narrow(0, part.offset, part.length)

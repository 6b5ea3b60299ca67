"""The memory that a rank needs while Muon computes its updates (``zero/muon.py``).

    momentum    the updates of all buckets until now, and an fp32 temporary of the last one
    round r     all updates; what rounds r and r + 1 send and receive; what round r - 1 sends back;
                the batch of round r with its temporaries

A batch of E elements has Gram matrices of G elements. A Newton-Schulz step needs 3 E + 2 G
elements: the batch as it has arrived, before and after the step, the Gram matrix, and a polynomial
of it.
"""

from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

from megaspeed.config.resolve import BYTES_OF, Run
from megaspeed.data_axis.axis import DataAxis
from megaspeed.data_axis.orthogonalization import Orthogonalization

_RANKS = 8
"""Only the first ranks of a pipeline stage are compared. They have the most expensive batches, and
what ranks send differs little, so others need about as much, or less."""


def update_bytes(run: Run, axis: DataAxis) -> list[int]:
    """Return the bytes of the update of each bucket; 0 for those that AdamW updates."""
    width = BYTES_OF[run.muon_dtype]
    return [width * b.part * (b.group == "orthogonalized") for b in axis.buckets]


def orthogonalizing_bytes(run: Run, axis: DataAxis) -> int:
    """Return the most bytes that any rank needs for the updates of matrices; 0 without Muon."""
    plans, muon, updates = axis.orthogonalizations, run.muon, update_bytes(run, axis)
    if muon is None:
        return 0
    has_temporary = muon.nesterov and run.muon_dtype != "fp32"
    momentum = (
        until + has_temporary * BYTES_OF["fp32"] * bucket.part * (own > 0)
        for bucket, own, until in zip(axis.buckets, updates, accumulate(updates), strict=True)
    )
    ranks = range(min(_RANKS, run.grid.dp_cp * run.grid.tp))
    owners = ([(plan, plan.owner_of(run.grid, rank)) for plan in plans] for rank in ranks)
    most = max(max(_in_rounds(own), default=0) for own in owners)
    return max(*momentum, sum(updates) + BYTES_OF[run.muon_dtype] * most)


def _in_rounds(own_plans: Iterable[tuple[Orthogonalization, int]]) -> Iterator[int]:
    """For each round, yield the elements held beside the updates at its three largest moments.

    The rounds of all plans follow each other. Each plan comes with the number of the owner.
    """
    rounds = [
        _elements_of(plan, number, owner)
        for plan, owner in own_plans
        for number in range(len(plan.rounds))
    ]
    before = _Round()
    for own, following in pairwise([*rounds, _Round()]):
        yield before.returned + own.sent + following.sent
        yield before.returned + following.sent + own.working
        yield following.sent + own.batch + own.returned + own.returning
        before = own


class _Round(NamedTuple):
    """Elements of a rank in a round."""

    batch: int = 0
    working: int = 0  # batch and temporaries while it is orthogonalized
    sent: int = 0  # what is sent to owners, and what has arrived
    returning: int = 0  # freed when the replicas begin to gather
    returned: int = 0  # of results, until they are copied


def _elements_of(plan: Orthogonalization, number: int, owner: int) -> _Round:
    group, member = divmod(owner, plan.members)
    of_groups = [
        [batch for batch in plan.rounds[number] if batch.owner // plan.members == each]
        for each in range(plan.groups)
    ]
    batch = working = arriving = returned = 0
    for own in (batch for batch in of_groups[group] if batch.owner == owner):
        batch = arriving = own.elements
        working = 3 * batch + 2 * own.matrices * min(own.rows, own.columns) ** 2
        returned = sum(section.elements_with_copies for section in own.sections)
    sent = plan.held(of_groups[group], member, copies=False)
    results = [plan.held(batches, member, copies=True) for batches in of_groups]
    if plan.members > 1:  # otherwise what is sent is what arrives
        sent, returned = sent + arriving, returned + results[group]
    if plan.groups == 1:
        return _Round(batch, working, sent, 0, returned)
    return _Round(batch, working, sent, returned, plan.groups * max(results))

"""Check that the copies which several ranks hold are still equal, bit by bit.

    tensors                                                 ranks that hold copies
    parameters (ZeRO-0 to 2)                                data ranks
    master weights, parameters (ZeRO-3)                     replicas: at ZeRO-0, all data ranks
    norms, learned positions, row-parallel biases           tensor ranks
    key and value heads, if there are fewer than ranks      neighbouring tensor ranks
    a tied embedding                                        first and last pipeline stage
    experts                                                 ranks with the same experts
    the bias of routers                                     all ranks of a pipeline stage

If ZeRO partitions a tensor, the shards hold no copies of it. Then each part is compared along the
other axes, and with that of the replicas.

For each set of ranks that hold the same copies, a rank computes one number, a fingerprint, from the
bits of its copies. A rank has at most eleven fingerprints. One small collective and one read by the
host compare them. Only if they differ, a second comparison finds the parameter.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from megaspeed.model.parameters import EMBEDDING_WEIGHT, HEAD_WEIGHT, logical_name, parameter_named
from megaspeed.tensor_parallel.shards import key_value_replicas, query_rows
from megaspeed.topology.store import ranks_named
from megaspeed.training.worker import Worker
from megaspeed.zero.reductions import all_gather_numbers

_ELEMENTS_AT_ONCE = 1 << 22
_WORD_BYTES = 8
_FACTOR = 0x5851F42D4C957F2D
# The multipliers of splitmix64 (Steele, Lea and Flood 2014), as signed integers.
_MIX = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_LOW_BITS = 12  # the other 52 are exact in fp64


def fingerprint(tensors: Sequence[Tensor], elements_at_once: int = _ELEMENTS_AT_ONCE) -> Tensor:
    """One number for the bits of many tensors. It changes if a bit or the elements' order changes.

        elements, in order:    e0 e1 e2 e3 ...           each 8 bytes are one word
        a word w:              m = w + factor (w >> 32)  so the highest bits change many bits, too
        a batch of words:      b = m0 weight0 + m1 weight1 + ...                  modulo 2^64
        all batches:           (...(b0 factor + b1) factor + b2 ...)              modulo 2^64

    The weights are odd and look random. So two changes cancel out only by chance, and so does an
    exchange of two elements. The probability is about 2^-50. A batch takes a few kernels, whatever
    the number of tensors.

    Args:
        tensors: at least one; flat, of one type and on one device.
        elements_at_once: size of a batch, a multiple of 8; it bounds the memory used.

    Returns:
        An integer as an fp64 scalar, on the tensors' device.
    """
    total = tensors[0].new_zeros((), dtype=torch.int64)
    weights = total
    for batch in _batches(tensors, elements_at_once):
        padding = -sum(map(len, batch)) % _WORD_BYTES
        words = torch.cat([*batch, batch[0].new_zeros(padding)]).view(torch.int64)
        if not weights.dim():
            weights = _weights(len(words), words.device)
        words.add_(words >> 32, alpha=_FACTOR).mul_(weights[: len(words)])
        total = total * _FACTOR + words.sum()
    return (total >> _LOW_BITS).to(torch.float64)


def _weights(count: int, device: torch.device) -> Tensor:
    """The weights of the first ``count`` words, the same on every device."""
    weights = torch.arange(1, count + 1, device=device).mul_(_MIX[0])
    for shift, multiplier in ((30, _MIX[1]), (27, _MIX[2])):
        weights.bitwise_xor_(weights >> shift).mul_(multiplier)
    return weights.bitwise_or_(1)


def _batches(tensors: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """The elements in batches of ``size``; the last one may be smaller. All are views."""
    batch: list[Tensor] = []
    room = size
    for tensor in tensors:
        rest = tensor
        while len(rest):
            part, rest = rest[:room], rest[room:]
            batch.append(part)
            room -= len(part)
            if not room:
                yield batch
                batch, room = [], size
    if batch:
        yield batch


Kind = Literal["parameter", "master weight", "router bias"]
Holders = Literal["own", "tensor ranks", "key and value heads", "tied", "experts"]
Slot = tuple[Kind, Holders]
"""The copies from which a rank computes one fingerprint."""

_SLOTS: tuple[Slot, ...] = tuple(product(get_args(Kind), get_args(Holders)))
_MOST_NAMED = 4


class ReplicasDiffer(RuntimeError):
    """Ranks hold different values of something that must be equal."""


class Replicas:
    """Compares the copies of one run; all ranks call ``check`` together."""

    def __init__(self, worker: Worker, begin: int) -> None:
        self._worker = worker
        self._run, self._context = worker.run, worker.context
        self._key_value_replicas = key_value_replicas(worker.run.config.model, worker.run.grid.tp)
        self._last_equal = begin

    def check(self, step: int) -> None:
        """Raise ReplicasDiffer, with the same message on every rank, if copies differ."""
        copies: dict[Slot, list[Tensor]] = {slot: [] for slot in _SLOTS}
        for slot, _, values in self._copies():
            copies[slot].append(values)
        own = [fingerprint(tensors) if tensors else None for tensors in copies.values()]
        table = all_gather_numbers(own, self._context.world_group, self._context.device)
        differing = [
            slot
            for column, slot in enumerate(_SLOTS)
            if any(
                len({table[rank][column] for rank in ranks}) > 1 for ranks in self._ranks_of(slot)
            )
        ]
        if differing:
            raise ReplicasDiffer(self._describe(step, differing))
        self._last_equal = step

    def _copies(self) -> Iterator[tuple[Slot, str, Tensor]]:
        """All copies that this rank holds: slot, parameter's name, and flat range of values."""
        engine = self._worker.engine
        for one in engine.parameter_fragments():
            for holders, name, part in self._by_holders(one.name, one.start, one.values):
                yield ("parameter", holders), name, part
        for state in engine.state_fragments():
            for holders, name, part in self._by_holders(state.name, state.start, state.weights):
                yield ("master weight", holders), name, part
        if self._worker.balance is not None:
            for name, bias in self._worker.balance.named_biases():
                yield ("router bias", "tensor ranks"), name, bias

    def _by_holders(
        self, name: str, start: int, values: Tensor
    ) -> Iterator[tuple[Holders, str, Tensor]]:
        """Split the elements [start, start + len(values)) by the ranks that hold copies."""
        model = self._run.config.model
        described = parameter_named(model, name)
        split = described.split
        values = values.detach().view(-1)
        tied = model.tie_word_embeddings and self._run.grid.pp > 1
        if tied and name in (EMBEDDING_WEIGHT, HEAD_WEIGHT):
            yield "tied", logical_name(model, name), values
        elif split in ("replicated", "each head"):
            yield "tensor ranks", name, values
        elif split == "experts":
            yield "experts", name, values
        elif split == "heads" and self._key_value_replicas > 1:
            shard = self._worker.shards[name]
            width = shard.local_shape[1] if len(shard.local_shape) == 2 else 1
            rows = query_rows(described, shard)
            queries = max(0, min(rows * width - start, len(values)))
            yield "own", name, values[:queries]
            yield "key and value heads", name, values[queries:]
        else:
            yield "own", name, values

    def _ranks_of(self, slot: Slot) -> list[list[int]]:
        """Groups of ranks whose fingerprints must be equal."""
        kind, holders = slot
        grid = self._run.grid
        is_complete = kind == "router bias" or (kind == "parameter" and self._run.zero_stage < 3)
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(grid.world_size):
            at = grid.coordinates_of(rank)
            part = 0
            if not is_complete:
                part = grid.index_along(
                    rank, grid.copies_of(experts=holders == "experts").shard_axis
                )
            key: dict[Holders, tuple[int, ...]] = {
                "experts": (part, at.pp, grid.index_along(rank, "ep")),
                "own": (part, at.pp, at.tp),
                "tensor ranks": (part, at.pp),
                "key and value heads": (part, at.pp, at.tp // self._key_value_replicas),
                "tied": (part, at.tp),
            }
            if holders != "tied" or at.pp in (0, grid.pp - 1):
                groups.setdefault(key[holders], []).append(rank)
        return [ranks for ranks in groups.values() if len(ranks) > 1]

    def _describe(self, step: int, slots: Sequence[Slot]) -> str:
        """Gather the fingerprints of each parameter. Returns a message with those that differ."""
        own = {
            (slot, name): float(fingerprint([values]))
            for slot, name, values in self._copies()
            if slot in slots
        }
        by_rank: list[dict[tuple[Slot, str], float]] = [{}] * self._run.grid.world_size
        dist.all_gather_object(by_rank, own, self._context.world_group)
        found: list[str] = []
        for slot in slots:
            for ranks in self._ranks_of(slot):
                for key in (key for key in by_rank[ranks[0]] if key[0] == slot):
                    odd = _differing(ranks, [by_rank[rank][key] for rank in ranks])
                    if odd:
                        found.append(f"the {slot[0]} {key[1]} on {odd}")
        more = f", and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        return (
            f"after step {step}, copies that must be equal differ: "
            f"{'; '.join(found[:_MOST_NAMED])}{more}. They were last equal after step "
            f"{self._last_equal}. Every checkpoint of this run is of that step or an earlier one, "
            "so its copies are equal. If the same rank is named again, its device may be faulty: "
            "run without this host"
        )


def _differing(ranks: Sequence[int], fingerprints: Sequence[float]) -> str | None:
    """The ranks that differ from the majority; all if there is no majority; None if all agree."""
    if len(set(fingerprints)) == 1:
        return None
    (usual, count), *_ = Counter(fingerprints).most_common()
    if count <= len(fingerprints) / 2:
        return f"{ranks_named(list(ranks))}, which do not agree"
    odd = [rank for rank, own in zip(ranks, fingerprints, strict=True) if own != usual]
    return f"{ranks_named(odd)}, unlike {count} other ranks"

"""Check that the copies which several ranks hold are still equal, bit by bit.

    tensors                                                 ranks that hold copies
    parameters (ZeRO-0 to 2), master weights (ZeRO-0)       data ranks
    norms, learned positions, row-parallel biases           tensor ranks
    key and value heads, if there are fewer than ranks      neighbouring tensor ranks
    a tied embedding                                        first and last pipeline stage

If ZeRO partitions a tensor, data ranks hold no copies of it. Then each part is compared along the
other axes.

Each rank computes one number from the bits of its copies for each set of ranks
that hold the same copies. A rank has at most eight, which one small collective and one host read
compare. Only if they differ, a second comparison finds the parameter.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaspeed.model.parameters import (
    EMBEDDING_WEIGHT,
    HEAD_WEIGHT,
    logical_name,
    parameter_named,
)
from megaspeed.tensor_parallel.plan import key_value_replicas
from megaspeed.topology.grid import Coordinates
from megaspeed.topology.meeting import ranks_named
from megaspeed.training.worker import Worker
from megaspeed.zero.model_states import parameter_fragments
from megaspeed.zero.reductions import exchange

# One number for the bits of many tensors, which differs if a bit or the order of elements does.
#
#     elements, in order:    e0 e1 e2 e3 ...           8 bytes of them are one word
#     a word w:              m = w + factor (w >> 32)  so the highest bits change many bits, too
#     a batch of words:      b = m0 weight0 + m1 weight1 + ...                  modulo 2^64
#     all batches:           (...(b0 factor + b1) factor + b2 ...)              modulo 2^64
#
# The weights are odd and look random. So two changes, or two elements that are exchanged, do not
# cancel out, except by chance, which is about as probable as guessing 50 bits.

_ELEMENTS_AT_ONCE = 1 << 22
_WORD_BYTES = 8
_FACTOR = 0x5851F42D4C957F2D
# The multipliers of splitmix64 (Steele, Lea and Flood 2014), as signed integers.
_MIX = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_LOW_BITS = 12  # the other 52 are exact in fp64


def fingerprint(tensors: Sequence[Tensor], elements_at_once: int = _ELEMENTS_AT_ONCE) -> Tensor:
    """The number of the tensors' elements, one tensor after the other.

    It takes a few kernels for each batch of elements, however many tensors there are.

    Args:
        tensors: at least one; flat, of one type and on one device.
        elements_at_once: size of a batch, a multiple of 8; it bounds the memory used.

    Returns:
        A whole number as an fp64 scalar, on the tensors' device.
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
    """The weights of the first words, the same on every device."""
    weights = torch.arange(1, count + 1, device=device).mul_(_MIX[0])
    for shift, multiplier in ((30, _MIX[1]), (27, _MIX[2])):
        weights.bitwise_xor_(weights >> shift).mul_(multiplier)
    return weights.bitwise_or_(1)


def _batches(tensors: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """The elements in batches of `size`; the last one may be smaller. Only views."""
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


Kind = Literal["parameter", "master weight"]
Holders = Literal["own", "tensor ranks", "key and value heads", "tied"]
_SLOTS: tuple[tuple[Kind, Holders], ...] = tuple(
    (kind, holders) for kind in get_args(Kind) for holders in get_args(Holders)
)
_MOST_NAMED = 4


class ReplicasDiffer(RuntimeError):
    """Ranks hold different values of something that must be equal."""


@dataclass(frozen=True)
class _Part:
    """A flat range of one parameter that the same ranks hold copies of."""

    name: str
    kind: Kind
    holders: Holders
    values: Tensor


class Replicas:
    """Compares the copies of one run; all ranks call ``check`` together."""

    def __init__(self, worker: Worker, begin: int) -> None:
        self._worker = worker
        self._run, self._context = worker.run, worker.context
        self._last_equal = begin

    def check(self, step: int) -> None:
        """Raises ReplicasDiffer, with the same message on every rank, if copies differ."""
        parts: dict[tuple[Kind, Holders], list[Tensor]] = {slot: [] for slot in _SLOTS}
        for part in self._parts():
            parts[part.kind, part.holders].append(part.values)
        own = [fingerprint(parts[slot]) if parts[slot] else None for slot in _SLOTS]
        table = exchange(own, self._context.world_group, self._context.device)
        differing = [
            slot
            for place, slot in enumerate(_SLOTS)
            if any(
                len({table[rank][place] for rank in ranks}) > 1 for ranks in self._ranks_of(slot)
            )
        ]
        if differing:
            raise ReplicasDiffer(self._describe(step, differing))
        self._last_equal = step

    def _parts(self) -> Iterator[_Part]:
        engine = self._worker.engine
        for parameter, start, values in parameter_fragments(engine.module, engine.optimizer):
            yield from self._shared(parameter, "parameter", start, values)
        for fragment in engine.state_fragments():
            yield from self._shared(
                fragment.parameter, "master weight", fragment.start, fragment.weights
            )

    def _shared(
        self, parameter: nn.Parameter, kind: Kind, start: int, values: Tensor
    ) -> Iterator[_Part]:
        """The elements [start, start + len(values)), as parts that share their holders."""
        model = self._run.config.model
        name = self._worker.engine.names[parameter]
        split = parameter_named(model, name).split
        values = values.detach().view(-1)
        if self._is_tied(name):
            yield _Part(logical_name(model, name), kind, "tied", values)
        elif split in ("replicated", "each head"):
            yield _Part(name, kind, "tensor ranks", values)
        elif split == "heads" and self._key_value_replicas > 1:
            queries = self._first_key_element(name) - start
            queries = max(0, min(queries, len(values)))
            yield _Part(name, kind, "own", values[:queries])
            yield _Part(name, kind, "key and value heads", values[queries:])
        else:
            yield _Part(name, kind, "own", values)

    def _is_tied(self, name: str) -> bool:
        tied = self._run.config.model.tie_word_embeddings and self._run.grid.pp > 1
        return tied and name in (EMBEDDING_WEIGHT, HEAD_WEIGHT)

    @property
    def _key_value_replicas(self) -> int:
        return key_value_replicas(self._run.config.model, self._run.grid.tp)

    def _first_key_element(self, name: str) -> int:
        """The number of elements of the queries, which precede the keys in a rank's tensor."""
        shard = self._worker.shards[name]
        width = shard.local_shape[1] if len(shard.local_shape) == 2 else 1
        return len(shard.rows[0]) * width

    def _ranks_of(self, slot: tuple[Kind, Holders]) -> list[list[int]]:
        """Groups of ranks whose fingerprints must be equal."""
        grid = self._run.grid
        ends = (0, grid.pp - 1)
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(grid.world_size):
            place = grid.coordinates_of(rank)
            if slot[1] != "tied" or place.pp in ends:
                groups.setdefault(self._held_with(place, *slot), []).append(rank)
        return [ranks for ranks in groups.values() if len(ranks) > 1]

    def _held_with(self, place: Coordinates, kind: Kind, holders: Holders) -> tuple[int, ...]:
        """A key that is equal for all ranks that hold the same copies."""
        copies_over_dp = self._run.zero_stage <= (2 if kind == "parameter" else 0)
        part = 0 if copies_over_dp else place.dp
        return {
            "own": (part, place.pp, place.tp),
            "tensor ranks": (part, place.pp),
            "key and value heads": (part, place.pp, place.tp // self._key_value_replicas),
            "tied": (part, place.tp),
        }[holders]

    def _describe(self, step: int, slots: Sequence[tuple[Kind, Holders]]) -> str:
        """Gathers the fingerprints of single parameters, and names those that differ."""
        own = {
            (part.kind, part.holders, part.name): float(fingerprint([part.values]))
            for part in self._parts()
            if (part.kind, part.holders) in slots
        }
        marks: list[dict[tuple[Kind, Holders, str], float]] = [{}] * self._run.grid.world_size
        dist.all_gather_object(marks, own, self._context.world_group)
        found: list[str] = []
        for slot in slots:
            for ranks in self._ranks_of(slot):
                for key in (key for key in marks[ranks[0]] if key[:2] == slot):
                    odd = _differing(ranks, [marks[rank][key] for rank in ranks])
                    if odd:
                        found.append(f"the {key[0]} {key[2]} on {odd}")
        more = f", and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        return (
            f"after step {step}, copies that must be equal differ: "
            f"{'; '.join(found[:_MOST_NAMED])}{more}. They were last equal after step "
            f"{self._last_equal}. Every checkpoint of this run is of that step or an earlier one, "
            "so its copies are equal. If the same rank is named again, its device may be faulty: "
            "run without this host"
        )


def _differing(ranks: Sequence[int], marks: Sequence[float]) -> str | None:
    """The ranks that differ from the majority; all if there is no majority; None if all agree."""
    if len(set(marks)) == 1:
        return None
    (usual, count), *_ = Counter(marks).most_common()
    if count <= len(marks) / 2:
        return f"{ranks_named(list(ranks))}, which do not agree"
    odd = [rank for rank, own in zip(ranks, marks, strict=True) if own != usual]
    return f"{ranks_named(odd)}, unlike {count} other ranks"

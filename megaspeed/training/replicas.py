"""Check that the copies which several ranks hold are still equal, bit by bit.

    tensors                                                 ranks that hold copies
    parameters (ZeRO-0 to 2), master weights (ZeRO-0)       data ranks
    norms, learned positions, row-parallel biases           tensor ranks
    key and value heads, if there are fewer than ranks      neighbouring tensor ranks
    a tied embedding                                        first and last pipeline stage

If ZeRO partitions a tensor, data ranks hold no copies of it. Then each part is compared along the
other axes.

Each rank computes one number from the bits of its copies (fingerprint.py) for each set of ranks
that hold the same copies. A rank has at most eight, which one small collective and one host read
compare. Only if they differ, a second comparison finds the parameter.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

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
from megaspeed.training.fingerprint import fingerprint
from megaspeed.training.worker import Worker
from megaspeed.zero.global_norm import exchange
from megaspeed.zero.held_parameters import held_parameters

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
        for parameter, start, values in held_parameters(engine.module, engine.optimizer):
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

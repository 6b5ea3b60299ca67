"""Rank arithmetic: the coordinates of each rank on the four axes, and the groups along them.

``pp`` is the outermost axis and ``tp`` the innermost. So tensor-parallel ranks, which communicate
most, are neighbours on one machine, and pipeline ranks, which communicate least, are furthest
apart. Without a context axis (``cp``), this is the order of DeepSpeed's
``PipeModelDataParallelTopology``:

    rank = ((pp_rank * dp_size + dp_rank) * cp_size + cp_rank) * tp_size + tp_rank

Eight ranks as pp 2 x dp 2 x tp 2:

                      dp_rank 0           dp_rank 1
                   tp 0     tp 1       tp 0     tp 1
      pp_rank 0      0        1          2        3
      pp_rank 1      4        5          6        7

    >>> grid = Grid(pp=2, dp=2, tp=2)
    >>> grid.rank_of(Coordinates(pp=1, dp=0, cp=0, tp=1))
    5
    >>> grid.coordinates_of(6)
    Coordinates(pp=1, dp=1, cp=0, tp=0)
    >>> grid.groups_along("tp")  # share each matrix of one pipeline stage
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    >>> grid.groups_along("dp")  # hold the same weights, see different samples
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    >>> grid.groups_along("pp")  # send activations to each other
    [[0, 4], [1, 5], [2, 6], [3, 7]]

The ranks of a context group share samples: each holds a part of every sequence. Like data ranks,
they hold the same weights, so ZeRO partitions over both axes together: over ``shard`` neighbours of
the dp * cp ranks. The ``replicate`` ranks that hold the same partition are replicas:
dp * cp = replicate * shard.

    >>> hybrid = Grid(pp=1, dp=4, tp=2, replicate=2)
    >>> hybrid.groups_along("shard")  # each holds one complete set of partitions
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    >>> hybrid.groups_along("replica")  # hold the same partition
    [[0, 4], [1, 5], [2, 6], [3, 7]]

The experts of a model are not divided over ``tp``. Instead, ``ep`` neighbours of a pipeline stage
share them, whichever axes these ranks are on. The other ranks of the stage hold copies. ZeRO
partitions experts over ``expert_shard`` copies: dp * cp * tp = expert_replica * expert_shard * ep.

    >>> mixture = Grid(pp=1, dp=4, tp=2, ep=4, expert_shard=2)
    >>> mixture.groups_along("ep")  # each holds all experts once
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    >>> mixture.groups_along("expert_shard")  # hold the same experts
    [[0, 4], [1, 5], [2, 6], [3, 7]]

Plain integers: nothing here needs torch, a process or a GPU.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Axis = Literal[
    "pp", "dp", "cp", "tp", "replica", "shard", "stage", "ep", "expert_shard", "expert_replica"
]
"""``replicate`` divides data and context axis together into replica and shard. Along stage are the
shard x tp ranks of a pipeline stage in one replica. The last three divide the ranks of a stage."""
AXES: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")


class TopologyError(ValueError):
    """A grid, a rank or coordinates that cannot exist."""


class Coordinates(NamedTuple):
    """The index of a rank on each axis, counted from 0."""

    pp: int
    dp: int
    cp: int
    tp: int


class Copies(NamedTuple):
    """The ranks that hold the same weights: ZeRO partitions over ``shard`` of them, and
    ``replicate`` of them hold the same partition.
    """

    shard: int
    replicate: int
    shard_axis: Axis
    replica_axis: Axis

    @property
    def ranks(self) -> int:
        return self.shard * self.replicate

    @property
    def is_hybrid(self) -> bool:
        """Whether there are several shards and several replicas."""
        return self.shard > 1 < self.replicate

    @property
    def axis(self) -> Axis:
        """Over which gradients are reduced: the shards or, if there is one, the replicas."""
        return self.shard_axis if self.shard > 1 else self.replica_axis


@dataclass(frozen=True)
class Grid:
    """The sizes of the axes. See the module's docstring for the order of ranks."""

    pp: int  # pipeline stages
    dp: int  # copies of the model, each with its own samples
    tp: int  # ranks that share each matrix
    replicate: int = 1  # ranks that hold the same weights and the same partition of ZeRO
    cp: int = 1  # ranks that share each sequence
    ep: int | None = None  # ranks that share the experts; None if the model has none
    expert_shard: int = 1  # ranks over which ZeRO partitions the same experts

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if size < 1:
                raise TopologyError(f"every axis must have at least 1 rank, but {axis} is {size}")
        if self.replicate < 1 or self.dp_cp % self.replicate:
            name = "dp" if self.cp == 1 else "dp x cp"
            raise TopologyError(
                f"{name} {self.dp_cp} must be divisible by replicate {self.replicate}"
            )
        if self.dp_cp * self.tp % ((self.ep or 1) * self.expert_shard):
            raise TopologyError(
                f"dp x cp x tp {self.dp_cp * self.tp} must be divisible by ep {self.ep} x "
                f"expert_shard {self.expert_shard}"
            )

    def __str__(self) -> str:
        replicas = f" ({self.replicate} replicas x {self.shard})" if self.is_hybrid else ""
        context = f" x cp {self.cp}" if self.cp > 1 else ""
        experts = f", ep {self.ep}" if (self.ep or 1) > 1 else ""
        return f"pp {self.pp} x dp {self.dp}{context}{replicas} x tp {self.tp}{experts}"

    @property
    def dp_cp(self) -> int:
        """The number of ranks that hold the same weights, and sum their gradients."""
        return self.dp * self.cp

    @property
    def shard(self) -> int:
        """The number of ranks over which ZeRO partitions."""
        return self.dp_cp // self.replicate

    @property
    def is_hybrid(self) -> bool:
        return self.copies.is_hybrid

    @property
    def copies(self) -> Copies:
        """The ranks that hold the same weights, except those of experts."""
        return Copies(self.shard, self.replicate, "shard", "replica")

    @property
    def expert_copies(self) -> Copies:
        """The ranks that hold the same experts."""
        if not self.has_expert_axes:
            return self.copies
        replicate = self.size_along("expert_replica")
        return Copies(self.expert_shard, replicate, "expert_shard", "expert_replica")

    def copies_of(self, *, experts: bool) -> Copies:
        """The ranks that hold the same experts, or the same other weights."""
        return self.expert_copies if experts else self.copies

    @property
    def has_expert_axes(self) -> bool:
        """Whether the copies of experts are on other ranks than those of other weights. They are on
        the same ranks if ``ep`` is ``tp``.
        """
        return self.ep not in (None, self.tp)

    @property
    def senders(self) -> int:
        """How many ranks send compressed gradients to each other."""
        return self.replicate if self.replicate > 1 else self.shard

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_cp * self.tp

    def rank_of(self, coordinates: Coordinates) -> int:
        """The rank at ``coordinates``. Raises TopologyError if an index is outside its axis."""
        for axis, index in zip(AXES, coordinates, strict=True):
            size = self.size_along(axis)
            if not 0 <= index < size:
                raise TopologyError(
                    f"{axis} index {index} does not exist: "
                    f"{self} counts {axis} from 0 to {size - 1}"
                )
        stage = coordinates.pp * self.dp_cp
        return (stage + self.dp_cp_index(coordinates)) * self.tp + coordinates.tp

    def coordinates_of(self, rank: int) -> Coordinates:
        """The inverse of ``rank_of``. Raises TopologyError if there is no such rank."""
        if not 0 <= rank < self.world_size:
            raise TopologyError(
                f"rank {rank} does not exist: {self} counts ranks from 0 to {self.world_size - 1}"
            )
        others, tp_rank = divmod(rank, self.tp)
        others, cp_rank = divmod(others, self.cp)
        pp_rank, dp_rank = divmod(others, self.dp)
        return Coordinates(pp=pp_rank, dp=dp_rank, cp=cp_rank, tp=tp_rank)

    def dp_cp_index(self, coordinates: Coordinates) -> int:
        """The index of a rank among those that hold the same weights."""
        return coordinates.dp * self.cp + coordinates.cp

    def name_of(self, rank: int) -> str:
        """Such as "rank 5 (pp 1, dp 0, tp 1)"."""
        at = self.coordinates_of(rank)
        context = f", cp {at.cp}" if self.cp > 1 else ""
        return f"rank {rank} (pp {at.pp}, dp {at.dp}{context}, tp {at.tp})"

    def groups_along(self, axis: Axis) -> list[list[int]]:
        """All groups of ranks that differ in ``axis`` alone.

        They are sorted by their first rank, so all ranks can create them in the same order.
        """
        size, stride = self.size_along(axis), self._stride(axis)
        span = size * stride  # ranks between one set of interleaved groups and the next
        return [
            list(range(first, first + span, stride))
            for block in range(0, self.world_size, span)
            for first in range(block, block + stride)
        ]

    def index_along(self, rank: int, axis: Axis) -> int:
        """The index of a rank among those that differ from it in ``axis`` alone."""
        return rank // self._stride(axis) % self.size_along(axis)

    def size_along(self, axis: Axis) -> int:
        ep, ranks = self.ep or 1, self.dp_cp * self.tp
        joined = {"replica": self.replicate, "stage": self.shard * self.tp, "ep": ep}
        joined["expert_replica"] = ranks // (self.expert_shard * ep)
        return joined[axis] if axis in joined else int(getattr(self, axis))

    def _stride(self, axis: Axis) -> int:
        """The difference of two ranks that are neighbours on ``axis``."""
        ep = self.ep or 1
        strides: dict[Axis, int] = {
            **{"pp": self.dp_cp * self.tp, "dp": self.cp * self.tp, "cp": self.tp, "tp": 1},
            **{"shard": self.tp, "replica": self.shard * self.tp, "stage": 1},
            **{"ep": 1, "expert_shard": ep, "expert_replica": self.expert_shard * ep},
        }
        return strides[axis]

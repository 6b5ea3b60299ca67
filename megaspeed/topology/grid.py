"""Rank arithmetic: the coordinates of each rank on the three axes, and the groups along them.

``pp`` is the outermost axis and ``tp`` the innermost. So tensor-parallel ranks, which communicate
most, are neighbours on one machine, and pipeline ranks, which communicate least, are furthest
apart. This is the order of DeepSpeed's ``PipeModelDataParallelTopology``:

    rank = (pp_rank * dp_size + dp_rank) * tp_size + tp_rank

Eight ranks as pp 2 x dp 2 x tp 2:

                      dp_rank 0           dp_rank 1
                   tp 0     tp 1       tp 0     tp 1
      pp_rank 0      0        1          2        3
      pp_rank 1      4        5          6        7

    >>> grid = Grid(pp=2, dp=2, tp=2)
    >>> grid.rank_of(Coordinates(pp=1, dp=0, tp=1))
    5
    >>> grid.coordinates_of(6)
    Coordinates(pp=1, dp=1, tp=0)
    >>> grid.groups_along("tp")  # share each matrix of one pipeline stage
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    >>> grid.groups_along("dp")  # hold the same weights, see different samples
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    >>> grid.groups_along("pp")  # send activations to each other
    [[0, 4], [1, 5], [2, 6], [3, 7]]

ZeRO partitions over ``shard`` neighbours on the data axis. The ``replicate`` ranks that hold the
same partition are replicas: dp = replicate * shard.

    >>> hybrid = Grid(pp=1, dp=4, tp=2, replicate=2)
    >>> hybrid.groups_along("shard")  # each holds one complete set of partitions
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    >>> hybrid.groups_along("replica")  # hold the same partition
    [[0, 4], [1, 5], [2, 6], [3, 7]]

Plain integers: nothing here needs torch, a process or a GPU.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Axis = Literal["pp", "dp", "tp", "replica", "shard"]
"""``replicate`` divides the data axis into the last two."""
AXES: tuple[Axis, ...] = ("pp", "dp", "tp")


class TopologyError(ValueError):
    """A grid, a rank or coordinates that cannot exist."""


class Coordinates(NamedTuple):
    """The index of a rank on each axis, counted from 0."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True)
class Grid:
    """The sizes of the three axes. See the module's docstring for the order of ranks."""

    pp: int  # pipeline stages
    dp: int  # copies of the model, each with its own samples
    tp: int  # ranks that share each matrix
    replicate: int = 1  # data ranks that hold the same partition of ZeRO

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if size < 1:
                raise TopologyError(f"every axis must have at least 1 rank, but {axis} is {size}")
        if self.replicate < 1 or self.dp % self.replicate:
            raise TopologyError(f"dp {self.dp} must be divisible by replicate {self.replicate}")

    def __str__(self) -> str:
        replicas = f" ({self.replicate} replicas x {self.shard})" if self.is_hybrid else ""
        return f"pp {self.pp} x dp {self.dp}{replicas} x tp {self.tp}"

    @property
    def shard(self) -> int:
        """The number of data ranks over which ZeRO partitions."""
        return self.dp // self.replicate

    @property
    def is_hybrid(self) -> bool:
        """Whether the data axis has several shards and several replicas."""
        return 1 < self.replicate < self.dp

    @property
    def senders(self) -> int:
        """How many data ranks send compressed gradients to each other."""
        return self.replicate if self.replicate > 1 else self.shard

    @property
    def world_size(self) -> int:
        """The number of ranks, pp * dp * tp."""
        return self.pp * self.dp * self.tp

    def rank_of(self, coordinates: Coordinates) -> int:
        """The rank at ``coordinates``. Raises TopologyError if an index is outside its axis."""
        for axis, index in zip(AXES, coordinates, strict=True):
            size = self.size_along(axis)
            if not 0 <= index < size:
                raise TopologyError(
                    f"{axis} index {index} does not exist: "
                    f"{self} counts {axis} from 0 to {size - 1}"
                )
        return (coordinates.pp * self.dp + coordinates.dp) * self.tp + coordinates.tp

    def coordinates_of(self, rank: int) -> Coordinates:
        """The inverse of ``rank_of``. Raises TopologyError if there is no such rank."""
        if not 0 <= rank < self.world_size:
            raise TopologyError(
                f"rank {rank} does not exist: {self} counts ranks from 0 to {self.world_size - 1}"
            )
        replica, tp_rank = divmod(rank, self.tp)
        pp_rank, dp_rank = divmod(replica, self.dp)
        return Coordinates(pp=pp_rank, dp=dp_rank, tp=tp_rank)

    def name_of(self, rank: int) -> str:
        """Such as "rank 5 (pp 1, dp 0, tp 1)"."""
        at = self.coordinates_of(rank)
        return f"rank {rank} (pp {at.pp}, dp {at.dp}, tp {at.tp})"

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

    def size_along(self, axis: Axis) -> int:
        """The number of ranks on ``axis``."""
        size: int = self.replicate if axis == "replica" else getattr(self, axis)
        return size

    def _stride(self, axis: Axis) -> int:
        """The difference of two ranks that are neighbours on ``axis``."""
        data = {"dp": self.tp, "shard": self.tp, "replica": self.shard * self.tp}
        return {"pp": self.dp * self.tp, **data, "tp": 1}[axis]

"""How many ranks each axis has: pipeline x data x tensor is the number of processes."""

from dataclasses import dataclass

from megaspeed.config.errors import ConfigError
from megaspeed.config.parallel import ParallelConfig
from megaspeed.topology.grid import Grid


@dataclass(frozen=True)
class World:
    """The processes of a run.

    Args:
        size: number of processes.
        source: where that number comes from, such as "SLURM_NTASKS" or "--world-size".
        device_type: "cpu" or "cuda".
    """

    size: int
    source: str
    device_type: str = "cpu"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError([f"{self} must be at least 1 process"], where="the launch")

    def __str__(self) -> str:
        return f"world size {self.size} (from {self.source})"


def grid_in(parallel: ParallelConfig, world: World) -> Grid | None:
    """The grid with data "auto" worked out; None if the degrees do not multiply to the world."""
    pp, tp = parallel.pipeline, parallel.tensor
    dp = world.size // (pp * tp) if parallel.data == "auto" else parallel.data
    return Grid(pp, dp, tp) if pp * dp * tp == world.size else None


def data_degree_equation(grid: Grid, world: World) -> str:
    """How dp came about, with the numbers filled in, for errors about numbers that contain it."""
    return (
        f"dp {grid.dp} = world {world.size} / (pipeline {grid.pp} x tensor {grid.tp}), "
        f"world from {world.source}"
    )


def divisors(number: int) -> list[int]:
    """All divisors, ascending.

    >>> divisors(28)
    [1, 2, 4, 7, 14, 28]
    """
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]

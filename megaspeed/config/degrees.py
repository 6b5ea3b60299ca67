"""How many ranks each axis has: pipeline x data x tensor is the number of processes."""

from dataclasses import dataclass

from megaspeed.config.errors import ConfigError
from megaspeed.config.parallel import ParallelConfig


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


@dataclass(frozen=True)
class Degrees:
    """Ranks along each axis."""

    pp: int
    dp: int
    tp: int

    @property
    def world_size(self) -> int:
        """Number of processes: pp x dp x tp."""
        return self.pp * self.dp * self.tp


def degrees_in(parallel: ParallelConfig, world: World) -> Degrees | None:
    """The degrees with data "auto" worked out; None where they do not multiply to the world."""
    pp, tp = parallel.pipeline, parallel.tensor
    dp = world.size // (pp * tp) if parallel.data == "auto" else parallel.data
    return Degrees(pp, dp, tp) if pp * dp * tp == world.size else None


def data_degree_equation(degrees: Degrees, world: World) -> str:
    """How dp came about, with the numbers filled in, for errors about numbers that contain it."""
    return (
        f"dp {degrees.dp} = world {world.size} / (pipeline {degrees.pp} x tensor {degrees.tp}), "
        f"world from {world.source}"
    )


def divisors(number: int) -> list[int]:
    """All divisors, ascending.

    >>> divisors(28)
    [1, 2, 4, 7, 14, 28]
    """
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]

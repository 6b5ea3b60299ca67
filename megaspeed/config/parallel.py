"""The `parallel` section: how the ranks share the work."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from megaspeed.config.errors import ConfigError
from megaspeed.config.section import LARGEST_WORLD, Section
from megaspeed.topology.grid import Grid


class ParallelConfig(Section):
    """Degrees of the three axes. data x pipeline x tensor is the number of processes."""

    data: Annotated[int, Field(gt=0, le=LARGEST_WORLD)] | Literal["auto"] = Field(
        default="auto",
        description='Data-parallel degree (dp); "auto" = world size / (pipeline x tensor).',
    )
    pipeline: int = Field(
        default=1,
        gt=0,
        le=LARGEST_WORLD,
        description="Number of pipeline stages (pp); at most as many as there are blocks.",
    )
    tensor: int = Field(
        default=1,
        gt=0,
        le=LARGEST_WORLD,
        description="Tensor-parallel degree (tp); must divide the attention heads and the "
        "feed-forward width.",
    )
    spare_ranks: bool = Field(
        default=False,
        description="true: more processes may be started than the layout uses. The spare ranks "
        'wait until the run ends. With data "auto", data is the largest degree that fits the '
        "batch. false: the number of processes must fit.",
    )
    sequence_parallel: bool = Field(
        default=False,
        description="Split activations between blocks along the sequence over the tensor axis; "
        "data.sequence_length must be divisible by tensor.",
    )
    schedule: Literal["gpipe", "1f1b"] = Field(
        default="1f1b",
        description="Order of forwards and backwards in the pipeline. 1f1b keeps at most "
        "`pipeline` micro-batches in memory, gpipe all of them.",
    )
    gradient_reduction: Literal["auto", "per_step", "per_micro_batch"] = Field(
        default="auto",
        description="When gradients are reduced over dp: once a step (least traffic) or after "
        "every micro-batch (least memory). auto: per_step for ZeRO 0 and 1, "
        "per_micro_batch for 2 and 3.",
    )
    activation_checkpointing: Literal["none", "full"] = Field(
        default="none",
        description="full: keep only the inputs of each block and compute the rest again in "
        "the backward pass.",
    )


# How many ranks each axis has: pipeline x data x tensor is the number of processes.


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

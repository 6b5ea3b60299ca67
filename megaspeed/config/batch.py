"""The batch equation: train batch = micro-batch x accumulation steps x data-parallel degree.

`train_batch_size` is the anchor. Given it and one other, the third follows from the data degree,
so that changing the degrees never changes the batch that a step trains on. As in DeepSpeed,
accumulation steps that nothing determines are 1.
"""

from dataclasses import dataclass

from megaspeed.config.parallel import World, divisors, grid_in
from megaspeed.config.run import DeepSpeedKeys, RunConfig
from megaspeed.topology.grid import Grid


@dataclass(frozen=True)
class Batch:
    """The three numbers, which satisfy the equation for the run's data degree."""

    train_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int


@dataclass(frozen=True)
class StatedBatch:
    """The three numbers as the JSON has them; None where one is left out."""

    train: int | None
    micro: int | None
    accumulation: int | None

    @classmethod
    def of(cls, keys: DeepSpeedKeys) -> "StatedBatch":
        """The batch keys of a config."""
        return cls(
            keys.train_batch_size,
            keys.train_micro_batch_size_per_gpu,
            keys.gradient_accumulation_steps,
        )


def solve_batch(stated: StatedBatch, dp: int) -> Batch | None:
    """Fill in what is left out; None where no whole numbers satisfy the equation."""
    train, micro, accumulation = stated.train, stated.micro, stated.accumulation
    if train is None:
        if micro is None:
            return None
        accumulation = accumulation or 1
        return Batch(micro * accumulation * dp, micro, accumulation)
    if micro is None:
        accumulation = accumulation or 1
        micro = train // (accumulation * dp)
    elif accumulation is None:
        accumulation = train // (micro * dp)
    is_whole = min(micro, accumulation) > 0 and micro * accumulation * dp == train
    return Batch(train, micro, accumulation) if is_whole else None


def explain_batch(stated: StatedBatch, dp: int, equation: str) -> str:
    """Why `solve_batch` has no answer: the equation with its numbers, and the nearest valid ones.

    Args:
        stated: a batch for which `solve_batch` gave None.
        dp: the data-parallel degree.
        equation: how dp came about.
    """
    train, micro, accumulation = stated.train, stated.micro, stated.accumulation
    if train is None:
        return (
            "the batch is not determined: state train_batch_size, and "
            "train_micro_batch_size_per_gpu or gradient_accumulation_steps beside it"
        )
    if micro is not None and accumulation is not None:
        product = micro * accumulation * dp
        law = (
            f"train_batch_size {train} != train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {accumulation} x dp {dp} (= {product})"
        )
        totals = {*_neighbours(train, micro * dp), product}
        mend = _nearest_totals(train, totals, micro * dp, "gradient_accumulation_steps")
    elif micro is not None:
        law = _not_a_multiple(train, f"train_micro_batch_size_per_gpu {micro}", micro, dp)
        totals = _neighbours(train, micro * dp)
        mend = _nearest_totals(train, totals, micro * dp, "gradient_accumulation_steps")
        mend += _nearest_factors(train, micro, dp, "train_micro_batch_size_per_gpu")
    else:
        steps = accumulation or 1
        law = _not_a_multiple(train, f"gradient_accumulation_steps {steps}", steps, dp)
        totals = _neighbours(train, steps * dp)
        mend = _nearest_totals(train, totals, steps * dp, "train_micro_batch_size_per_gpu")
        mend += _nearest_factors(train, steps, dp, "gradient_accumulation_steps")
    return f"{law}. {mend}. {equation}"


def _not_a_multiple(train: int, factor_text: str, factor: int, dp: int) -> str:
    return (
        f"train_batch_size {train} is not a multiple of {factor_text} x dp {dp} (= {factor * dp})"
    )


def _neighbours(train: int, quantum: int) -> set[int]:
    """The multiples of the quantum next to `train`, itself included where it is one."""
    below = train // quantum * quantum
    above = below if below == train else below + quantum
    return {total for total in (below, above) if total > 0}


def _nearest_totals(train: int, totals: set[int], quantum: int, other: str) -> str:
    nearest = sorted(totals, key=lambda total: (abs(total - train), total))[:2]
    return "Nearest: " + " or ".join(f"{t} ({other} {t // quantum})" for t in nearest)


def _nearest_factors(train: int, factor: int, dp: int, name: str) -> str:
    """Values of the stated factor that keep `train` as it is; there are none unless dp divides."""
    if train % dp:
        return ""
    nearest = sorted(divisors(train // dp), key=lambda d: (abs(d - factor), d))[:3]
    return f"; or keep {train} with {name} {', '.join(map(str, sorted(nearest)))}"


# The grid of a run for a world size, which uses all processes or leaves some spare.
#
# parallel.data   parallel.spare_ranks   grid
# a number        false                  pipeline x data x tensor = world
# "auto"          false                  data = world / (pipeline x tensor)
# a number        true                   pipeline x data x tensor <= world
# "auto"          true                   the largest data that fits the batch sizes


def layout_in(config: RunConfig, world: World) -> Grid | None:
    """The grid; None if there is none. With spare ranks, the batch sizes fit it, too."""
    parallel = config.parallel
    if not parallel.spare_ranks:
        return grid_in(parallel, world)
    stated = StatedBatch.of(config)
    most = world.size // (parallel.pipeline * parallel.tensor)
    degrees = range(most, 0, -1) if parallel.data == "auto" else [parallel.data]
    for dp in degrees:
        if dp <= most and solve_batch(stated, dp) is not None:
            return Grid(parallel.pipeline, dp, parallel.tensor)
    return None

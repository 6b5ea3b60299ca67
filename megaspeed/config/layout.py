"""How a run divides over the processes: its grid and its batch.

    parallel.data   parallel.spare_ranks   grid
    a number        false                  pipeline x data x tensor = world
    "auto"          false                  data = world / (pipeline x tensor)
    a number        true                   pipeline x data x tensor <= world
    "auto"          true                   the largest data that fits the batch

    train_batch_size = micro-batch x gradient_accumulation_steps x data

`train_batch_size` and one other number give the third, so that changing the degrees never changes
the batch of a step. As in DeepSpeed, accumulation steps that nothing determines are 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megaspeed.config.deepspeed_keys import DeepSpeedKeys
from megaspeed.config.errors import ConfigError
from megaspeed.config.rules import Rules, divisors
from megaspeed.config.run import RunConfig
from megaspeed.config.scheduler import WarmupDecayLR, WarmupLR
from megaspeed.config.section import LARGEST_ACCUMULATION, LARGEST_NUMBER
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


@dataclass(frozen=True)
class Batch:
    """Three numbers that satisfy the batch equation."""

    train_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int


@dataclass(frozen=True)
class StatedBatch:
    """The three numbers in the JSON; None if omitted."""

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


def find_grid(config: RunConfig, world: World) -> Grid | None:
    """The grid, or None if no grid fits. With spare ranks, it also fits the batch."""
    parallel = config.parallel
    pp, tp = parallel.pipeline, parallel.tensor
    largest = world.size // (pp * tp)
    if not parallel.spare_ranks:
        dp = largest if parallel.data == "auto" else parallel.data
        return Grid(pp, dp, tp) if pp * dp * tp == world.size else None
    degrees = range(largest, 0, -1) if parallel.data == "auto" else [parallel.data]
    for dp in degrees:
        if dp <= largest and solve_batch(StatedBatch.of(config), dp) is not None:
            return Grid(pp, dp, tp)
    return None


def solve_batch(stated: StatedBatch, dp: int) -> Batch | None:
    """All three numbers, or None if no whole numbers satisfy the batch equation."""
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
    """Why `solve_batch` returns None: the equation with its numbers, and the nearest valid ones.

    Args:
        stated: a batch for which `solve_batch` returned None.
        dp: the data-parallel degree.
        equation: how dp is computed.
    """
    train, micro, accumulation = stated.train, stated.micro, stated.accumulation
    if train is None:
        return (
            "the batch is not determined: state train_batch_size, and also "
            "train_micro_batch_size_per_gpu or gradient_accumulation_steps"
        )
    if micro is not None:
        name, factor = "train_micro_batch_size_per_gpu", micro
        other = "gradient_accumulation_steps"
    else:
        name, factor = "gradient_accumulation_steps", accumulation or 1
        other = "train_micro_batch_size_per_gpu"
    quantum = factor * dp
    below = train // quantum * quantum
    totals = {total for total in (below, below if below == train else below + quantum) if total > 0}
    alternative = ""
    if micro is not None and accumulation is not None:
        product = micro * accumulation * dp
        totals.add(product)
        law = (
            f"train_batch_size {train} != train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {accumulation} x dp {dp} (= {product})"
        )
    else:
        law = (
            f"train_batch_size {train} is not a multiple of {name} {factor} x dp {dp} (= {quantum})"
        )
        if train % dp == 0:
            factors = sorted(divisors(train // dp), key=lambda d: (abs(d - factor), d))[:3]
            valid = ", ".join(map(str, sorted(factors)))
            alternative = f"; or keep {train} with {name} {valid}"
    nearest = sorted(totals, key=lambda total: (abs(total - train), total))[:2]
    mend = " or ".join(f"{total} ({other} {total // quantum})" for total in nearest)
    return f"{law}. Nearest: {mend}{alternative}. {equation}"


@dataclass(frozen=True)
class Launch:
    """A config and the processes that will run it."""

    config: RunConfig
    world: World

    def grid_and_batch(self) -> tuple[Grid | None, Batch | None]:
        """The grid and the batch; None if there is none."""
        grid = find_grid(self.config, self.world)
        if grid is None:
            return None, None
        return grid, solve_batch(StatedBatch.of(self.config), grid.dp)


LAUNCH_RULES = Rules[Launch]()
"""Rules that depend on the number and the kind of processes."""

rule = LAUNCH_RULES.reads

_DEGREES = ("parallel.data", "parallel.tensor", "parallel.pipeline", "parallel.spare_ranks")
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@rule(*_DEGREES)
def degrees_fit_world(launch: Launch) -> Iterator[str]:
    parallel, world = launch.config.parallel, launch.world
    data = 1 if parallel.data == "auto" else parallel.data
    group = parallel.pipeline * parallel.tensor
    around = world.size // group * group
    if parallel.spare_ranks:
        if world.size < data * group:
            yield (
                f"{world} is less than parallel.pipeline {parallel.pipeline} x data {data} x "
                f"parallel.tensor {parallel.tensor} = {data * group}; start at least "
                f"{data * group} processes"
            )
    elif around != world.size:
        sizes = " or ".join(str(size) for size in (around, around + group) if size > 0)
        yield (
            f"{world} is not divisible by parallel.pipeline {parallel.pipeline} x parallel.tensor "
            f"{parallel.tensor} = {group}; start {sizes} processes, or choose degrees whose "
            f"product is one of {', '.join(map(str, divisors(world.size)))}"
        )
    elif parallel.data not in ("auto", world.size // group):
        yield (
            f"parallel.data {data} x parallel.pipeline {parallel.pipeline} x parallel.tensor "
            f"{parallel.tensor} = {data * group}, and not {world}; set parallel.data to "
            f'{world.size // group} or "auto", or start {data * group} processes'
        )


@rule(*_BATCH, *_DEGREES)
def batch_multiplies(launch: Launch) -> Iterator[str]:
    parallel, world = launch.config.parallel, launch.world
    stated = StatedBatch.of(launch.config)
    grid, batch = launch.grid_and_batch()
    if not parallel.spare_ranks:
        if grid is not None and batch is None:
            yield explain_batch(
                stated,
                grid.dp,
                f"dp {grid.dp} = world {world.size} / (pipeline {grid.pp} x tensor {grid.tp}), "
                f"world from {world.source}",
            )
        return
    largest = world.size // (parallel.pipeline * parallel.tensor)
    dp = min(largest, 1) if parallel.data == "auto" else parallel.data
    if stated.train is None:
        yield "parallel.spare_ranks needs the same batch at every dp; state train_batch_size"
    elif 0 < dp <= largest and grid is None:
        yield explain_batch(stated, dp, f"no dp of {largest} or less fits {world}")


@rule(*_BATCH, *_DEGREES)
def micro_batches_are_bounded(launch: Launch) -> Iterator[str]:
    grid, batch = launch.grid_and_batch()
    if grid and batch and batch.gradient_accumulation_steps > LARGEST_ACCUMULATION:
        yield (
            f"gradient_accumulation_steps {batch.gradient_accumulation_steps:,} (train_batch_size "
            f"{batch.train_batch_size:,} / (train_micro_batch_size_per_gpu "
            f"{batch.micro_batch_size:,} x dp {grid.dp})) must be at most "
            f"{LARGEST_ACCUMULATION:,}; raise train_micro_batch_size_per_gpu"
        )


@rule(
    "optimizer.params.lr",
    "scheduler.params.warmup_max_lr",
    "training.lr_scaling",
    "training.base_batch_size",
    *_BATCH,
    *_DEGREES,
)
def scaled_rates_are_bounded(launch: Launch) -> Iterator[str]:
    config, training = launch.config, launch.config.training
    _, batch = launch.grid_and_batch()
    if batch is None or training.lr_scaling == "none" or training.base_batch_size is None:
        return
    rates: dict[str, float | None] = {"optimizer.params.lr": config.optimizer.params.lr}
    if isinstance(config.scheduler, WarmupLR | WarmupDecayLR):
        rates["scheduler.params.warmup_max_lr"] = config.scheduler.params.warmup_max_lr
    factor = training.lr_factor(batch.train_batch_size)
    for key, rate in rates.items():
        if rate is not None and not 0 < rate * factor <= LARGEST_NUMBER:
            yield (
                f"{key} {rate:g} x {factor:g} = {rate * factor:g} must be more than 0 and at most "
                f'{LARGEST_NUMBER:g} (training.lr_scaling "{training.lr_scaling}", '
                f"train_batch_size {batch.train_batch_size:,}); state the rate for "
                f"training.base_batch_size {training.base_batch_size:,} samples"
            )


@rule("fp16.enabled")
def fp16_needs_a_gpu(launch: Launch) -> Iterator[str]:
    if launch.config.fp16.enabled and launch.world.device_type == "cpu":
        yield (
            "fp16.enabled is true and this run is on a CPU, which cannot train in fp16; set "
            "bf16.enabled instead, or neither for fp32"
        )

"""Rules that depend on the number and the kind of processes."""

from collections.abc import Iterator

from megaspeed.config.batch import Batch, StatedBatch, explain_batch, layout_in, solve_batch
from megaspeed.config.parallel import data_degree_equation, divisors
from megaspeed.config.rules import Launch, Rule, rule
from megaspeed.config.scheduler import WarmupDecayLR, WarmupLR
from megaspeed.config.section import LARGEST_ACCUMULATION, LARGEST_NUMBER
from megaspeed.topology.grid import Grid


@rule("parallel.tensor", "parallel.pipeline", "parallel.spare_ranks")
def pipeline_and_tensor_divide_world(launch: Launch) -> Iterator[str]:
    parallel, world = launch.config.parallel, launch.world
    product = parallel.pipeline * parallel.tensor
    if world.size % product and not parallel.spare_ranks:
        around = world.size // product * product
        sizes = " or ".join(str(size) for size in (around, around + product) if size > 0)
        valid = ", ".join(map(str, divisors(world.size)))
        yield (
            f"{world} is not divisible by parallel.pipeline {parallel.pipeline} x parallel.tensor "
            f"{parallel.tensor} = {product}; start {sizes} processes, or choose degrees whose "
            f"product is one of {valid}"
        )


@rule("parallel.data", "parallel.tensor", "parallel.pipeline", "parallel.spare_ranks")
def ranks_suffice_where_some_may_be_spare(launch: Launch) -> Iterator[str]:
    parallel, world = launch.config.parallel, launch.world
    data = 1 if parallel.data == "auto" else parallel.data
    product = parallel.pipeline * data * parallel.tensor
    if parallel.spare_ranks and world.size < product:
        yield (
            f"{world} is less than parallel.pipeline {parallel.pipeline} x data {data} x "
            f"parallel.tensor {parallel.tensor} = {product}; start at least {product} processes"
        )


@rule("parallel.data", "parallel.tensor", "parallel.pipeline", "parallel.spare_ranks")
def degrees_multiply_to_world(launch: Launch) -> Iterator[str]:
    parallel, world = launch.config.parallel, launch.world
    rest, remainder = divmod(world.size, parallel.pipeline * parallel.tensor)
    if parallel.spare_ranks or parallel.data == "auto" or remainder:
        return
    if parallel.data != rest:
        product = parallel.data * parallel.pipeline * parallel.tensor
        yield (
            f"parallel.data {parallel.data} x parallel.pipeline {parallel.pipeline} x "
            f"parallel.tensor {parallel.tensor} = {product}, and not {world}; set parallel.data to "
            f'{rest} or "auto", or start {product} processes'
        )


@rule(
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "parallel.data",
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.spare_ranks",
)
def batch_multiplies(launch: Launch) -> Iterator[str]:
    config = launch.config
    if config.parallel.spare_ranks:
        yield from _no_layout_with_spare_ranks(launch)
        return
    grid = layout_in(config, launch.world)
    if grid is not None:
        stated = StatedBatch.of(config)
        if solve_batch(stated, grid.dp) is None:
            equation = data_degree_equation(grid, launch.world)
            yield explain_batch(stated, grid.dp, equation)


def _no_layout_with_spare_ranks(launch: Launch) -> Iterator[str]:
    parallel, stated = launch.config.parallel, StatedBatch.of(launch.config)
    most = launch.world.size // (parallel.pipeline * parallel.tensor)
    dp = min(most, 1) if parallel.data == "auto" else parallel.data
    if stated.train is None:
        yield "parallel.spare_ranks needs the same batch at every dp; state train_batch_size"
    elif 0 < dp <= most and layout_in(launch.config, launch.world) is None:
        yield explain_batch(stated, dp, f"no dp of {most} or less fits {launch.world}")


def _grid_and_batch(launch: Launch) -> tuple[Grid | None, Batch | None]:
    """None if there is no layout, or if the batch does not multiply; other rules report these."""
    grid = layout_in(launch.config, launch.world)
    if grid is None:
        return None, None
    return grid, solve_batch(StatedBatch.of(launch.config), grid.dp)


@rule(
    "train_micro_batch_size_per_gpu",
    "train_batch_size",
    "gradient_accumulation_steps",
    "parallel.data",
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.spare_ranks",
)
def micro_batches_are_bounded(launch: Launch) -> Iterator[str]:
    grid, batch = _grid_and_batch(launch)
    if batch is not None and batch.gradient_accumulation_steps > LARGEST_ACCUMULATION:
        yield (
            f"gradient_accumulation_steps {batch.gradient_accumulation_steps:,} (train_batch_size "
            f"{batch.train_batch_size:,} / (train_micro_batch_size_per_gpu "
            f"{batch.micro_batch_size:,} x dp {grid.dp if grid else 1})) must be at most "
            f"{LARGEST_ACCUMULATION:,}; raise train_micro_batch_size_per_gpu"
        )


@rule(
    "optimizer.params.lr",
    "scheduler.params.warmup_max_lr",
    "training.lr_scaling",
    "training.base_batch_size",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "parallel.data",
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.spare_ranks",
)
def scaled_rates_are_bounded(launch: Launch) -> Iterator[str]:
    config, training = launch.config, launch.config.training
    _, batch = _grid_and_batch(launch)
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


LAUNCH_RULES: tuple[Rule[Launch], ...] = (
    pipeline_and_tensor_divide_world,
    ranks_suffice_where_some_may_be_spare,
    degrees_multiply_to_world,
    batch_multiplies,
    micro_batches_are_bounded,
    scaled_rates_are_bounded,
    fp16_needs_a_gpu,
)

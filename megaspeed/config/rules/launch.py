"""Laws that the number and the kind of processes take part in."""

from collections.abc import Iterator

from megaspeed.config.batch import StatedBatch, explain_batch, solve_batch
from megaspeed.config.degrees import data_degree_equation, divisors, grid_in
from megaspeed.config.rules.rule import Launch, Rule, rule
from megaspeed.config.section import LARGEST_ACCUMULATION


@rule("parallel.tensor", "parallel.pipeline")
def pipeline_and_tensor_divide_world(launch: Launch) -> Iterator[str]:
    parallel, world = launch.config.parallel, launch.world
    product = parallel.pipeline * parallel.tensor
    if world.size % product:
        around = world.size // product * product
        sizes = " or ".join(str(size) for size in (around, around + product) if size > 0)
        valid = ", ".join(map(str, divisors(world.size)))
        yield (
            f"{world} is not divisible by parallel.pipeline {parallel.pipeline} x parallel.tensor "
            f"{parallel.tensor} = {product}; start {sizes} processes, or choose degrees whose "
            f"product is one of {valid}"
        )


@rule("parallel.data", "parallel.tensor", "parallel.pipeline")
def degrees_multiply_to_world(launch: Launch) -> Iterator[str]:
    parallel, world = launch.config.parallel, launch.world
    rest, remainder = divmod(world.size, parallel.pipeline * parallel.tensor)
    if parallel.data != "auto" and not remainder and parallel.data != rest:
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
)
def batch_multiplies(launch: Launch) -> Iterator[str]:
    grid = grid_in(launch.config.parallel, launch.world)
    if grid is not None:
        stated = StatedBatch.of(launch.config)
        if solve_batch(stated, grid.dp) is None:
            equation = data_degree_equation(grid, launch.world)
            yield explain_batch(stated, grid.dp, equation)


@rule(
    "train_micro_batch_size_per_gpu",
    "train_batch_size",
    "gradient_accumulation_steps",
    "parallel.data",
    "parallel.tensor",
    "parallel.pipeline",
)
def micro_batches_are_bounded(launch: Launch) -> Iterator[str]:
    grid = grid_in(launch.config.parallel, launch.world)
    batch = None if grid is None else solve_batch(StatedBatch.of(launch.config), grid.dp)
    if batch is not None and batch.gradient_accumulation_steps > LARGEST_ACCUMULATION:
        yield (
            f"gradient_accumulation_steps {batch.gradient_accumulation_steps:,} (train_batch_size "
            f"{batch.train_batch_size:,} / (train_micro_batch_size_per_gpu "
            f"{batch.micro_batch_size:,} x dp {grid.dp if grid else 1})) must be at most "
            f"{LARGEST_ACCUMULATION:,}; raise train_micro_batch_size_per_gpu"
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
    degrees_multiply_to_world,
    batch_multiplies,
    micro_batches_are_bounded,
    fp16_needs_a_gpu,
)

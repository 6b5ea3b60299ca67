"""How a run divides over the processes: its grid and its batch.

    parallel.data   parallel.spare_ranks   grid
    a number        false                  pipeline x data x context x tensor = world
    "auto"          false                  data = world / (pipeline x context x tensor)
    a number        true                   pipeline x data x context x tensor <= world
    "auto"          true                   the largest data that fits the batch

    train_batch_size = micro-batch x gradient_accumulation_steps x data

``train_batch_size`` and one other number give the third, so that changing the degrees never
changes the batch of a step. As in DeepSpeed, accumulation steps are 1 if the other numbers do not
determine them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Self

from megaspeed.config.batch_schedule import BatchSchedule
from megaspeed.config.errors import ConfigError
from megaspeed.config.rules import RULES, check, divisors, head_degrees, listed
from megaspeed.config.run import ParallelConfig, RunConfig
from megaspeed.config.section import LARGEST_ACCUMULATION
from megaspeed.topology.grid import Grid


@dataclass(frozen=True)
class World:
    """The processes of a run."""

    size: int  # number of processes
    source: str  # where that number comes from, such as "SLURM_NTASKS" or "--world-size"
    device_type: str = "cpu"  # or "cuda"

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
    fewest: int = 1
    """The smallest number of micro-batches if the last two are omitted."""
    others: tuple[int, ...] = ()
    """The other batches of the schedule whose largest batch is ``train``."""

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Return the batch that a config states; for "auto", with the largest possible size."""
        train, micro, accumulation = (getattr(config, key) for key in BATCH_KEYS)
        others: list[int] = []
        if config.train_batch_size_schedule is not None:
            *others, largest = BatchSchedule.of(config.train_batch_size_schedule, None).batches
            train = train or largest
        fewest = 1
        if micro == "auto":
            groups, micro = config.parallel.micro_batch_groups, None
            fewest = config.parallel.pipeline * (1 if groups == "auto" else groups)
            # 1f1b keeps two in any case
            fewest = max(fewest, 3 if config.parallel.extra_in_flight else 1)
        return cls(train, micro, accumulation, fewest, tuple(others))

    @property
    def is_determined(self) -> bool:
        """Whether the batch or the micro-batch is stated; accumulation steps alone give neither."""
        return self.train is not None or self.micro is not None


BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""The keys of a ``StatedBatch``, in its order."""

_UNDETERMINED = (
    "the batch is not determined: write train_batch_size; the other two numbers follow from it, "
    "unless you write one of them, too"
)


def find_grid(config: RunConfig, world: World) -> Grid | None:
    """Return the grid, or None if no grid fits. With spare ranks, it also fits the batch."""
    degrees = _data_degrees(config, world)
    fitting = (dp for dp in degrees if config.parallel.expert in expert_degrees(config, dp))
    return next((make_grid(config, dp) for dp in fitting), None)


def make_grid(config: RunConfig, dp: int) -> Grid:
    """Return the grid with this data degree."""
    parallel = config.parallel
    pp, cp, tp = parallel.pipeline, parallel.context, parallel.tensor
    # ZeRO-0 partitions over one rank: all ranks with the same weights are replicas.
    replicate = dp * cp if config.zero_optimization.stage == 0 else parallel.replicate
    if config.model.num_experts is None:
        return Grid(pp, dp, tp, replicate, cp)
    ep = parallel.expert
    # If ep is a multiple of shard x tp, no two ranks of a replica hold the same experts.
    shards = 1 if config.zero_optimization.stage == 0 else dp * cp // replicate * tp // ep
    return Grid(pp, dp, tp, replicate, cp, ep, max(1, shards))


def expert_degrees(config: RunConfig, dp: int) -> list[int]:
    """Return the expert-parallel degrees with which experts can be shared and partitioned. There
    are none if the replicas do not divide the data degree.
    """
    parallel, count = config.parallel, config.model.num_experts or 1
    stage = dp * parallel.context * parallel.tensor
    degrees, shards = divisors(gcd(count, stage)), stage // parallel.replicate
    if config.zero_optimization.stage == 0:
        return degrees
    is_divided = dp % parallel.replicate == 0
    return [ep for ep in degrees if is_divided and (shards % ep == 0 or ep % shards == 0)]


def _group(parallel: ParallelConfig) -> tuple[int, str]:
    """Return the number of ranks that share one sample, and how it is computed."""
    pp, cp, tp = parallel.pipeline, parallel.context, parallel.tensor
    context = f" x parallel.context {cp}" if cp > 1 else ""
    return pp * cp * tp, f"parallel.pipeline {pp}{context} x parallel.tensor {tp}"


def _data_degrees(config: RunConfig, world: World) -> Iterator[int]:
    """Yield the data degrees that fit, the largest first. With spare ranks, they fit the batch."""
    parallel, stated = config.parallel, StatedBatch.of(config)
    group, _ = _group(parallel)
    largest = world.size // group
    dp = largest if parallel.data == "auto" else parallel.data
    if parallel.spare_ranks:
        degrees = range(largest, 0, -1) if parallel.data == "auto" else [dp]
        yield from (dp for dp in degrees if dp <= largest and solve_batch(stated, dp))
    elif 0 < dp * group == world.size:
        yield dp


def solve_batch(stated: StatedBatch, dp: int) -> Batch | None:
    """Return all three numbers, or None if no whole numbers satisfy the batch equation."""
    train, micro, accumulation = stated.train, stated.micro, stated.accumulation
    if train is None:
        if micro is None:
            return None
        accumulation = accumulation or 1
        return Batch(micro * accumulation * dp, micro, accumulation)
    common, smallest = gcd(train, *stated.others), min((train, *stated.others))
    if micro is None:
        if accumulation is None:
            parts = divisors(common // dp)
            enough = (d for d in parts if d * smallest >= stated.fewest * common)
            accumulation = next(enough, max(1, common // dp)) * (train // common)
        micro = train // (accumulation * dp)
    elif accumulation is None:
        accumulation = train // (micro * dp)
    is_whole = min(micro, accumulation) > 0 and micro * accumulation * dp == train
    is_whole = is_whole and common % (micro * dp) == 0
    return Batch(train, micro, accumulation) if is_whole else None


def explain_batch(stated: StatedBatch, dp: int, equation: str) -> str:
    """Return why ``solve_batch`` fails: the equation, its numbers, and the nearest valid ones.

    Args:
        stated: a batch for which ``solve_batch`` returned None.
        dp: the data-parallel degree.
        equation: how dp is computed.
    """
    train, micro, accumulation = stated.train, stated.micro, stated.accumulation
    if train is None:
        return _UNDETERMINED
    if stated.others and solve_batch(replace(stated, others=()), dp):
        size = micro or (1 if accumulation is None else train // (accumulation * dp))
        quantum = size * dp
        wrong = [batch for batch in (*stated.others, train) if batch % quantum]
        near = {n for n in (wrong[0] // quantum * quantum, -(-wrong[0] // quantum) * quantum) if n}
        return (
            f"train_batch_size_schedule has the batch {wrong[0]}, which is not a multiple of "
            f"train_micro_batch_size_per_gpu {size} x dp {dp} (= {quantum}), but each batch must "
            f"be one. Nearest: {listed(sorted(near))}. {equation}"
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


def degrees_fit_world(config: RunConfig, world: World) -> Iterator[str]:
    """The product of the degrees is the number of processes; at most, if ranks may be spare."""
    parallel, stated = config.parallel, StatedBatch.of(config)
    data, (group, product) = parallel.data, _group(parallel)
    quotient, rest = divmod(world.size, group)
    if data == "auto":
        dp, around = max(1, quotient), [range(quotient, 0, -1), range(quotient + 1, 2 * world.size)]
        law = f"{world} is not divisible by {product} = {group}"
        fits = (parallel.spare_ranks and quotient > 0) or not rest
    else:
        dp, around = data, [range(data, data + 1)]
        law = f"parallel.data {data} x {product} must be {world}, but it is {data * group}"
        fits = data <= quotient if parallel.spare_ranks else data * group == world.size
    if fits:
        return
    # Only what the batch and the model allow is proposed.
    near = [next((n for n in each if solve_batch(stated, n)), 0) for each in around]
    start = " or ".join(str(n * group) for n in near if n)
    mends = []
    if parallel.spare_ranks:
        law = f"{world} is less than data {dp} x {product} = {dp * group}"
        mends += [f"start at least {start} processes"] * bool(start)
    else:
        if not rest and solve_batch(stated, quotient):
            mends.append(f'set parallel.data to {quotient} or "auto"')
        mends += [f"start {start} processes"] * bool(start)
        degrees = [n for n in divisors(world.size) if data in ("auto", n)]
        products = [world.size // n for n in reversed(degrees) if solve_batch(stated, n)]
        if products := [n for n in products if _has_degrees(config, n)]:
            axes = "parallel.pipeline x parallel.tensor"
            axes += " x parallel.context" if parallel.context > 1 else ""
            mends.append(f"choose {axes} = {listed(products)}")
    least = "at least " if parallel.spare_ranks else ""
    yield f"{law}; {', or '.join(mends) or f'start {least}{dp * group} processes'}"
    if not mends:
        yield explain_batch(stated, dp, f"This is for parallel.data {dp}")


def replicas_divide_data(config: RunConfig, world: World) -> Iterator[str]:
    """The replicas of ZeRO's partitions divide the data degree. ZeRO-0 partitions nothing."""
    parallel, stage = config.parallel, config.zero_optimization.stage
    largest, replicate = world.size // _group(parallel)[0], parallel.replicate
    # If none fits, other rules say so.
    degrees = sorted(_data_degrees(config, world))
    degrees = degrees or [largest if parallel.data == "auto" else parallel.data]
    if stage == 0 and replicate not in (1, 1 if parallel.spare_ranks else degrees[0]):
        yield (
            f"parallel.replicate {replicate} needs ZeRO-1, 2 or 3: with zero_optimization.stage 0, "
            "each data rank holds everything; remove it, or set zero_optimization.stage"
        )
    elif all(dp % replicate for dp in degrees):
        valid = sorted({divisor for dp in degrees for divisor in divisors(dp)})
        context = f"x parallel.context {parallel.context} " * (parallel.context > 1)
        yield (
            f"parallel.replicate {replicate} must divide the data degree, dp {listed(degrees)}, "
            f"because ZeRO partitions over dp / replicate {context}ranks; valid "
            f"parallel.replicate: {listed(valid)}"
        )


def experts_divide_stage(config: RunConfig, world: World) -> Iterator[str]:
    """The expert axis divides the experts and the ranks of a pipeline stage. ZeRO partitions over
    the ranks of a replica that hold the same experts, which must be equally many for all experts.
    """
    parallel, count = config.parallel, config.model.num_experts
    degrees = sorted(_data_degrees(config, world))
    valid = sorted({ep for dp in degrees for ep in expert_degrees(config, dp)})
    if count is None or not valid or parallel.expert in valid:
        return
    axes = {"context": parallel.context, "tensor": parallel.tensor}
    others = "".join(f" x {axis} {size}" for axis, size in axes.items() if size > 1)
    law = (
        f"parallel.expert {parallel.expert} must divide model.num_experts {count} and the ranks of "
        f"a pipeline stage, data {listed(degrees)}{others}"
    )
    if config.zero_optimization.stage > 0 and parallel.replicate > 1:
        law += (
            "; it must also divide the ranks of a replica (these ranks / parallel.replicate "
            f"{parallel.replicate}), or be a multiple of them"
        )
    yield f"{law}; valid parallel.expert: {listed(valid)}"


def micro_batches_fill_the_pipeline(config: RunConfig, world: World) -> Iterator[str]:
    """With several chunks, each group has a micro-batch for each pipeline stage."""
    parallel, grid = config.parallel, find_grid(config, world)
    batch = None if grid is None else solve_batch(StatedBatch.of(config), grid.dp)
    if grid is None or batch is None or parallel.pipeline == 1:
        return
    count, pp, groups = batch.gradient_accumulation_steps, parallel.pipeline, 1
    automatic, stated = count // pp, parallel.micro_batch_groups
    name = "gradient_accumulation_steps"
    if others := StatedBatch.of(config).others:
        count = min(others) // (batch.micro_batch_size * grid.dp)
        name = f"the number of micro-batches of train_batch_size_schedule's batch {min(others)}"
    if parallel.extra_in_flight > 0 and count < 3:  # the last stage but one keeps 2 in any case
        yield (
            f"parallel.extra_in_flight {parallel.extra_in_flight} needs at least 3 micro-batches a "
            f"step, but {name} is {count}; set a larger train_batch_size or a "
            "smaller micro-batch, or remove parallel.extra_in_flight"
        )
    if parallel.virtual_stages == 1:
        return
    # A resolved configuration states what "auto" is for the largest batch.
    if stated != "auto" and stated != automatic:
        groups = stated
    if count < pp:
        yield (
            f"parallel.virtual_stages {parallel.virtual_stages} needs at least parallel.pipeline "
            f"{pp} micro-batches a step, but {name} is {count}; set a larger "
            "train_batch_size or a smaller micro-batch, or remove parallel.virtual_stages"
        )
    elif groups * pp > count:
        yield (
            f"parallel.micro_batch_groups {groups} x parallel.pipeline {pp} = {groups * pp} must "
            f"be at most {name} {count}, because each group has a micro-batch "
            f"for each pipeline stage; valid parallel.micro_batch_groups: 1 to {count // pp}"
        )


def _has_degrees(config: RunConfig, product: int) -> bool:
    """Return whether the model allows a pipeline and a tensor degree that have this product with
    the context degree.
    """
    valid, layers = head_degrees(config.model), config.model.num_hidden_layers
    both, rest = divmod(product, config.parallel.context)
    return rest == 0 and any(tp in valid and both // tp <= layers for tp in divisors(both))


def batch_is_determined(config: RunConfig) -> Iterator[str]:
    """The batch or the micro-batch is stated."""
    if not StatedBatch.of(config).is_determined:
        yield _UNDETERMINED


def batch_multiplies(config: RunConfig, world: World) -> Iterator[str]:
    """train_batch_size = micro-batch x accumulation steps x data degree, in whole numbers."""
    parallel, stated = config.parallel, StatedBatch.of(config)
    if not stated.is_determined:
        return
    grid = find_grid(config, world)
    dp = next(_data_degrees(config, world), None) if grid is None else grid.dp
    batch = None if dp is None else solve_batch(stated, dp)
    if dp is not None and batch is None:
        context = f" x context {parallel.context}" if parallel.context > 1 else ""
        yield explain_batch(
            stated,
            dp,
            f"dp {dp} = world {world.size} / (pipeline {parallel.pipeline}{context} x tensor "
            f"{parallel.tensor}), world from {world.source}",
        )
    if parallel.spare_ranks and stated.train is None:
        yield "parallel.spare_ranks needs the same batch at every dp; state train_batch_size"
    elif parallel.spare_ranks and not any(_data_degrees(config, world)):
        largest = world.size // _group(parallel)[0]
        dp = min(largest, 1) if parallel.data == "auto" else parallel.data
        if 0 < dp <= largest:
            yield explain_batch(stated, dp, f"no dp of {largest} or less fits {world}")
    if batch and batch.gradient_accumulation_steps > LARGEST_ACCUMULATION:
        yield (
            f"gradient_accumulation_steps {batch.gradient_accumulation_steps:,} (train_batch_size "
            f"{batch.train_batch_size:,} / (train_micro_batch_size_per_gpu "
            f"{batch.micro_batch_size:,} x dp {dp})) must be at most "
            f"{LARGEST_ACCUMULATION:,}; raise train_micro_batch_size_per_gpu"
        )
    if batch and config.number_of_steps() is None:  # the batch gives the number of steps
        yield from check(RULES, config.changed({"train_batch_size": batch.train_batch_size}))


def profiled_ranks_exist(config: RunConfig, world: World) -> Iterator[str]:
    """The run has the ranks that are to be profiled, unless their number may change."""
    profile = config.training.profile
    ranks = () if profile is None else profile.ranks or ()
    if not config.parallel.spare_ranks and ranks and max(ranks) >= world.size:
        yield (
            f"training.profile.ranks names rank {max(ranks)}, but {world} has the ranks 0 to "
            f"{world.size - 1}; remove it"
        )


def fp16_needs_a_gpu(config: RunConfig, world: World) -> Iterator[str]:
    """A CPU cannot train in fp16."""
    if config.fp16.enabled and world.device_type == "cpu":
        yield (
            "fp16.enabled is true, but this run is on a CPU, which cannot train in fp16; set "
            "bf16.enabled instead, or neither for fp32"
        )


_NEED_WORLD = (
    degrees_fit_world,
    batch_multiplies,
    replicas_divide_data,
    experts_divide_stage,
    micro_batches_fill_the_pipeline,
    profiled_ranks_exist,
    fp16_needs_a_gpu,
)


def violations(config: RunConfig, world: World | None = None) -> list[str]:
    """Return the messages of all rules. Without a world, those that depend on it are omitted."""
    world_rules = () if world is None else (partial(each, world=world) for each in _NEED_WORLD)
    return list(dict.fromkeys(check([*RULES, batch_is_determined, *world_rules], config)))

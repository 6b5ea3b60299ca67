"""Rules that several keys must satisfy together: number types, ZeRO, sources, learning rate."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from megaspeed.config.data import Source
from megaspeed.config.errors import KeyPath, Problem
from megaspeed.config.parallel import World
from megaspeed.config.run import RunConfig
from megaspeed.config.scheduler import (
    Constant,
    Decay,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

# A rule: a condition on the keys that it names, and an error message for each violation.


@dataclass(frozen=True)
class Launch:
    """A config and the processes that will run it."""

    config: RunConfig
    world: World


Subject = TypeVar("Subject", RunConfig, Launch)
Check = Callable[[Subject], Iterator[str]]


@dataclass(frozen=True)
class Rule(Generic[Subject]):
    """One rule. `reads` names its keys. If one of them is invalid, the rule is not checked."""

    reads: tuple[KeyPath, ...]
    check: Check[Subject]

    def problems(self, subject: Subject, broken: "_Broken") -> Iterator[Problem]:
        """The violations; none if one of the keys is already known to be invalid."""
        if not any(map(broken.touches, self.reads)):
            for message in self.check(subject):
                yield Problem(self.reads[0], message)


def rule(*reads: str) -> Callable[[Check[Subject]], Rule[Subject]]:
    """Make a rule from a generator function; `reads` are the dotted keys that it reads."""
    paths = tuple(tuple(name.split(".")) for name in reads)
    return lambda check: Rule(paths, check)


def apply_rules(
    rules: Iterable[Rule[Subject]], subject: Subject, broken: frozenset[KeyPath]
) -> list[Problem]:
    """All problems of all rules, in order."""
    index = _Broken(broken)
    return [problem for law in rules for problem in law.problems(subject, index)]


class _Broken:
    """The paths of invalid values, and all paths above them."""

    def __init__(self, paths: frozenset[KeyPath]) -> None:
        self._paths = paths
        self._above = {path[:length] for path in paths for length in range(len(path))}

    def touches(self, read: KeyPath) -> bool:
        """Whether an invalid path is this one, above it, or below it."""
        leading = (read[:length] for length in range(1, len(read) + 1))
        return read in self._above or any(path in self._paths for path in leading)


# Laws of number types, ZeRO stages and offload.


@rule("bf16.enabled", "fp16.enabled")
def one_precision(config: RunConfig) -> Iterator[str]:
    if config.bf16.enabled and config.fp16.enabled:
        yield (
            "bf16.enabled and fp16.enabled are both true, and a model has one type; turn one off "
            "(bf16 needs no loss scale)"
        )


@rule("data_types.grad_accum_dtype", "bf16.enabled")
def gradients_are_added_as_precisely_as_computed(config: RunConfig) -> Iterator[str]:
    if config.data_types.grad_accum_dtype == "bf16" and not config.bf16.enabled:
        computed = "fp16" if config.fp16.enabled else "fp32"
        yield (
            f'data_types.grad_accum_dtype "bf16" loses digits of gradients that the {computed} '
            'model computes; remove it, write "fp32", or set bf16.enabled'
        )


@rule("zero_optimization.overlap_comm", "zero_optimization.contiguous_gradients")
def overlapped_gradients_have_a_buffer(config: RunConfig) -> Iterator[str]:
    zero = config.zero_optimization
    if zero.overlap_comm and zero.stage < 3 and not zero.contiguous_gradients:
        yield (
            "zero_optimization.overlap_comm reduces gradients while the backward pass continues, "
            "and with contiguous_gradients false DeepSpeed frees them before they are reduced; set "
            "contiguous_gradients to true, or overlap_comm to false"
        )


@rule("zero_optimization.offload_param", "zero_optimization.stage")
def parameter_offload_needs_stage_3(config: RunConfig) -> Iterator[str]:
    zero = config.zero_optimization
    if zero.offloads_parameters and zero.stage != 3:
        yield (
            "zero_optimization.offload_param moves partitioned parameters, which only stage 3 "
            f"has, and zero_optimization.stage is {zero.stage}; set it to 3, or take "
            "offload_param out"
        )


@rule("zero_optimization.offload_optimizer", "zero_optimization.stage")
def optimizer_offload_needs_partitioned_states(config: RunConfig) -> Iterator[str]:
    zero = config.zero_optimization
    if zero.offloads_optimizer and zero.stage == 0:
        yield (
            "zero_optimization.offload_optimizer moves partitioned optimizer states, which stages "
            "1, 2 and 3 have, and zero_optimization.stage is 0; raise it, or take "
            "offload_optimizer out"
        )


NUMERIC_RULES: tuple[Rule[RunConfig], ...] = (
    one_precision,
    gradients_are_added_as_precisely_as_computed,
    overlapped_gradients_have_a_buffer,
    parameter_offload_needs_stage_3,
    optimizer_offload_needs_partitioned_states,
)


# Laws of the sources of `data.train` and `data.validation`.


@rule("data.train")
def training_weights_are_all_or_none(config: RunConfig) -> Iterator[str]:
    yield from _all_or_none("data.train", config.data.train_sources)


@rule("data.validation")
def validation_weights_are_all_or_none(config: RunConfig) -> Iterator[str]:
    yield from _all_or_none("data.validation", config.data.validation_sources or ())


def _all_or_none(setting: str, sources: tuple[Source, ...]) -> Iterator[str]:
    without = [index for index, source in enumerate(sources) if source.weight is None]
    if 0 < len(without) < len(sources):
        yield (
            f"{setting} must state a weight for all of its sources or for none, and states it for "
            f"{len(sources) - len(without)} of {len(sources)}; {setting}[{without[0]}] "
            f"({sources[without[0]]}) is the first without one"
        )


SOURCE_RULES: tuple[Rule[RunConfig], ...] = (
    training_weights_are_all_or_none,
    validation_weights_are_all_or_none,
)


# Rules for the learning-rate schedule.


@rule("scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps", "training.steps")
def warmup_ends_before_the_decay(config: RunConfig) -> Iterator[str]:
    scheduler = config.scheduler
    if isinstance(scheduler, Decay | WarmupDecayLR | WarmupCosineLR):
        warmup, total = scheduler.params.warmup_num_steps, scheduler.params.total_num_steps
        source = "scheduler.params.total_num_steps"
        if total is None:
            total, source = config.training.steps, "training.steps"
        if warmup >= total:
            yield (
                f"scheduler.params.warmup_num_steps {warmup} must be less than {source} {total}, "
                "because the rate falls after warmup; shorten the warmup"
            )


@rule("scheduler.params.warmup_num_steps", "training.steps")
def warmup_ends_within_the_run(config: RunConfig) -> Iterator[str]:
    scheduler, steps = config.scheduler, config.training.steps
    if isinstance(scheduler, Constant | WarmupLR) and scheduler.params.warmup_num_steps >= steps:
        yield (
            f"scheduler.params.warmup_num_steps {scheduler.params.warmup_num_steps} must be less "
            f"than training.steps {steps}, or the full learning rate is never reached; shorten "
            "the warmup"
        )


@rule(
    "scheduler.params.total_num_steps",
    "scheduler.params.cos_min_ratio",
    "scheduler.params.min_ratio",
    "training.steps",
)
def rate_stays_above_zero(config: RunConfig) -> Iterator[str]:
    scheduler, steps = config.scheduler, config.training.steps
    if isinstance(scheduler, Decay):
        ends_at_zero = scheduler.params.min_ratio == 0
    elif isinstance(scheduler, WarmupCosineLR):
        ends_at_zero = scheduler.params.cos_min_ratio == 0
    elif isinstance(scheduler, WarmupDecayLR):
        ends_at_zero = True
    else:
        return
    total = scheduler.params.total_num_steps
    if ends_at_zero and total is not None and total < steps:
        yield (
            f"scheduler.params.total_num_steps {total} must be at least training.steps {steps}, "
            f"or the last {steps - total} steps have a learning rate of 0; leave it out"
        )


@rule("scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr", "optimizer.params.lr")
def warmup_rises(config: RunConfig) -> Iterator[str]:
    scheduler = config.scheduler
    if isinstance(scheduler, WarmupLR | WarmupDecayLR):
        low, high = scheduler.params.warmup_min_lr, scheduler.params.warmup_max_lr
        source = "scheduler.params.warmup_max_lr"
        if high is None:
            high, source = config.optimizer.params.lr, "optimizer.params.lr"
        if low > high:
            yield (
                f"scheduler.params.warmup_min_lr {low} must be at most {source} {high}, because "
                "the rate rises during warmup"
            )


@rule("training.lr_scaling", "training.base_batch_size")
def scaling_has_a_base(config: RunConfig) -> Iterator[str]:
    scaling, base = config.training.lr_scaling, config.training.base_batch_size
    if scaling != "none" and base is None:
        yield (
            f'training.lr_scaling "{scaling}" multiplies the learning rate by a function of '
            "train_batch_size / training.base_batch_size; state training.base_batch_size, the "
            "batch for which optimizer.params.lr is right"
        )
    if scaling == "none" and base is not None:
        yield (
            f'training.base_batch_size {base} has no effect with training.lr_scaling "none"; set '
            'training.lr_scaling to "linear" or "sqrt", or leave training.base_batch_size out'
        )


LEARNING_RATE_RULES: tuple[Rule[RunConfig], ...] = (
    warmup_ends_before_the_decay,
    warmup_ends_within_the_run,
    rate_stays_above_zero,
    warmup_rises,
    scaling_has_a_base,
)

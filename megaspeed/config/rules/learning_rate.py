"""Rules for the learning-rate schedule."""

from collections.abc import Iterator

from megaspeed.config.rules.rule import Rule, rule
from megaspeed.config.run import RunConfig
from megaspeed.config.scheduler import (
    Constant,
    Decay,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)


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

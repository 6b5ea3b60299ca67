"""The learning rate as a function of the step: our schedules, and DeepSpeed's formulas."""

import math

from megaspeed.config.deepspeed_keys import (
    Constant,
    Decay,
    OptimizerConfig,
    SchedulerConfig,
    WarmupCosineLR,
    WarmupCosineLRParams,
    WarmupDecayLR,
    WarmupParams,
    WarmupStableDecay,
)


def learning_rate(
    optimizer: OptimizerConfig, scheduler: SchedulerConfig | None, *, step: int, steps: int
) -> float:
    """Return the learning rate after ``step`` optimizer steps, with our schedules or DeepSpeed's.

    Our schedules multiply the full rate by this fraction at the s-th step (counted from 1) of T,
    with W steps of warmup and a floor of m:

        s <= W   s / W
        s > W    m + (1 - m) f((s - W) / (T - W))    f(p) = (1 + cos(pi p)) / 2, 1 - p, or 1

    So step 1 has 1 / W of the full rate, step W all of it, and step T the floor. The decay of wsd
    takes the last D steps instead of T - W, and f(p) may be 1 - sqrt(p) (Hagele et al. 2024).

    DeepSpeed 0.19.8 (runtime/lr_schedules.py) counts iterations from -1, the iteration of the first
    optimizer step. So the s-th step has iteration i = s - 2. Warmup takes W = max(2,
    warmup_num_steps) iterations with this fraction of the full rate:

        linear   i / W            log   ln(i + 1) / ln(W)

    So steps 1 and 2 both have the lowest rate, and the full rate comes at step W + 2.

    Args:
        optimizer: its ``lr`` is the full rate, and the constant rate without a scheduler.
        scheduler: None for a constant rate.
        step: number of optimizer steps before this one; a skipped step is not counted.
        steps: last step of the run, for schedulers without ``total_num_steps``.
    """
    base = optimizer.params.lr
    if scheduler is None:
        return base
    if isinstance(scheduler, Decay | Constant | WarmupStableDecay):
        return base * _ratio(scheduler, step + 1, steps)
    iteration = step - 1
    if isinstance(scheduler, WarmupCosineLR):
        return base * _cosine_ratio(scheduler.params, iteration, steps)
    low = scheduler.params.warmup_min_lr
    high = base if scheduler.params.warmup_max_lr is None else scheduler.params.warmup_max_lr
    if iteration < 0:
        return low
    warmup = _warmup_steps(scheduler.params)
    if iteration < warmup:
        fraction = _warmup_fraction(scheduler.params, iteration)
    elif isinstance(scheduler, WarmupDecayLR):
        total = scheduler.params.total_num_steps or steps
        fraction = max(0.0, (total - iteration) / max(1.0, total - warmup))
    else:
        fraction = 1.0
    return low + (high - low) * fraction


def _ratio(scheduler: Decay | Constant | WarmupStableDecay, step: int, steps: int) -> float:
    """Return the fraction of the full rate at the ``step``-th step, counted from 1."""
    warmup = scheduler.params.warmup_num_steps
    if step <= warmup:
        return step / warmup
    if isinstance(scheduler, Constant):
        return 1.0
    total, floor = scheduler.params.total_num_steps or steps, scheduler.params.min_ratio
    shape, decay = str(scheduler.type), max(1, total - warmup)
    if isinstance(scheduler, WarmupStableDecay):
        shape, decay = scheduler.params.decay_shape, scheduler.params.decay_num_steps
    progress = min(1.0, max(0.0, (step - total + decay) / decay))
    curves = {"cosine": (1 + math.cos(math.pi * progress)) / 2, "1-sqrt": 1 - math.sqrt(progress)}
    return floor + (1 - floor) * curves.get(shape, 1 - progress)


def _cosine_ratio(params: WarmupCosineLRParams, iteration: int, steps: int) -> float:
    if iteration < 0:
        return 0.0
    warmup = _warmup_steps(params)
    if iteration < warmup:
        span = 1.0 - params.warmup_min_ratio
        return params.warmup_min_ratio + _warmup_fraction(params, iteration) * span
    total = params.total_num_steps or steps
    progress = min(1.0, (iteration - warmup + 1) / max(1, total - warmup))
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return max(0.0, params.cos_min_ratio + (1.0 - params.cos_min_ratio) * cosine)


def _warmup_steps(params: WarmupParams) -> int:
    return max(2, params.warmup_num_steps)  # as in DeepSpeed, which divides by ln(W)


def _warmup_fraction(params: WarmupParams, iteration: int) -> float:
    warmup = _warmup_steps(params)
    if params.warmup_type == "linear":
        return iteration / warmup
    return math.log(iteration + 1) / math.log(warmup)

"""Every variant of a training that fits, the fastest first.

All have the same ranks. Other numbers
of chunks than 1 and the stated one are listed only if they are the fastest of their degrees. The
sizes of micro-batches are powers of two, and the configured size. A larger micro-batch needs more
memory (or, in a few cases, 0.1 % less). So if a size does not fit, larger ones are not tried.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from math import inf
from operator import attrgetter, itemgetter
from typing import Any, Literal, NamedTuple

from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import expert_degrees
from megaspeed.config.resolve import Run
from megaspeed.config.rules import divisors
from megaspeed.files.json_values import picked
from megaspeed.pipeline.schedules import SCHEDULES
from megaspeed.planning.costs.reserved_memory import Verdict, reserved_memory
from megaspeed.planning.costs.step_time import Rates
from megaspeed.planning.costs.workload import Cluster, workload_of
from megaspeed.planning.forecast import Forecast, forecast
from megaspeed.planning.prediction import predict
from megaspeed.planning.variants import Settings, Training, degrees_of, verdict_of

_MUCH_FASTER, _AS_FAST, _LEAST_TOKENS = 0.99, 1.001, 4096


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One variant, with its figures."""

    settings: Settings
    forecast: Forecast
    peak_bytes: int  # predicted peak of the tensors of the fullest rank
    verdict: Verdict
    set_text: tuple[str, ...]  # what to type after ``--set``; empty for the run as configured

    @property
    def run(self) -> Run:
        return self.forecast.run

    @property
    def seconds(self) -> float:
        return self.forecast.seconds

    def as_json(self) -> dict[str, Any]:
        run, parallel = self.run, self.run.config.parallel
        return {
            **picked(run.grid, "pp", "dp", "cp", "tp", "ep", "replicate"),
            **picked(run, "zero_stage", "gradient_reduction"),
            **picked(parallel, "schedule", "extra_in_flight"),
            **picked(parallel, "virtual_stages", "micro_batch_groups"),
            **picked(parallel, "activation_checkpointing", "recomputed_blocks"),
            "micro_batch_size": run.batch.micro_batch_size,
            "micro_batches": run.batch.gradient_accumulation_steps,
            "terms_seconds": self.forecast.step.terms,
            **picked(self, "seconds", "peak_bytes", "verdict"),
            "set": list(self.set_text),
        }


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The variants of a training."""

    variants: tuple[Variant, ...]  # those that fit, the fastest first
    too_large: int  # number of those that do not fit, including all larger micro-batches
    least_peak_bytes: int | None  # the smallest peak that was tried; None if all break rules

    @property
    def best(self) -> Variant | None:
        """The fastest with the verdict "fits"; if there is none, the fastest that is "tight"."""
        return next(
            (variant for variant in self.variants if variant.verdict == "fits"),
            self.variants[0] if self.variants else None,
        )

    def fastest_of_each_grid(self) -> list[Variant]:
        """Return the fastest variant of each (pp, dp, cp, tp, ep), the fastest first."""
        found: dict[object, Variant] = {}
        for variant in self.variants:
            found.setdefault(variant.settings.degrees, variant)
        return list(found.values())

    def as_json(self) -> dict[str, Any]:
        figures = picked(self, "too_large", "least_peak_bytes")
        return {**figures, "layouts": [variant.as_json() for variant in self.variants]}


def what_if(
    training: Training,
    cluster: Cluster,
    executor: Executor | None = None,
    show: Callable[[float], object] = lambda done: None,
) -> WhatIf:
    """Return every variant of the training that fits the cluster's devices.

    Variants differ in degrees (pp, dp, cp, tp, ep), ZeRO stage, replicas, gradient reduction,
    schedule, chunks, recomputation and micro-batch. Those that break a rule of the configuration
    are omitted. So are tensor groups larger than a node: the collectives of every block would go
    over the network. Context degrees other than 1 and the stated one are tried if a rank has at
    least 4,096 tokens of a sample. With fewer, its collectives usually take longer than its
    computation. The expert degrees are 1, the stated one, the largest within a node, and the
    largest that a pipeline stage allows. ``full_offloaded`` is tried only if the configuration
    states it.

    Args:
        executor: its processes share the work; None: this process does it.
        show: is called with the part of the work that is done, from 0 to 1.
    """
    degrees: list[tuple[int, ...]] = list(degrees_of(training, cluster.gpus_per_node))
    variants: list[Variant] = []
    refused: list[_TooLarge] = []
    if training.stated.model.num_experts is not None:
        degrees = [(*each, ep) for each in degrees for ep in _experts(training, cluster, *each)]
    tasks = partial(_at_degrees, training, cluster)
    results: Iterator[tuple[list[Variant], list[_TooLarge]]] = map(tasks, degrees)
    if executor is not None:
        # Not ``executor.map``: after an exception it cancels its futures, and a broken executor
        # fails on cancelled futures.
        futures = [executor.submit(tasks, each) for each in degrees]
        results = (future.result() for future in futures)
    for done, (fitting, others) in enumerate(results, 1):
        variants += fitting
        refused += others
        show(done / len(degrees))
    variants.sort(key=attrgetter("seconds", "peak_bytes"))
    least: float = min((variant.peak_bytes for variant in variants), default=inf)
    for too_large in sorted(refused, key=attrgetter("at_least")):
        if too_large.at_least < least:
            least = min(least, training.peak_bytes(too_large.settings))
    return WhatIf(
        variants=tuple(variants),
        too_large=sum(each.sizes for each in refused),
        least_peak_bytes=None if least == inf else int(least),
    )


class _TooLarge(NamedTuple):
    """A variant that does not fit."""

    at_least: int  # a lower bound of its peak that is already too large
    settings: Settings
    sizes: int = 1  # of micro-batches: its own, and all larger ones


def _at_degrees(
    training: Training, cluster: Cluster, degrees: tuple[int, ...]
) -> tuple[list[Variant], list[_TooLarge]]:
    """Return the variants with these degrees that fit, and those that do not."""
    variants: list[Variant] = []
    refused: list[_TooLarge] = []
    for sizes in _combinations(training, *degrees):
        for index, settings in enumerate(sizes):
            try:
                variant = _variant_of(training, settings, cluster)
            except ConfigError:
                continue
            if isinstance(variant, _TooLarge):
                refused.append(variant._replace(sizes=len(sizes) - index))
                break
            variants.append(variant)
            if settings.replicate == 1:
                variants += _with_replicas(training, settings, variant, cluster)
    chunked = [*_with_chunks(training, variants, cluster)]
    variants += _with_more_in_flight(training, variants, cluster)
    return variants + chunked, refused


def _variant_of(training: Training, settings: Settings, cluster: Cluster) -> Variant | _TooLarge:
    """Return the variant with these settings if it fits.

    Raises ConfigError if the settings break a rule of the configuration.
    """
    run = training.under(settings)
    prediction = predict(run, training.device_type)
    reserved = reserved_memory(run, cluster.device, cluster.gpus_per_node, peak_bytes=0)
    for size_of in (attrgetter("memory.least_bytes"), attrgetter("peak_bytes")):
        for at_least in map(size_of, prediction.stages):
            if at_least + reserved.certain > cluster.device.memory_bytes:
                return _TooLarge(at_least, settings)
    peak = prediction.fullest.peak_bytes
    return Variant(
        settings=settings,
        forecast=forecast(run, cluster),
        peak_bytes=peak,
        verdict=verdict_of(run, peak, cluster),
        set_text=training.set_text(settings),
    )


def _with_replicas(
    training: Training, settings: Settings, variant: Variant, cluster: Cluster
) -> Iterator[Variant]:
    """Yield the variant with the fastest number of replicas, unless it is 1 or the stated one.

    More replicas need more memory, so they must make the step at least 1 % shorter. At best, they
    save all collectives of the data axis.
    """
    step, block = variant.forecast.step, variant.forecast.step.layers.block
    counts = [count for count in divisors(settings.dp)[1:] if count < settings.dp * settings.cp]
    if not (settings.zero_stage and counts) or step.total - step.dp >= _MUCH_FASTER * step.total:
        return
    work, seconds = workload_of(variant.run, cluster.device_type), {}
    for count in counts:  # A count changes only two terms.
        grid = replace(work.grid, replicate=count)
        if grid.ep is not None:
            try:  # ZeRO partitions experts over other ranks
                grid = training.under(replace(settings, replicate=count)).grid
            except ConfigError:
                continue
        rates = Rates(replace(work, grid=grid), cluster)
        dp = cluster.calibration * rates.network.dp(step.stage, block.forward, block.backward)
        optimizer = cluster.calibration * rates.optimizer(step.stage)
        seconds[count] = replace(step, dp=dp, optimizer=optimizer).total
    for count in sorted(seconds, key=seconds.__getitem__):
        if count == training.settings.replicate:
            return
        if seconds[count] < _MUCH_FASTER * variant.seconds:
            found = _variant_of(training, replace(settings, replicate=count), cluster)
            if isinstance(found, Variant):
                yield found
                return


def _with_chunks(
    training: Training, variants: Sequence[Variant], cluster: Cluster
) -> Iterator[Variant]:
    """Yield the fastest variant with chunks that fits, and faster ones that are tight.

    All have the same degrees. They need more memory, so they must be at least 1 % faster than all
    of ``variants``. At best, a variant with chunks has neither a bubble nor collectives of the data
    axis.
    """
    limit = _MUCH_FASTER * min((variant.seconds for variant in variants), default=0.0)
    tried: list[tuple[float, Settings]] = []
    for variant in variants:
        s, step = variant.settings, variant.forecast.step
        if s.pp == 1 or s.schedule == "gpipe" or s.virtual_stages > 1:
            continue
        if step.total - step.bubble - step.dp >= limit:
            continue
        for settings in _chunked(training, variant):
            with suppress(ConfigError):
                seconds = forecast(training.under(settings), cluster).seconds
                if seconds < limit:
                    tried.append((seconds, settings))

    @cache
    def fitting(settings: Settings) -> Variant | None:
        found = _variant_of(training, settings, cluster)
        return found if isinstance(found, Variant) else None

    for _, s in sorted(tried, key=itemgetter(0)):
        # This needs no more memory. Most of ``tried`` do not even fit with it.
        smaller = replace(s, replicate=1, micro_batch_groups="auto", gradient_reduction="auto")
        with suppress(ConfigError):
            chunked = fitting(smaller) and fitting(s)
            if chunked is not None:
                yield chunked
                if chunked.verdict == "fits":
                    return


def _with_more_in_flight(
    training: Training, variants: Sequence[Variant], cluster: Cluster
) -> Iterator[Variant]:
    """Yield the fastest variant with as many micro-batches in flight as hide messages, if it fits
    and is at least 1 % faster than all variants. Fewer than pipeline - 1 more need less memory, and
    may hide as much.
    """
    fastest = min(variants, key=attrgetter("seconds"), default=None)
    if fastest is None or fastest.forecast.step.p2p < (1 - _MUCH_FASTER) * fastest.seconds:
        return
    settings = replace(fastest.settings, extra_in_flight=fastest.settings.pp - 1)

    def seconds(extra: int) -> float:
        run = training.under(replace(settings, extra_in_flight=extra))
        return forecast(run, cluster).seconds

    with suppress(ConfigError):
        limit = _AS_FAST * seconds(settings.extra_in_flight)
        if settings.keys == fastest.settings.keys or limit >= _MUCH_FASTER * fastest.seconds:
            return
        numbers = range(1, settings.extra_in_flight)
        extra = 1 + bisect_left(numbers, True, key=lambda each: seconds(each) <= limit)
        found = _variant_of(training, replace(settings, extra_in_flight=extra), cluster)
        if isinstance(found, Variant):
            yield found


def _chunked(training: Training, variant: Variant) -> Iterator[Settings]:
    """Yield the settings of a variant with several chunks: 2, 4 and the stated number, with as many
    groups as possible, the stated number of them, and one.
    """
    s, own = variant.settings, training.settings
    most = variant.run.batch.gradient_accumulation_steps // s.pp
    counts: tuple[Literal["auto"] | int, ...] = ("auto", own.micro_batch_groups, 1)
    groups = dict.fromkeys(count for count in counts if count != most)
    reduction = "auto" if s.gradient_reduction == "per_micro_batch" else s.gradient_reduction
    for chunks in sorted({2, 4, own.virtual_stages} - {1}):
        for count in groups:
            if chunks != own.virtual_stages or count != own.micro_batch_groups:
                yield replace(
                    s, virtual_stages=chunks, micro_batch_groups=count, gradient_reduction=reduction
                )


def _combinations(
    training: Training, pp: int, dp: int, cp: int, tp: int, ep: int = 1
) -> Iterator[list[Settings]]:
    """Yield all combinations with one replica and one chunk, and with the stated numbers of them.

    Each is a list of settings with all sizes of the micro-batch.
    """
    own = training.settings
    length = training.stated.data.sequence_length
    samples, rest = divmod(training.run.batch.train_batch_size, dp)
    if rest or not (cp in (1, own.cp) or length >= _LEAST_TOKENS * cp):
        return
    sizes = [n for n in divisors(samples) if n.bit_count() == 1 or n == own.micro_batch_size]
    schedules = tuple(SCHEDULES) if pp > 1 else (own.schedule,)
    at_degrees = replace(own, pp=pp, dp=dp, cp=cp, tp=tp, ep=ep)
    reductions = list(_reductions(own))
    has_experts = training.stated.model.num_experts is not None
    if dp * cp == 1 and (ep == tp or not has_experts):  # all ZeRO stages are the same
        reductions = [(own.zero_stage, own.gradient_reduction)]
    for (zero_stage, reduction), replicate, schedule, extra, chunks, recomputation in product(
        reductions,
        {1, own.replicate},
        schedules,
        {0, own.extra_in_flight},
        {1, own.virtual_stages},
        dict.fromkeys(("none", "selective", "full", own.activation_checkpointing)),
    ):
        if dp % replicate or (replicate > 1 and zero_stage == 0):
            continue
        if (chunks > 1 or extra > 0) and (pp == 1 or schedule == "gpipe"):
            continue
        if chunks > 1 and extra > 0:
            continue
        is_own = recomputation == own.activation_checkpointing
        variant = replace(
            at_degrees,
            replicate=replicate,
            zero_stage=zero_stage,
            gradient_reduction=reduction,
            schedule=schedule,
            extra_in_flight=extra,
            virtual_stages=chunks,
            activation_checkpointing=recomputation,
            recomputed_blocks=own.recomputed_blocks if is_own else None,
        )
        yield [replace(variant, micro_batch_size=size) for size in sizes]


def _experts(
    training: Training, cluster: Cluster, pp: int, dp: int, cp: int, tp: int
) -> Iterator[int]:
    """Yield the expert degrees to try (see ``what_if``)."""
    keys = {"parallel.pipeline": pp, "parallel.context": cp, "parallel.tensor": tp}
    valid = expert_degrees(training.stated.changed({**keys, "parallel.replicate": 1}), dp)
    within = max(ep for ep in valid if ep <= cluster.gpus_per_node)
    yield from sorted({1, within, valid[-1], training.settings.ep} & {*valid})


def _reductions(own: Settings) -> Iterator[tuple[int, Any]]:
    """Yield ZeRO stages with their gradient reductions. Stages 0 and 1 reduce once a step."""
    other = "per_micro_batch" if own.gradient_reduction == "per_step" else "per_step"
    for zero_stage in range(4):
        yield zero_stage, own.gradient_reduction
        if zero_stage >= 2:
            yield zero_stage, other

"""The same training with other settings: the cheapest change, and every variant that fits.

    Training (the configuration as stated, and the run that it gives)
        .under(settings)       -> Run      the same samples a step, other degrees, ZeRO stage, ...
        .set_text(settings)    -> what to type after --set to get it from the file

Model, data, optimizer and ``train_batch_size`` stay the same. The number of micro-batches is
computed from them. A variant is resolved from the stated configuration, so values of "auto" are
resolved for the variant.

If a run does not fit, its settings are changed in the order of the cost, each alone, on the same
ranks:

    sequence parallelism     little: an all-reduce becomes a reduce-scatter and an all-gather, and
                             a backward gathers some inputs again while it computes (Korthikanti
                             et al. 2022, section 4.2.2)
    1f1b instead of gpipe    nothing: the same bubble (Narayanan et al. 2021, section 2.2.1)
    ZeRO-1 instead of 0      nothing: as many bytes as an all-reduce (ZeRO, section 7.2)
    more groups of chunks    ZeRO-2 and 3 visit chunks more often, so traffic is larger
    selective recomputation  a few percent: norms and activation functions once more (Korthikanti
                             et al. 2022, section 5)
    full recomputation       for all blocks a third more operations: one more forward (Chen et al.
                             2016); first for a quarter of the blocks of each pipeline stage
    one chunk of a stage     as many times the bubble as there were chunks (section 2.2.2)
    gradient reduction       once for each micro-batch: more traffic
    ZeRO-2, ZeRO-3           the same; ZeRO-3 also gathers parameters (ZeRO, section 7.2)
    smaller micro-batch      smaller matrices, and more traffic that occurs once for each
    fewer replicas           the shards of a replica may no longer be on one node
    inputs in host memory    full recomputation; and the MLP is computed once more
    more tensor ranks        four collectives a block; within a node only
    more context ranks       collectives in the attention of each block
    more pipeline stages     a larger bubble

A what-if combines them: every variant on the same ranks that fits, the fastest first. Other numbers
of chunks than 1 and the stated one are listed only if they are the fastest of their degrees. The
sizes of micro-batches are powers of two, and the configured size. A larger micro-batch needs more
memory (or, in a few cases, 0.1 % less). So if a size does not fit, larger ones are not tried.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import chain, product
from math import inf, lcm
from operator import attrgetter, itemgetter
from typing import Any, Literal, NamedTuple, get_args

from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import BATCH_KEYS, Batch, StatedBatch, World, solve_batch
from megaspeed.config.model import ContextMethod
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.config.rules import divisors
from megaspeed.config.run import Recomputation, RunConfig
from megaspeed.config.section import LARGEST_LENGTH
from megaspeed.files.json_values import picked
from megaspeed.pipeline.schedules import SCHEDULES
from megaspeed.planning.costs.reserved_memory import Verdict, reserved_memory, verdict
from megaspeed.planning.costs.step_time import Rates
from megaspeed.planning.costs.workload import Cluster, workload_of
from megaspeed.planning.forecast import Forecast, forecast
from megaspeed.planning.prediction import predict

_MUCH_FASTER, _LEAST_TOKENS, _LENGTH_UNIT = 0.99, 4096, 1024
_DATA, MICRO_BATCH = "parallel.data", "train_micro_batch_size_per_gpu"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings in which two variants of one training may differ."""

    pp: int
    dp: int
    cp: int
    tp: int
    context_method: Literal["auto"] | ContextMethod
    replicate: int  # of ZeRO-1, 2 and 3
    zero_stage: int
    micro_batch_size: int
    activation_checkpointing: Recomputation
    recomputed_blocks: int | None
    sequence_parallel: Literal["auto"] | bool
    schedule: Literal["gpipe", "1f1b"]
    virtual_stages: int  # chunks of each pipeline stage
    micro_batch_groups: Literal["auto"] | int  # of a pipeline with several chunks
    gradient_reduction: Literal["auto", "per_step", "per_visit", "per_micro_batch"]

    @property
    def world_size(self) -> int:
        """Number of ranks for these degrees."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def degrees(self) -> tuple[int, int, int, int]:
        """The sizes of the axes."""
        return self.pp, self.dp, self.cp, self.tp

    @property
    def keys(self) -> dict[str, Any]:
        """Dotted key of the JSON -> value."""
        keys = {key: getattr(self, field) for field, key in _KEYS.items()}
        if self.zero_stage == 0:
            keys[_KEYS["replicate"]] = 1
        if self.cp == 1:  # the configuration refuses what has no effect
            keys[_KEYS["context_method"]] = "auto"
        if self.virtual_stages == 1:
            if self.micro_batch_groups != 1:
                keys[_KEYS["micro_batch_groups"]] = "auto"
            if self.gradient_reduction == "per_visit":
                keys[_KEYS["gradient_reduction"]] = "auto"
        return keys


_KEYS = {
    "pp": "parallel.pipeline",
    "dp": _DATA,
    "cp": "parallel.context",
    "tp": "parallel.tensor",
    "context_method": "parallel.context_method",
    "replicate": "parallel.replicate",
    "sequence_parallel": "parallel.sequence_parallel",
    "schedule": "parallel.schedule",
    "virtual_stages": "parallel.virtual_stages",
    "micro_batch_groups": "parallel.micro_batch_groups",
    "activation_checkpointing": "parallel.activation_checkpointing",
    "recomputed_blocks": "parallel.recomputed_blocks",
    "gradient_reduction": "parallel.gradient_reduction",
    "zero_stage": "zero_optimization.stage",
    "micro_batch_size": MICRO_BATCH,
}
"""Field of ``Settings`` -> key of the JSON."""

_MAY_BE_AUTO = ("context_method", "sequence_parallel", "micro_batch_groups", "gradient_reduction")
"""Fields whose "auto" is resolved for each variant. All others are those of the resolved run."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training to plan."""

    stated: RunConfig  # the configuration of the file and the command line; values may be "auto"
    run: Run  # the configuration, resolved for the planned number of ranks
    device_type: Literal["cuda", "cpu"] = "cuda"

    @cached_property
    def settings(self) -> Settings:
        """The settings of the run. Those in ``_MAY_BE_AUTO`` may be "auto"."""
        values = {
            field: attrgetter(key)(self.stated if field in _MAY_BE_AUTO else self.run.config)
            for field, key in _KEYS.items()
        }
        return Settings(**values)

    def under(self, settings: Settings) -> Run:
        """Return the run of the same training with these settings.

        Raises:
            ConfigError: with every rule of the configuration that the settings break.
        """
        batch = {
            "train_batch_size": self.run.batch.train_batch_size,
            "gradient_accumulation_steps": None,
        }
        return self._resolved({**settings.keys, **batch}, settings.world_size)

    def at_length(self, settings: Settings, tokens: int, micro_batches: int) -> Run:
        """Return a run with these settings, on sequences of this length.

        Raises:
            ConfigError: with every rule of the configuration that they break.
        """
        model = self.run.config.model
        keys = {
            "data.sequence_length": tokens,
            "train_batch_size": settings.dp * micro_batches,
            "gradient_accumulation_steps": micro_batches,
            "training.steps": self.run.steps,  # otherwise, rules may refuse so few steps
            "training.tokens": None,
        }
        if model.positions == "rotary":  # learned positions have a table
            longest = max(tokens, model.max_position_embeddings)
            keys["model.max_position_embeddings"] = longest
        return self._resolved({**settings.keys, **keys}, settings.world_size)

    def peak_bytes(self, settings: Settings) -> float:
        """Return the predicted peak; infinite if the configuration refuses the settings."""
        try:
            return predict(self.under(settings), self.device_type).fullest.peak_bytes
        except ConfigError:
            return inf

    def set_text(self, settings: Settings) -> tuple[str, ...]:
        """Return the text after ``--set`` that changes the run of the file to valid settings."""
        samples, size = self.run.batch.train_batch_size, settings.micro_batch_size
        wanted = Batch(samples, size, samples // (size * settings.dp))
        before, replicate = dict(self.settings.keys), self.stated.parallel.replicate
        if settings.zero_stage > 0 or settings.dp != replicate:  # else it means the same as 1
            before[_KEYS["replicate"]] = replicate
        changed = {
            key: value
            for key, value in settings.keys.items()
            if key not in (_DATA, MICRO_BATCH) and value != before[key]
        }
        if self.stated.parallel.data not in ("auto", settings.dp):
            changed[_DATA] = settings.dp
        # Which numbers of the batch are needed depends on the file, so the shortest text is tried
        # first.
        numbers = zip(BATCH_KEYS, vars(wanted).values(), strict=True)
        train, micro, accumulation = ({key: number} for key, number in numbers)
        several = ({**micro, **accumulation}, {**train, **micro, **accumulation})
        chooses = self.stated.train_micro_batch_size_per_gpu == "auto"  # state a size instead
        for batch_keys in ({}, micro, accumulation, train, *several)[chooses:]:
            keys = {**changed, **batch_keys}
            if solve_batch(StatedBatch.of(self.stated.changed(keys)), settings.dp) == wanted:
                return tuple(f"{key}={_typed(value)}" for key, value in keys.items())
        raise AssertionError("all three numbers of the batch together always give it")

    def _resolved(self, keys: Mapping[str, Any], world_size: int) -> Run:
        """Return the run with these dotted keys, for GPUs even if this machine has none."""
        return resolve_run(
            self.stated.changed(keys),
            World(world_size, "the plan", self.device_type),
            name=self.run.name,
        )


def _typed(value: Any) -> str:
    """Return the value as ``--set`` reads it."""
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of one setting after which a run fits."""

    set_text: tuple[str, ...]  # what to type after ``--set``
    peak_bytes: int  # predicted peak of the changed run


def cheapest_change(training: Training, cluster: Cluster) -> Change | None:
    """Return the cheapest single change with which the run fits; None if no single one does."""
    for settings in chain(*_changes(training, cluster.gpus_per_node)):
        with suppress(ConfigError):
            run = training.under(settings)
            peak = predict(run, training.device_type).fullest.peak_bytes
            if _verdict(run, peak, cluster) == "fits":
                return Change(set_text=training.set_text(settings), peak_bytes=peak)
    return None


def _verdict(run: Run, peak_bytes: int, cluster: Cluster) -> Verdict:
    reserved = reserved_memory(run, cluster.device, cluster.gpus_per_node, peak_bytes)
    return verdict(peak_bytes, reserved, cluster.device)


def single_changes(training: Training, gpus_per_node: int) -> list[tuple[int, tuple[str, ...]]]:
    """Return the single changes that free memory on the fullest rank with the same number of ranks.

    Returns:
        The bytes that each change frees and what to type after ``--set``, the largest first.
    """
    peak = predict(training.run, training.device_type).fullest.peak_bytes
    best: list[tuple[int, tuple[str, ...]]] = []
    for attempts in _changes(training, gpus_per_node):
        smallest = min(attempts, key=training.peak_bytes, default=training.settings)
        freed = peak - training.peak_bytes(smallest)
        if freed > 0:
            best.append((int(freed), training.set_text(smallest)))
    return sorted(best, reverse=True)


def _changes(training: Training, gpus_per_node: int) -> list[list[Settings]]:
    """Return the settings that each change of the module's docstring leads to, in its order."""
    s, blocks = training.settings, training.stated.model.num_hidden_layers

    def one(applies: bool, **fields: Any) -> list[Settings]:
        return [replace(s, **fields)] if applies else []

    complete_gradients = s.zero_stage >= 2 and s.gradient_reduction == "per_step"
    return [
        one(s.tp > 1 and s.sequence_parallel is False, sequence_parallel=True),
        one(s.pp > 1 and s.schedule == "gpipe", schedule="1f1b"),
        one(s.dp * s.cp > 1 and s.zero_stage == 0, zero_stage=1),
        one(s.virtual_stages > 1 and s.micro_batch_groups != "auto", micro_batch_groups="auto"),
        _more_recomputation(s, blocks),
        one(s.virtual_stages > 1, virtual_stages=1),
        one(complete_gradients, gradient_reduction="per_micro_batch"),
        [
            replace(s, zero_stage=zero_stage, gradient_reduction="auto")
            for zero_stage in range(max(2, s.zero_stage + 1), 4)
            if s.dp * s.cp > 1
        ],
        [replace(s, replicate=count) for count in reversed(divisors(s.replicate)[:-1])],
        [replace(s, micro_batch_size=size) for size in reversed(divisors(s.micro_batch_size)[:-1])],
        one(
            s.activation_checkpointing != "full_offloaded" and training.device_type == "cuda",
            activation_checkpointing="full_offloaded",
            recomputed_blocks=None,
        ),
        [
            replace(_at(s, pp=s.pp, cp=s.cp, tp=tp), sequence_parallel=sequence_parallel)
            for tp in divisors(gpus_per_node)
            if tp > s.tp and s.world_size % (s.pp * s.cp * tp) == 0
            for sequence_parallel in dict.fromkeys(
                (s.sequence_parallel, s.sequence_parallel or True)
            )
        ],
        [_at(s, pp=s.pp, cp=s.cp * more, tp=s.tp) for more in divisors(s.dp)[1:]],
        [
            _at(s, pp=pp, cp=s.cp, tp=s.tp)
            for pp in divisors(s.world_size // (s.cp * s.tp))
            if s.pp < pp <= blocks
        ],
    ]


def _more_recomputation(s: Settings, blocks: int) -> list[Settings]:
    """Return selective recomputation of all blocks, then full one of more and more blocks."""
    kinds = get_args(Recomputation)

    def cost(kind: Recomputation, count: int | None) -> tuple[int, float]:
        return kinds.index(kind), count or inf

    of_a_stage = -(-blocks // s.pp)
    quarters = sorted({of_a_stage * quarter // 4 for quarter in (1, 2, 3)} - {0})
    choices: list[tuple[Recomputation, int | None]] = [("selective", None)]
    choices += [("full", count) for count in (*quarters, None)]
    now = cost(s.activation_checkpointing, s.recomputed_blocks)
    return [
        replace(s, activation_checkpointing=kind, recomputed_blocks=count)
        for kind, count in choices
        if cost(kind, count) > now
    ]


def _at(settings: Settings, *, pp: int, cp: int, tp: int) -> Settings:
    """Return the settings with these degrees, and with the dp that keeps the number of ranks."""
    return replace(settings, pp=pp, cp=cp, tp=tp, dp=settings.world_size // (pp * cp * tp))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One variant, with its figures."""

    settings: Settings
    forecast: Forecast
    peak_bytes: int  # predicted peak of the tensors of the fullest rank
    verdict: Verdict
    set_text: tuple[str, ...]  # what to type after ``--set``; empty for the run as configured

    @property
    def run(self) -> Run:
        """The resolved run."""
        return self.forecast.run

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.forecast.seconds

    def as_json(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        run, parallel = self.run, self.run.config.parallel
        return {
            **picked(run.grid, "pp", "dp", "cp", "tp", "replicate"),
            **picked(run, "zero_stage", "gradient_reduction"),
            **picked(parallel, "schedule", "virtual_stages", "micro_batch_groups"),
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

    layouts: tuple[Layout, ...]  # those that fit, the fastest first
    too_large: int  # number of those that do not fit, including all larger micro-batches
    least_peak_bytes: int | None  # the smallest peak that was tried; None if all break rules

    @property
    def best(self) -> Layout | None:
        """The fastest with the verdict "fits"; if there is none, the fastest that is "tight"."""
        return next(
            (layout for layout in self.layouts if layout.verdict == "fits"),
            self.layouts[0] if self.layouts else None,
        )

    def fastest_of_each_grid(self) -> list[Layout]:
        """Return the fastest variant of each (pp, dp, cp, tp), the fastest first."""
        found: dict[object, Layout] = {}
        for layout in self.layouts:
            found.setdefault(layout.settings.degrees, layout)
        return list(found.values())

    def as_json(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        figures = picked(self, "too_large", "least_peak_bytes")
        return {**figures, "layouts": [layout.as_json() for layout in self.layouts]}


def what_if(
    training: Training,
    cluster: Cluster,
    executor: Executor | None = None,
    show: Callable[[float], object] = lambda done: None,
) -> WhatIf:
    """Return every variant of the training that fits the cluster's devices.

    Variants differ in degrees (pp, dp, cp, tp), ZeRO stage, replicas, gradient reduction, schedule,
    chunks, recomputation and micro-batch. Those that break a rule of the configuration are omitted.
    So are tensor groups larger than a node: the collectives of every block would go over the
    network. Context degrees other than 1 and the stated one are tried if a rank has at least 4,096
    tokens of a sample. With fewer, its collectives usually take longer than its computation.
    ``full_offloaded`` is tried only if the configuration states it.

    Args:
        training: the training.
        cluster: the machines.
        executor: its processes share the work; None: this process does it.
        show: is called with the part of the work that is done, from 0 to 1.
    """
    degrees = list(_degrees(training, cluster.gpus_per_node))
    layouts: list[Layout] = []
    refused: list[_TooLarge] = []
    tasks = partial(_at_degrees, training, cluster)
    results: Iterator[tuple[list[Layout], list[_TooLarge]]] = map(tasks, degrees)
    if executor is not None:
        # Not ``executor.map``: after an exception it cancels its futures, and a broken executor
        # fails on cancelled futures.
        futures = [executor.submit(tasks, each) for each in degrees]
        results = (future.result() for future in futures)
    for done, (fitting, others) in enumerate(results, 1):
        layouts += fitting
        refused += others
        show(done / len(degrees))
    layouts.sort(key=attrgetter("seconds", "peak_bytes"))
    least: float = min((layout.peak_bytes for layout in layouts), default=inf)
    for too_large in sorted(refused, key=attrgetter("at_least")):
        if too_large.at_least < least:
            least = min(least, training.peak_bytes(too_large.settings))
    return WhatIf(
        layouts=tuple(layouts),
        too_large=sum(each.sizes for each in refused),
        least_peak_bytes=None if least == inf else int(least),
    )


class _TooLarge(NamedTuple):
    """A variant that does not fit."""

    at_least: int  # a lower bound of its peak that is already too large
    settings: Settings
    sizes: int = 1  # of micro-batches: its own, and all larger ones


def _at_degrees(
    training: Training, cluster: Cluster, degrees: tuple[int, int, int, int]
) -> tuple[list[Layout], list[_TooLarge]]:
    """Return the variants with these degrees that fit, and those that do not."""
    layouts: list[Layout] = []
    refused: list[_TooLarge] = []
    for sizes in _variants(training, *degrees):
        for index, settings in enumerate(sizes):
            try:
                layout = _layout(training, settings, cluster)
            except ConfigError:
                continue
            if isinstance(layout, _TooLarge):
                refused.append(layout._replace(sizes=len(sizes) - index))
                break
            layouts.append(layout)
            if settings.replicate == 1:
                layouts += _with_replicas(training, settings, layout, cluster)
    layouts += _with_chunks(training, layouts, cluster)
    return layouts, refused


def _layout(training: Training, settings: Settings, cluster: Cluster) -> Layout | _TooLarge:
    """Return the layout with these settings if it fits.

    Raises:
        ConfigError: the settings break a rule of the configuration.
    """
    run = training.under(settings)
    prediction = predict(run, training.device_type)
    reserved = reserved_memory(run, cluster.device, cluster.gpus_per_node, peak_bytes=0)
    for size_of in (attrgetter("memory.least_bytes"), attrgetter("peak_bytes")):
        for at_least in map(size_of, prediction.stages):
            if at_least + reserved.certain > cluster.device.memory_bytes:
                return _TooLarge(at_least, settings)
    peak = prediction.fullest.peak_bytes
    return Layout(
        settings=settings,
        forecast=forecast(run, cluster),
        peak_bytes=peak,
        verdict=_verdict(run, peak, cluster),
        set_text=training.set_text(settings),
    )


def _with_replicas(
    training: Training, settings: Settings, layout: Layout, cluster: Cluster
) -> Iterator[Layout]:
    """Yield the layout with the fastest number of replicas, unless it is 1 or the stated one.

    More replicas need more memory, so they must make the step at least 1 % shorter. At best, they
    save all collectives of the data axis.
    """
    step, block = layout.forecast.step, layout.forecast.step.layers.block
    counts = [count for count in divisors(settings.dp)[1:] if count < settings.dp * settings.cp]
    if not (settings.zero_stage and counts) or step.total - step.dp >= _MUCH_FASTER * step.total:
        return
    work, seconds = workload_of(layout.run, cluster.device_type), {}
    for count in counts:  # A count changes only two terms.
        rates = Rates(replace(work, grid=replace(work.grid, replicate=count)), cluster)
        dp = cluster.calibration * rates.network.dp(step.stage, block.forward, block.backward)
        optimizer = cluster.calibration * rates.optimizer(step.stage)
        seconds[count] = replace(step, dp=dp, optimizer=optimizer).total
    for count in sorted(seconds, key=seconds.__getitem__):
        if count == training.settings.replicate:
            return
        if seconds[count] < _MUCH_FASTER * layout.seconds:
            found = _layout(training, replace(settings, replicate=count), cluster)
            if isinstance(found, Layout):
                yield found
                return


def _with_chunks(
    training: Training, layouts: Sequence[Layout], cluster: Cluster
) -> Iterator[Layout]:
    """Yield the fastest layout with chunks that fits, and faster ones that are tight.

    All have the same degrees. They need more memory, so they must be at least 1 % faster than all
    of ``layouts``. At best, a layout with chunks has neither a bubble nor collectives of the data
    axis.
    """
    limit = _MUCH_FASTER * min((layout.seconds for layout in layouts), default=0.0)
    tried: list[tuple[float, Settings]] = []
    for layout in layouts:
        s, step = layout.settings, layout.forecast.step
        if s.pp == 1 or s.schedule == "gpipe" or s.virtual_stages > 1:
            continue
        if step.total - step.bubble - step.dp >= limit:
            continue
        for settings in _chunked(training, layout):
            with suppress(ConfigError):
                seconds = forecast(training.under(settings), cluster).seconds
                if seconds < limit:
                    tried.append((seconds, settings))

    @cache
    def fitting(settings: Settings) -> Layout | None:
        found = _layout(training, settings, cluster)
        return found if isinstance(found, Layout) else None

    for _, s in sorted(tried, key=itemgetter(0)):
        # This needs no more memory. Most of ``tried`` do not even fit with it.
        smaller = replace(s, replicate=1, micro_batch_groups="auto", gradient_reduction="auto")
        with suppress(ConfigError):
            chunked = fitting(smaller) and fitting(s)
            if chunked is not None:
                yield chunked
                if chunked.verdict == "fits":
                    return


def _chunked(training: Training, layout: Layout) -> Iterator[Settings]:
    """Yield the settings of a layout with several chunks: 2, 4 and the stated number, with as many
    groups as possible, the stated number of them, and one.
    """
    s, own = layout.settings, training.settings
    most = layout.run.batch.gradient_accumulation_steps // s.pp
    counts: tuple[Literal["auto"] | int, ...] = ("auto", own.micro_batch_groups, 1)
    groups = dict.fromkeys(count for count in counts if count != most)
    reduction = "auto" if s.gradient_reduction == "per_micro_batch" else s.gradient_reduction
    for chunks in sorted({2, 4, own.virtual_stages} - {1}):
        for count in groups:
            if chunks != own.virtual_stages or count != own.micro_batch_groups:
                yield replace(
                    s, virtual_stages=chunks, micro_batch_groups=count, gradient_reduction=reduction
                )


@dataclass(frozen=True, kw_only=True)
class LongestSequence:
    """The longest sequence that fits at some degrees."""

    settings: Settings
    tokens: int
    peak_bytes: int  # predicted peak of the tensors of the fullest rank

    def as_json(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return {
            **picked(self.settings, "pp", "dp", "cp", "tp"),
            **picked(self, "tokens", "peak_bytes"),
        }


def longest_sequences(
    training: Training, cluster: Cluster, show: Callable[[float], object] = lambda done: None
) -> list[LongestSequence]:
    """Return the longest sequence that fits for each (pp, dp, cp, tp), the longest first.

    ``show`` is called with the part of the work that is done, from 0 to 1.

    A micro-batch is one sequence. A step has as many as configured, or one for each pipeline stage
    if this is more. All other settings are those of the run. Lengths are multiples of what the
    degrees need and, with rotary positions, of 1,024. Learned positions have a table, whose length
    is the limit.
    """
    count = training.run.batch.gradient_accumulation_steps
    degrees = list(_degrees(training, cluster.gpus_per_node))
    found: list[LongestSequence] = []
    for pp, dp, cp, tp in degrees:
        show(len(found) / len(degrees))
        own = replace(training.settings, pp=pp, dp=dp, cp=cp, tp=tp, micro_batch_size=1)
        found.append(_longest_sequence(training, own, max(count, pp), cluster))
    fitting = [each for each in found if each.tokens]
    return sorted(fitting, key=lambda each: (-each.tokens, each.settings.degrees))


def _longest_sequence(
    training: Training, settings: Settings, micro_batches: int, cluster: Cluster
) -> LongestSequence:
    """Return the longest sequence with these settings; of 0 tokens if none fits."""
    model, peaks = training.run.config.model, {0: 0}
    unit, longest = 2 * settings.cp * settings.tp, model.max_position_embeddings
    if model.positions == "rotary":
        unit, longest = lcm(_LENGTH_UNIT, unit), LARGEST_LENGTH

    def is_too_long(units: int) -> bool:
        try:
            run = training.at_length(settings, units * unit, micro_batches)
        except ConfigError:
            return True
        peaks[units] = predict(run, training.device_type).fullest.peak_bytes
        return _verdict(run, peaks[units], cluster) != "fits"

    # Memory grows with the length.
    units = bisect_left(range(1, longest // unit + 1), True, key=is_too_long)
    return LongestSequence(settings=settings, tokens=units * unit, peak_bytes=peaks[units])


def _variants(training: Training, pp: int, dp: int, cp: int, tp: int) -> Iterator[list[Settings]]:
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
    at_degrees = replace(own, pp=pp, dp=dp, cp=cp, tp=tp)
    reductions = list(_reductions(own))
    if dp * cp == 1:  # all ZeRO stages are the same
        reductions = [(own.zero_stage, own.gradient_reduction)]
    for (zero_stage, reduction), replicate, schedule, chunks, recomputation in product(
        reductions,
        {1, own.replicate},
        schedules,
        {1, own.virtual_stages},
        dict.fromkeys(("none", "selective", "full", own.activation_checkpointing)),
    ):
        if dp % replicate or (replicate > 1 and zero_stage == 0):
            continue
        if chunks > 1 and (pp == 1 or schedule == "gpipe"):
            continue
        is_own = recomputation == own.activation_checkpointing
        variant = replace(
            at_degrees,
            replicate=replicate,
            zero_stage=zero_stage,
            gradient_reduction=reduction,
            schedule=schedule,
            virtual_stages=chunks,
            activation_checkpointing=recomputation,
            recomputed_blocks=own.recomputed_blocks if is_own else None,
        )
        yield [replace(variant, micro_batch_size=size) for size in sizes]


def _degrees(training: Training, largest_tensor: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield all (pp, dp, cp, tp) of the training's ranks."""
    ranks, blocks = training.settings.world_size, training.stated.model.num_hidden_layers
    for tp in (tp for tp in divisors(ranks) if tp <= largest_tensor):
        for pp in (pp for pp in divisors(ranks // tp) if pp <= blocks):
            for cp in divisors(ranks // (tp * pp)):
                yield pp, ranks // (pp * cp * tp), cp, tp


def _reductions(own: Settings) -> Iterator[tuple[int, Any]]:
    """Yield ZeRO stages with their gradient reductions. Stages 0 and 1 reduce once a step."""
    other = "per_micro_batch" if own.gradient_reduction == "per_step" else "per_step"
    for zero_stage in range(4):
        yield zero_stage, own.gradient_reduction
        if zero_stage >= 2:
            yield zero_stage, other

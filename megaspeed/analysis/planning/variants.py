"""The same training under other settings: what a plan compares, and how to type the difference.

    Training (the file as it is stated, and the run that it gives)
        .under(settings)       -> Run      the same samples a step, other degrees, ZeRO stage, ...
        .set_text(settings)    -> what to type after --set to get it from the file

Model, data, optimizer and ``train_batch_size`` stay; the number of micro-batches follows. A variant
is made from what the file states, so that what it leaves open follows from the variant itself.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import Any, Literal

from megaspeed.analysis.planning.prediction import predict_peak_bytes
from megaspeed.config.errors import ConfigError
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.config.rules import divisors
from megaspeed.config.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What may differ between two ways to do the same training."""

    pp: int
    dp: int
    tp: int
    zero_stage: int
    micro_batch_size: int
    activation_checkpointing: Literal["none", "full"]
    sequence_parallel: bool
    schedule: Literal["gpipe", "1f1b"]
    gradient_reduction: Literal["auto", "per_step", "per_micro_batch"]

    @property
    def world_size(self) -> int:
        """Ranks that these degrees need."""
        return self.pp * self.dp * self.tp


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is to be planned.

    Attributes:
        stated: the configuration as the file and the command line have it; it may say "auto".
        run: what it gives on the planned number of ranks.
    """

    stated: RunConfig
    run: Run

    @classmethod
    def of(cls, stated: RunConfig, *, name: str, world_size: int) -> "Training":
        """The training of a configuration on GPUs.

        Raises:
            ConfigError: where it cannot run on so many ranks.
        """
        return cls(stated=stated, run=_resolved(stated, name, world_size))

    @property
    def settings(self) -> Settings:
        """Those of the run; a gradient reduction that is left open stays open."""
        run, parallel = self.run, self.run.config.parallel
        return Settings(
            pp=run.grid.pp,
            dp=run.grid.dp,
            tp=run.grid.tp,
            zero_stage=run.zero_stage,
            micro_batch_size=run.batch.micro_batch_size,
            activation_checkpointing=parallel.activation_checkpointing,
            sequence_parallel=parallel.sequence_parallel,
            schedule=parallel.schedule,
            gradient_reduction=self.stated.parallel.gradient_reduction,
        )

    def under(self, settings: Settings) -> Run:
        """The same training under these settings.

        Raises:
            ConfigError: with every law of the configuration that the settings break.
        """
        keys = {
            **_layout_keys(settings),
            "parallel.data": settings.dp,
            "train_batch_size": self.run.batch.train_batch_size,
            "train_micro_batch_size_per_gpu": settings.micro_batch_size,
            "gradient_accumulation_steps": None,
        }
        return _resolved(_with_keys(self.stated, keys), self.run.name, settings.world_size)

    def set_text(self, settings: Settings) -> tuple[str, ...]:
        """What to type after ``--set`` so that the file gives the run of these settings.

        Raises:
            ConfigError: where the settings break a law of the configuration.
        """
        wanted = self.under(settings)
        before, after = _layout_keys(self.settings), _layout_keys(settings)
        changed = {key: value for key, value in after.items() if value != before[key]}
        if self.stated.parallel.data not in ("auto", settings.dp):
            changed["parallel.data"] = settings.dp
        for batch_keys in _batch_keys(wanted):
            keys = {**changed, **batch_keys}
            if self._gives(wanted, keys):
                return tuple(f"{key}={_typed(value)}" for key, value in keys.items())
        raise AssertionError("all three numbers of the batch together always give it")

    def _gives(self, wanted: Run, keys: Mapping[str, Any]) -> bool:
        config = _with_keys(self.stated, keys)
        try:
            run = _resolved(config, self.run.name, wanted.grid.world_size)
        except ConfigError:
            return False
        return run.batch == wanted.batch


def _layout_keys(settings: Settings) -> dict[str, Any]:
    return {
        "parallel.pipeline": settings.pp,
        "parallel.tensor": settings.tp,
        "parallel.sequence_parallel": settings.sequence_parallel,
        "parallel.schedule": settings.schedule,
        "parallel.activation_checkpointing": settings.activation_checkpointing,
        "parallel.gradient_reduction": settings.gradient_reduction,
        "zero_optimization.stage": settings.zero_stage,
    }


def _batch_keys(run: Run) -> Iterator[dict[str, int]]:
    """Ways to state the batch, the shortest first: which is enough depends on the file."""
    batch = run.batch
    train = {"train_batch_size": batch.train_batch_size}
    micro = {"train_micro_batch_size_per_gpu": batch.micro_batch_size}
    accumulation = {"gradient_accumulation_steps": batch.gradient_accumulation_steps}
    yield from ({}, micro, accumulation, train, {**micro, **accumulation})
    yield {**train, **micro, **accumulation}


def _with_keys(config: RunConfig, keys: Mapping[str, Any]) -> RunConfig:
    """The config with these dotted keys replaced; its laws are checked when it is resolved."""
    top: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    for key, value in keys.items():
        section, _, name = key.rpartition(".")
        (sections.setdefault(section, {}) if section else top)[name] = value
    for section, update in sections.items():
        top[section] = getattr(config, section).model_copy(update=update)
    return config.model_copy(update=top)


def _resolved(config: RunConfig, name: str, world_size: int) -> Run:
    """For GPUs, whatever machine plans it."""
    return resolve_run(
        config, name=name, world_size=world_size, world_source="the plan", device_type="cuda"
    )


def _typed(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# Where a run does not fit its device: the cheapest change after which it does.
#
# Changes are tried in the order of what they cost; the train batch and the world size stay:
#
#     sequence parallelism     nothing: an all-reduce becomes a reduce-scatter and an all-gather
#                              (Korthikanti et al. 2022, section 4.2.2)
#     1f1b instead of gpipe    nothing: the same bubble (Narayanan et al. 2021, section 2.2.1)
#     ZeRO-1 instead of 0      nothing: as many bytes as an all-reduce (ZeRO, section 7.2)
#     recomputation            a third more operations: one more forward (Chen et al. 2016)
#     gradient reduction       after every micro-batch: the gradients travel once for each
#     ZeRO-2, ZeRO-3           that, and with 3 the parameters travel too (ZeRO, section 7.2)
#     smaller micro-batch      smaller matrices, and more of what travels once for each
#     more tensor ranks        four collectives a block; within a node only
#     more pipeline stages     a larger bubble
#     more ranks               more machines
#
# First each alone. Where none is enough, they are added up in that order, and when the run fits,
# those that it can do without are taken back, dearest first. Each attempt is a prediction of its
# own.

WORLD_FACTORS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""How many times the ranks are tried where no setting is enough."""


@dataclass(frozen=True, kw_only=True)
class CheapestChange:
    """What to do about a run that does not fit.

    Attributes:
        fits: whether the changed run fits; if not, it is the smallest that was found.
        set_text: what to type after ``--set``.
        world_size: ranks of the changed run.
        peak_bytes: its predicted peak.
    """

    fits: bool
    set_text: tuple[str, ...]
    world_size: int
    peak_bytes: int

    def as_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {
            "fits": self.fits,
            "set": list(self.set_text),
            "world_size": self.world_size,
            "peak_bytes": self.peak_bytes,
        }


def cheapest_change(training: Training, usable_bytes: int, gpus_per_node: int) -> CheapestChange:
    """The cheapest change after which the run takes at most ``usable_bytes`` a rank."""
    search = _Search(training, usable_bytes, gpus_per_node)
    found = search.alone() or search.together() or search.with_more_ranks()
    settings = found or search.smallest
    return CheapestChange(
        fits=found is not None,
        set_text=training.set_text(settings),
        world_size=settings.world_size,
        peak_bytes=predict_peak_bytes(training.under(settings)),
    )


def single_changes(training: Training, gpus_per_node: int) -> list[tuple[int, tuple[str, ...]]]:
    """Each change alone, on as many ranks: the bytes that it frees on the fullest rank, and what to
    type after ``--set``. The one that frees most comes first; those that free nothing are left out.
    """
    start = training.settings
    peak = predict_peak_bytes(training.run)
    best: dict[tuple[str, ...], tuple[int, tuple[str, ...]]] = {}
    for change in _changes(training.stated.model.num_hidden_layers, gpus_per_node):
        for attempt in change.attempts(start):
            try:
                freed = peak - predict_peak_bytes(training.under(attempt))
            except ConfigError:
                continue
            if freed > best.get(change.touches, (0, ()))[0]:
                best[change.touches] = (freed, training.set_text(attempt))
    return sorted(best.values(), reverse=True)


@dataclass(frozen=True, kw_only=True)
class _Change:
    """One kind of change: the settings that it leads to, cheapest first, and what it touches."""

    attempts: Callable[[Settings], Iterator[Settings]]
    touches: tuple[str, ...]


class _Search:
    """Attempts at one run. What the configuration refuses does not fit."""

    def __init__(self, training: Training, usable_bytes: int, gpus_per_node: int) -> None:
        self._training = training
        self._usable_bytes = usable_bytes
        self._start = training.settings
        self._changes = _changes(training.stated.model.num_hidden_layers, gpus_per_node)
        self._peak_bytes = cache(self._predicted_peak_bytes)
        self.smallest = self._start

    def alone(self) -> Settings | None:
        """The first single change that is enough."""
        attempts = (each for change in self._changes for each in change.attempts(self._start))
        return next(filter(self._fits, attempts), None)

    def together(self) -> Settings | None:
        """Changes added up until they are enough, without those that are not needed."""
        for change in self._changes:
            for attempt in list(change.attempts(self.smallest)):
                if self._fits(attempt):
                    return self._without_the_needless(attempt)
                self.smallest = min(self.smallest, attempt, key=self._peak_bytes)
        return None

    def with_more_ranks(self) -> Settings | None:
        """The fewest times as many ranks that are enough beside all other changes."""
        before = self.smallest
        for factor in WORLD_FACTORS:
            wider = replace(before, dp=factor * before.dp)
            laid_out = (each for change in self._changes for each in change.attempts(wider))
            for attempt in (wider, replace(before, pp=factor * before.pp), *laid_out):
                if self._fits(attempt):
                    return self._without_the_needless(attempt)
                self.smallest = min(self.smallest, attempt, key=self._peak_bytes)
        return None

    def _without_the_needless(self, settings: Settings) -> Settings:
        """As cheap as it gets on the same ranks, one change after the other, the dearest first."""
        for change in reversed(self._changes):
            undone = _undone(settings, self._start, change.touches)
            cheaper = [undone, *change.attempts(undone)]
            settings = next(filter(self._fits, cheaper), settings)
        return settings

    def _fits(self, settings: Settings) -> bool:
        return self._peak_bytes(settings) <= self._usable_bytes

    def _predicted_peak_bytes(self, settings: Settings) -> float:
        try:
            variant = self._training.under(settings)
        except ConfigError:
            return inf
        return predict_peak_bytes(variant)


def _changes(blocks: int, gpus_per_node: int) -> tuple[_Change, ...]:
    """What the module's docstring lists, in its order."""

    def more_tensor_ranks(settings: Settings) -> Iterator[Settings]:
        for tp in divisors(gpus_per_node):
            if tp > settings.tp and _divides(settings, settings.pp * tp):
                yield _at(settings, pp=settings.pp, tp=tp)
                yield replace(_at(settings, pp=settings.pp, tp=tp), sequence_parallel=True)

    def more_pipeline_stages(settings: Settings) -> Iterator[Settings]:
        for pp in divisors(settings.world_size // settings.tp):
            if settings.pp < pp <= blocks:
                yield _at(settings, pp=pp, tp=settings.tp)

    return (
        _Change(attempts=_sequence_parallelism, touches=("sequence_parallel",)),
        _Change(attempts=_one_forward_one_backward, touches=("schedule",)),
        _Change(attempts=_partitioned_optimizer_states, touches=("zero_stage",)),
        _Change(attempts=_recomputation, touches=("activation_checkpointing",)),
        _Change(attempts=_reduction_per_micro_batch, touches=("gradient_reduction",)),
        _Change(attempts=_higher_zero_stage, touches=("zero_stage", "gradient_reduction")),
        _Change(attempts=_smaller_micro_batch, touches=("micro_batch_size",)),
        _Change(attempts=more_tensor_ranks, touches=("tp",)),
        _Change(attempts=more_pipeline_stages, touches=("pp",)),
    )


def _sequence_parallelism(settings: Settings) -> Iterator[Settings]:
    if settings.tp > 1 and not settings.sequence_parallel:
        yield replace(settings, sequence_parallel=True)


def _one_forward_one_backward(settings: Settings) -> Iterator[Settings]:
    if settings.pp > 1 and settings.schedule == "gpipe":
        yield replace(settings, schedule="1f1b")


def _partitioned_optimizer_states(settings: Settings) -> Iterator[Settings]:
    if settings.dp > 1 and settings.zero_stage == 0:
        yield replace(settings, zero_stage=1)


def _recomputation(settings: Settings) -> Iterator[Settings]:
    if settings.activation_checkpointing == "none":
        yield replace(settings, activation_checkpointing="full")


def _reduction_per_micro_batch(settings: Settings) -> Iterator[Settings]:
    if settings.zero_stage >= 2 and settings.gradient_reduction == "per_step":
        yield replace(settings, gradient_reduction="per_micro_batch")


def _higher_zero_stage(settings: Settings) -> Iterator[Settings]:
    if settings.dp > 1:
        for zero_stage in range(max(2, settings.zero_stage + 1), 4):
            yield replace(settings, zero_stage=zero_stage, gradient_reduction="auto")


def _smaller_micro_batch(settings: Settings) -> Iterator[Settings]:
    for micro_batch_size in reversed(divisors(settings.micro_batch_size)[:-1]):
        yield replace(settings, micro_batch_size=micro_batch_size)


def _divides(settings: Settings, ranks: int) -> bool:
    return settings.world_size % ranks == 0


def _at(settings: Settings, *, pp: int, tp: int) -> Settings:
    """These degrees on as many ranks; dp takes what is left."""
    return replace(settings, pp=pp, tp=tp, dp=settings.world_size // (pp * tp))


def _undone(settings: Settings, start: Settings, touched: tuple[str, ...]) -> Settings:
    """These fields as they were, on as many ranks as now."""
    undone = replace(settings, **{field: getattr(start, field) for field in touched})
    if settings.world_size % (undone.pp * undone.tp):
        return settings
    return replace(undone, dp=settings.world_size // (undone.pp * undone.tp))

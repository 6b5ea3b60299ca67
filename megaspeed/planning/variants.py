"""The same training with other settings, and the cheapest change that makes it fit a device.

    Training (the configuration as stated, and the run that it gives)
        .under(settings)       -> Run      the same samples a step, other degrees, ZeRO stage, ...
        .set_text(settings)    -> what to type after --set to get it from the file

Model, data, optimizer and ``train_batch_size`` stay the same. The number of micro-batches is
computed from them. A variant is resolved from the stated configuration, so values of "auto" are
resolved for the variant.

Changes are tried in the order of their cost. They keep the train batch and the world size:

    sequence parallelism     little: an all-reduce becomes a reduce-scatter and an all-gather, and
                             a backward gathers some inputs again while it computes (Korthikanti
                             et al. 2022, section 4.2.2)
    1f1b instead of gpipe    nothing: the same bubble (Narayanan et al. 2021, section 2.2.1)
    ZeRO-1 instead of 0      nothing: as many bytes as an all-reduce (ZeRO, section 7.2)
    selective recomputation  a few percent: norms and activation functions once more (Korthikanti
                             et al. 2022, section 5)
    full recomputation       for all blocks a third more operations: one more forward (Chen et al.
                             2016); first for a quarter of the blocks of each pipeline stage
    gradient reduction       once for each micro-batch: more traffic
    ZeRO-2, ZeRO-3           the same; ZeRO-3 also gathers parameters (ZeRO, section 7.2)
    smaller micro-batch      smaller matrices, and more traffic that occurs once for each
    more tensor ranks        four collectives a block; within a node only
    more pipeline stages     a larger bubble
    more ranks               more machines

Each change is tried alone. If none is enough, they are combined in this order. If the run then
fits, changes that it does not need are undone, the most expensive first.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import chain
from math import inf
from operator import attrgetter
from typing import Any, Literal, get_args

from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import BATCH_KEYS, World
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.config.rules import divisors
from megaspeed.config.run import Recomputation, RunConfig
from megaspeed.files.json_values import picked
from megaspeed.planning.prediction import predict_peak_bytes

_DATA, _MICRO_BATCH = "parallel.data", "train_micro_batch_size_per_gpu"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings in which two variants of one training may differ."""

    pp: int
    dp: int
    tp: int
    zero_stage: int
    micro_batch_size: int
    activation_checkpointing: Recomputation
    recomputed_blocks: int | None
    sequence_parallel: Literal["auto"] | bool
    schedule: Literal["gpipe", "1f1b"]
    gradient_reduction: Literal["auto", "per_step", "per_micro_batch"]

    @property
    def world_size(self) -> int:
        """Number of ranks for these degrees."""
        return self.pp * self.dp * self.tp

    @property
    def keys(self) -> dict[str, Any]:
        """Dotted key of the JSON -> value."""
        return {key: getattr(self, field) for field, key in _KEYS.items()}


_KEYS = {
    "pp": "parallel.pipeline",
    "dp": _DATA,
    "tp": "parallel.tensor",
    "sequence_parallel": "parallel.sequence_parallel",
    "schedule": "parallel.schedule",
    "activation_checkpointing": "parallel.activation_checkpointing",
    "recomputed_blocks": "parallel.recomputed_blocks",
    "gradient_reduction": "parallel.gradient_reduction",
    "zero_stage": "zero_optimization.stage",
    "micro_batch_size": _MICRO_BATCH,
}
"""Field of ``Settings`` -> key of the JSON."""

_MAY_BE_AUTO = ("sequence_parallel", "gradient_reduction")
"""Fields whose "auto" is resolved for each variant. All others are those of the resolved run."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training to plan."""

    stated: RunConfig  # the configuration of the file and the command line; values may be "auto"
    run: Run  # the configuration, resolved for the planned number of ranks
    device_type: Literal["cuda", "cpu"] = "cuda"

    @cached_property
    def settings(self) -> Settings:
        """The settings of the run. Gradient reduction and sequence parallelism may be "auto"."""
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

    def peak_bytes(self, settings: Settings) -> float:
        """Return the predicted peak; infinite if the configuration refuses the settings."""
        try:
            return predict_peak_bytes(self.under(settings), self.device_type)
        except ConfigError:
            return inf

    def set_text(self, settings: Settings) -> tuple[str, ...]:
        """Return the text after ``--set`` that changes the file's run to these settings.

        Raises:
            ConfigError: the settings break a rule of the configuration.
        """
        wanted, before = self.under(settings), self.settings.keys
        changed = {
            key: value
            for key, value in settings.keys.items()
            if key not in (_DATA, _MICRO_BATCH) and value != before[key]
        }
        if self.stated.parallel.data not in ("auto", settings.dp):
            changed[_DATA] = settings.dp
        # Which numbers of the batch are needed depends on the file, so the shortest text is tried
        # first.
        numbers = zip(BATCH_KEYS, vars(wanted.batch).values(), strict=True)
        train, micro, accumulation = ({key: number} for key, number in numbers)
        several = ({**micro, **accumulation}, {**train, **micro, **accumulation})
        for batch_keys in ({}, micro, accumulation, train, *several):
            keys = {**changed, **batch_keys}
            with suppress(ConfigError):
                if self._resolved(keys, settings.world_size).batch == wanted.batch:
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


_WORLD_FACTORS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Multiples of the number of ranks that are tried if no setting is enough."""


@dataclass(frozen=True, kw_only=True)
class CheapestChange:
    """The cheapest change of a run that does not fit."""

    fits: bool  # whether the changed run fits; if not, it is the smallest that was found
    set_text: tuple[str, ...]  # what to type after ``--set``
    world_size: int  # ranks of the changed run
    peak_bytes: int  # its predicted peak

    def as_json(self) -> dict[str, Any]:
        """Return the same as JSON values."""
        return {**picked(self, "fits", "world_size", "peak_bytes"), "set": list(self.set_text)}


def cheapest_change(
    training: Training, usable_bytes: Callable[[Run], int], gpus_per_node: int
) -> CheapestChange:
    """Return the cheapest change after which a run's peak is at most its ``usable_bytes``."""
    search = _Search(training, usable_bytes, gpus_per_node)
    found = search.alone() or search.together() or search.with_more_ranks()
    settings = found or search.smallest
    return CheapestChange(
        fits=found is not None,
        set_text=training.set_text(settings),
        world_size=settings.world_size,
        peak_bytes=predict_peak_bytes(training.under(settings), training.device_type),
    )


def single_changes(training: Training, gpus_per_node: int) -> list[tuple[int, tuple[str, ...]]]:
    """Return the single changes that free memory on the fullest rank with the same number of ranks.

    Returns:
        The bytes that each change frees and what to type after ``--set``, the largest first.
    """
    start = training.settings
    peak = predict_peak_bytes(training.run, training.device_type)
    best: list[tuple[int, tuple[str, ...]]] = []
    blocks = training.stated.model.num_hidden_layers
    for attempts in _changes(start, blocks, gpus_per_node).values():
        smallest = min(attempts, key=training.peak_bytes, default=start)
        freed = peak - training.peak_bytes(smallest)
        if freed > 0:
            best.append((int(freed), training.set_text(smallest)))
    return sorted(best, reverse=True)


_Fields = tuple[str, ...]
"""Names of fields of ``Settings``."""


class _Search:
    """Searches for a change of one run. Settings that the configuration refuses do not fit."""

    def __init__(
        self, training: Training, usable_bytes: Callable[[Run], int], gpus_per_node: int
    ) -> None:
        self._training, self._usable_bytes = training, usable_bytes
        self._start = training.settings
        blocks = training.stated.model.num_hidden_layers
        self._changes = partial(_changes, blocks=blocks, gpus_per_node=gpus_per_node)
        self._peak_bytes = cache(training.peak_bytes)
        self.smallest = self._start

    def alone(self) -> Settings | None:
        """Return the first single change that is enough."""
        return next(filter(self._fits, self._attempts(self._start)), None)

    def together(self) -> Settings | None:
        """Return combined changes that are enough, without those that are not needed."""
        for fields in self._changes(self._start):
            found = self._first_that_fits(self._changes(self.smallest)[fields])
            if found:
                return found
        return None

    def with_more_ranks(self) -> Settings | None:
        """Return the smallest multiple of the ranks that is enough, together with other changes."""
        before = self.smallest
        for factor in _WORLD_FACTORS:
            wider = replace(before, dp=factor * before.dp)
            deeper = replace(before, pp=factor * before.pp)
            found = self._first_that_fits([wider, deeper, *self._attempts(wider)])
            if found:
                return found
        return None

    def _attempts(self, settings: Settings) -> Iterator[Settings]:
        return chain.from_iterable(self._changes(settings).values())

    def _first_that_fits(self, attempts: list[Settings]) -> Settings | None:
        for attempt in attempts:
            if self._fits(attempt):
                return self._without_the_needless(attempt)
            self.smallest = min(self.smallest, attempt, key=self._peak_bytes)
        return None

    def _without_the_needless(self, settings: Settings) -> Settings:
        """Undo changes that are not needed, the most expensive first."""
        for fields in reversed(self._changes(settings)):
            undone = _undone(settings, self._start, fields)
            attempts = [undone, *self._changes(undone)[fields]]
            settings = next(filter(self._fits, attempts), settings)
        return settings

    def _fits(self, settings: Settings) -> bool:
        peak = self._peak_bytes(settings)
        return peak < inf and peak <= self._usable_bytes(self._training.under(settings))


def _changes(s: Settings, blocks: int, gpus_per_node: int) -> dict[_Fields, list[Settings]]:
    """Return the changes of the module's docstring, in its order.

    They are the fields that each changes -> the settings that it leads to, cheapest first.
    """

    def one(applies: bool, **fields: Any) -> list[Settings]:
        return [replace(s, **fields)] if applies else []

    complete_gradients = s.zero_stage >= 2 and s.gradient_reduction == "per_step"
    return {
        ("sequence_parallel",): one(
            s.tp > 1 and s.sequence_parallel is False, sequence_parallel=True
        ),
        ("schedule",): one(s.pp > 1 and s.schedule == "gpipe", schedule="1f1b"),
        ("zero_stage",): one(s.dp > 1 and s.zero_stage == 0, zero_stage=1),
        ("activation_checkpointing", "recomputed_blocks"): _more_recomputation(s, blocks),
        ("gradient_reduction",): one(complete_gradients, gradient_reduction="per_micro_batch"),
        ("zero_stage", "gradient_reduction"): [
            replace(s, zero_stage=zero_stage, gradient_reduction="auto")
            for zero_stage in range(max(2, s.zero_stage + 1), 4)
            if s.dp > 1
        ],
        ("micro_batch_size",): [
            replace(s, micro_batch_size=size)
            for size in reversed(divisors(s.micro_batch_size)[:-1])
        ],
        ("tp",): [
            replace(_at(s, pp=s.pp, tp=tp), sequence_parallel=sequence_parallel)
            for tp in divisors(gpus_per_node)
            if tp > s.tp and s.world_size % (s.pp * tp) == 0
            for sequence_parallel in dict.fromkeys(
                (s.sequence_parallel, s.sequence_parallel or True)
            )
        ],
        ("pp",): [
            _at(s, pp=pp, tp=s.tp) for pp in divisors(s.world_size // s.tp) if s.pp < pp <= blocks
        ],
    }


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


def _at(settings: Settings, *, pp: int, tp: int) -> Settings:
    """Return the settings with these degrees, and with the dp that keeps the number of ranks."""
    return replace(settings, pp=pp, tp=tp, dp=settings.world_size // (pp * tp))


def _undone(settings: Settings, start: Settings, fields: _Fields) -> Settings:
    """Return ``settings`` with these fields reset to ``start``, on the same number of ranks."""
    undone = replace(settings, **{field: getattr(start, field) for field in fields})
    if settings.world_size % (undone.pp * undone.tp):
        return settings
    return replace(undone, dp=settings.world_size // (undone.pp * undone.tp))

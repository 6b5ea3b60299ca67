"""The same training with other settings.

    Training (the configuration as stated, and the run that it gives)
        .under(settings)       -> Run      the same samples a step, other degrees, ZeRO stage, ...
        .set_text(settings)    -> what to type after --set to get it from the file

Model, data, optimizer and ``train_batch_size`` stay the same. The number of micro-batches is
computed from them. A variant is resolved from the stated configuration, so values of "auto" are
resolved for the variant.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from operator import attrgetter
from typing import Any, Literal

from megaspeed.config.errors import ConfigError
from megaspeed.config.layout import BATCH_KEYS, Batch, StatedBatch, World, solve_batch
from megaspeed.config.model import ContextMethod, ExpertExchange
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.config.rules import divisors
from megaspeed.config.run import Recomputation, RunConfig
from megaspeed.planning.costs.reserved_memory import Verdict, reserved_memory, verdict
from megaspeed.planning.costs.workload import Cluster
from megaspeed.planning.prediction import predict

_DATA, MICRO_BATCH = "parallel.data", "train_micro_batch_size_per_gpu"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings in which two variants of one training may differ."""

    pp: int
    dp: int
    cp: int
    tp: int
    ep: int  # ranks that share experts; 1 if the model has none
    expert_exchange: Literal["auto"] | ExpertExchange
    context_method: Literal["auto"] | ContextMethod
    replicate: int  # of ZeRO-1, 2 and 3
    zero_stage: int
    micro_batch_size: int
    activation_checkpointing: Recomputation
    recomputed_blocks: int | None
    sequence_parallel: Literal["auto"] | bool
    schedule: Literal["gpipe", "1f1b"]
    extra_in_flight: int  # micro-batches of 1f1b with one chunk
    virtual_stages: int  # chunks of each pipeline stage
    micro_batch_groups: Literal["auto"] | int  # of a pipeline with several chunks
    gradient_reduction: Literal["auto", "per_step", "per_visit", "per_micro_batch"]

    @property
    def world_size(self) -> int:
        """Number of ranks for these degrees."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def degrees(self) -> tuple[int, int, int, int, int]:
        """The sizes of the axes."""
        return self.pp, self.dp, self.cp, self.tp, self.ep

    @property
    def keys(self) -> dict[str, Any]:
        """Dotted key of the JSON -> value."""
        keys = {key: getattr(self, field) for field, key in _KEYS.items()}
        if self.zero_stage == 0:
            keys[_KEYS["replicate"]] = 1
        if self.cp == 1:  # the configuration refuses what has no effect
            keys[_KEYS["context_method"]] = "auto"
        if self.ep == 1:
            keys[_KEYS["expert_exchange"]] = "auto"
        if self.schedule == "gpipe" or self.virtual_stages > 1:
            keys[_KEYS["extra_in_flight"]] = 0
        keys[_KEYS["extra_in_flight"]] = min(keys[_KEYS["extra_in_flight"]], self.pp - 1)
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
    "ep": "parallel.expert",
    "expert_exchange": "parallel.expert_exchange",
    "context_method": "parallel.context_method",
    "replicate": "parallel.replicate",
    "sequence_parallel": "parallel.sequence_parallel",
    "schedule": "parallel.schedule",
    "extra_in_flight": "parallel.extra_in_flight",
    "virtual_stages": "parallel.virtual_stages",
    "micro_batch_groups": "parallel.micro_batch_groups",
    "activation_checkpointing": "parallel.activation_checkpointing",
    "recomputed_blocks": "parallel.recomputed_blocks",
    "gradient_reduction": "parallel.gradient_reduction",
    "zero_stage": "zero_optimization.stage",
    "micro_batch_size": MICRO_BATCH,
}
"""Field of ``Settings`` -> key of the JSON."""

_MAY_BE_AUTO = (
    *("context_method", "expert_exchange", "sequence_parallel"),
    *("micro_batch_groups", "gradient_reduction"),
)
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

        Raises ConfigError with every rule of the configuration that the settings break.
        """
        batch = {
            "train_batch_size": self.run.batch.train_batch_size,
            "gradient_accumulation_steps": None,
        }
        return self._resolved({**settings.keys, **batch}, settings.world_size)

    def at_length(self, settings: Settings, tokens: int, micro_batches: int) -> Run:
        """Return a run with these settings, on sequences of this length.

        Raises ConfigError with every rule of the configuration that they break.
        """
        model = self.run.config.model
        keys = {
            "data.sequence_length": tokens,
            "train_batch_size": settings.dp * micro_batches,
            "train_batch_size_schedule": None,
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
        run = resolve_run(
            self.stated.changed(keys),
            World(world_size, "the plan", self.device_type),
            name=self.run.name,
        )
        return replace(run, load_factor=self.run.load_factor)


def _typed(value: Any) -> str:
    """Return the value as ``--set`` reads it."""
    return value if isinstance(value, str) else json.dumps(value)


def degrees_of(training: Training, largest_tensor: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield all (pp, dp, cp, tp) of the training's ranks."""
    ranks, blocks = training.settings.world_size, training.stated.model.num_hidden_layers
    for tp in (tp for tp in divisors(ranks) if tp <= largest_tensor):
        for pp in (pp for pp in divisors(ranks // tp) if pp <= blocks):
            for cp in divisors(ranks // (tp * pp)):
                yield pp, ranks // (pp * cp * tp), cp, tp


def verdict_of(run: Run, peak_bytes: int, cluster: Cluster) -> Verdict:
    """Return whether a run with this peak fits the cluster's devices."""
    reserved = reserved_memory(run, cluster.device, cluster.gpus_per_node, peak_bytes)
    return verdict(peak_bytes, reserved, cluster.device)

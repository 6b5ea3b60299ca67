"""Every variant of a training on the same ranks that fits, the fastest first.

Variants differ in degrees (pp, dp, tp), ZeRO stage, gradient reduction, schedule, recomputation and
micro-batch. Model, data, optimizer and ``train_batch_size`` stay the same. Variants that break a
rule of the configuration are omitted. So are tensor groups larger than ``largest_tensor``. By
default, that is the size of a node: across nodes, the collectives of every block would go over the
network.

The sizes of micro-batches are powers of two, and the configured size. A larger micro-batch needs
more memory (or, in a few cases, 0.1 % less). So if a size does not fit, larger ones are not tried.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, get_args

from megaspeed.config.errors import ConfigError
from megaspeed.config.resolve import Run
from megaspeed.config.rules import divisors
from megaspeed.config.run import Recomputation
from megaspeed.files.json_values import picked
from megaspeed.pipeline.schedules import SCHEDULES
from megaspeed.planning.costs.reserved_memory import Verdict, reserved_memory, verdict
from megaspeed.planning.costs.workload import Cluster
from megaspeed.planning.forecast import Forecast, forecast
from megaspeed.planning.prediction import predict_peak_bytes
from megaspeed.planning.variants import Settings, Training


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One variant, with its figures."""

    forecast: Forecast
    peak_bytes: int  # predicted peak of the tensors of the fullest rank
    verdict: Verdict
    set_text: tuple[str, ...]  # what to type after ``--set``; empty for the run as configured
    is_pareto: bool = False  # whether no other variant has both less time and less memory

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
            **picked(run.grid, "pp", "dp", "tp"),
            **picked(run, "zero_stage", "gradient_reduction"),
            **picked(parallel, "schedule", "activation_checkpointing", "recomputed_blocks"),
            "micro_batch_size": run.batch.micro_batch_size,
            "micro_batches": run.batch.gradient_accumulation_steps,
            "terms_seconds": self.forecast.step.terms,
            **picked(self, "seconds", "peak_bytes", "verdict"),
            "is_pareto_optimal": self.is_pareto,
            "set": list(self.set_text),
        }


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The variants of a training."""

    layouts: tuple[Layout, ...]  # those that fit, the fastest first
    too_large: int  # number of those that do not fit, including all larger micro-batches
    refused: int  # number of those that break a rule of the configuration
    # The smallest peak of all that are not refused; None if all are.
    least_peak_bytes: int | None

    @property
    def best(self) -> Layout | None:
        """The fastest with the verdict "fits"; if there is none, the fastest that is "tight"."""
        return next(
            (layout for layout in self.layouts if layout.verdict == "fits"),
            self.layouts[0] if self.layouts else None,
        )

    def fastest_of_each_grid(self) -> list[Layout]:
        """Return the fastest variant of each (pp, dp, tp), the fastest first."""
        found: dict[object, Layout] = {}
        for layout in self.layouts:
            found.setdefault(layout.run.grid, layout)
        return list(found.values())

    def as_json(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        figures = picked(self, "too_large", "refused", "least_peak_bytes")
        return {**figures, "layouts": [layout.as_json() for layout in self.layouts]}


def what_if(training: Training, cluster: Cluster, largest_tensor: int | None = None) -> WhatIf:
    """Return every variant of the training that fits the cluster's devices.

    Tensor groups have at most ``largest_tensor`` ranks; if it is None, at most a node's GPUs.
    """
    layouts: list[Layout] = []
    least_peak_bytes: int | None = None
    too_large = refused = 0
    for sizes in _variants(training, largest_tensor or cluster.gpus_per_node):
        for index, settings in enumerate(sizes):
            try:
                run = training.under(settings)
            except ConfigError:
                refused += 1
                continue
            peak = predict_peak_bytes(run, training.device_type)
            least_peak_bytes = min(peak, least_peak_bytes or peak)
            reserved = reserved_memory(run, cluster.device, cluster.gpus_per_node, peak)
            word = verdict(peak, reserved, cluster.device)
            if word == "does not fit":
                too_large += len(sizes) - index
                break
            layouts.append(
                Layout(
                    forecast=forecast(run, cluster),
                    peak_bytes=peak,
                    verdict=word,
                    set_text=training.set_text(settings),
                )
            )
    return WhatIf(
        layouts=tuple(_marked(layouts)),
        too_large=too_large,
        refused=refused,
        least_peak_bytes=least_peak_bytes,
    )


def _variants(training: Training, largest_tensor: int) -> Iterator[list[Settings]]:
    """Yield all combinations, valid or not: a list for each, by size of the micro-batch."""
    own = training.settings
    for pp, dp, tp in _degrees(training, largest_tensor):
        samples = training.run.batch.train_batch_size // dp
        sizes = [
            size
            for size in divisors(samples)
            if size.bit_count() == 1 or size == own.micro_batch_size
        ]
        schedules = tuple(SCHEDULES) if pp > 1 else (own.schedule,)
        at_degrees = replace(own, pp=pp, dp=dp, tp=tp)
        # Without a data axis, all ZeRO stages are the same.
        reductions = _reductions(own) if dp > 1 else [(own.zero_stage, own.gradient_reduction)]
        for (zero_stage, reduction), schedule, recomputation in product(
            reductions, schedules, get_args(Recomputation)
        ):
            is_own = recomputation == own.activation_checkpointing
            variant = replace(
                at_degrees,
                zero_stage=zero_stage,
                gradient_reduction=reduction,
                schedule=schedule,
                activation_checkpointing=recomputation,
                recomputed_blocks=own.recomputed_blocks if is_own else None,
            )
            yield [replace(variant, micro_batch_size=size) for size in sizes]


def _degrees(training: Training, largest_tensor: int) -> Iterator[tuple[int, int, int]]:
    """Yield all (pp, dp, tp) of the training's ranks whose data ranks share the batch equally."""
    world_size, batch = training.settings.world_size, training.run.batch.train_batch_size
    for tp in divisors(world_size):
        for pp in divisors(world_size // tp):
            dp = world_size // (pp * tp)
            blocks = training.stated.model.num_hidden_layers
            if tp <= largest_tensor and pp <= blocks and batch % dp == 0:
                yield pp, dp, tp


def _reductions(own: Settings) -> Iterator[tuple[int, Any]]:
    """Yield ZeRO stages with their gradient reductions. Stages 0 and 1 reduce once a step."""
    other = "per_micro_batch" if own.gradient_reduction == "per_step" else "per_step"
    for zero_stage in range(4):
        yield zero_stage, own.gradient_reduction
        if zero_stage >= 2:
            yield zero_stage, other


def _marked(layouts: list[Layout]) -> Iterator[Layout]:
    """Yield the layouts by time, with the Pareto-optimal ones marked."""
    least: int | None = None
    for layout in sorted(layouts, key=lambda layout: (layout.seconds, layout.peak_bytes)):
        is_pareto = least is None or layout.peak_bytes < least
        if is_pareto:
            least = layout.peak_bytes
        yield replace(layout, is_pareto=is_pareto)

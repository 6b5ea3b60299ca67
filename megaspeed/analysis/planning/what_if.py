"""The memory and the traffic of every layout of one world size.

The layouts are all (pp, dp, tp) whose product is the world size, with each ZeRO stage, with and
without recomputation. The train batch, the micro-batch and every other key stay as configured.
Layouts that break a rule of the configuration are omitted. Tensor groups larger than
``largest_tensor`` are omitted, too, because across nodes the collectives of every block would go
over the network.

A layout is Pareto-optimal (``is_best``) if no other layout has less memory without more traffic, or
less traffic without more memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megaspeed.analysis.planning.devices import Device
from megaspeed.analysis.planning.plan import map_ranks
from megaspeed.analysis.planning.prediction import (
    ideal_bubble,
    predict,
    sent_along,
)
from megaspeed.analysis.planning.variants import Settings, Training
from megaspeed.config.errors import ConfigError
from megaspeed.config.resolve import Run
from megaspeed.config.rules import divisors


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One layout of the run, with its figures."""

    run: Run  # the run in this layout
    peak_bytes: int  # the peak of the fullest rank
    sent_bytes: int  # what the busiest rank sends in one step
    sent_across_nodes_bytes: int  # the part of ``sent_bytes`` along axes that cross nodes
    bubble: float  # the ideal pipeline bubble, as a fraction of the step
    # What to type after ``--set`` to get it; empty for the layout as configured.
    set_text: tuple[str, ...]
    is_best: bool = False  # whether it is Pareto-optimal in peak and sent bytes

    def as_json(self) -> dict[str, Any]:
        """The figures as JSON values."""
        grid = self.run.grid
        return {
            "pp": grid.pp,
            "dp": grid.dp,
            "tp": grid.tp,
            "zero_stage": self.run.zero_stage,
            "activation_checkpointing": self.run.config.parallel.activation_checkpointing,
            "micro_batches": self.run.batch.gradient_accumulation_steps,
            "peak_bytes": self.peak_bytes,
            "sent_bytes": self.sent_bytes,
            "sent_across_nodes_bytes": self.sent_across_nodes_bytes,
            "bubble_fraction": self.bubble,
            "is_pareto_optimal": self.is_best,
            "set": list(self.set_text),
        }


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The layouts of a world size."""

    # The layouts that fit the device, least memory first; all if no device is named.
    layouts: tuple[Layout, ...]
    too_large: int  # number of layouts that do not fit
    refused: int  # number of layouts that break a rule of the configuration
    # The smallest peak of all layouts that are not refused; None if all are.
    least_peak_bytes: int | None

    @property
    def by_traffic(self) -> tuple[Layout, ...]:
        """The layouts, least traffic first."""
        return tuple(sorted(self.layouts, key=lambda layout: layout.sent_bytes))

    def as_json(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return {
            "layouts": [layout.as_json() for layout in self.layouts],
            "too_large": self.too_large,
            "refused": self.refused,
            "least_peak_bytes": self.least_peak_bytes,
        }


def what_if(
    training: Training, device: Device | None, gpus_per_node: int, largest_tensor: int | None = None
) -> WhatIf:
    """Every layout of the run's world size that fits the device.

    Args:
        training: what is trained, and on how many ranks.
        device: the accelerator of each rank. If None, every layout fits.
        gpus_per_node: number of GPUs of a node.
        largest_tensor: the largest tensor group; if None, the number of GPUs of a node.
    """
    layouts: list[Layout] = []
    peaks: list[int] = []
    refused = 0
    for settings in _layouts_of(training, largest_tensor or gpus_per_node):
        try:
            variant = training.under(settings)
        except ConfigError:
            refused += 1
            continue
        prediction = predict(variant)
        peak, traffic = prediction.fullest.peak_bytes, prediction.busiest.traffic
        peaks.append(peak)
        if device is not None and peak > device.usable_bytes:
            continue
        across = map_ranks(variant.grid, gpus_per_node).axes_across_nodes
        layouts.append(
            Layout(
                run=variant,
                peak_bytes=peak,
                sent_bytes=sum(traffic.values()),
                sent_across_nodes_bytes=sent_along(traffic, across),
                bubble=ideal_bubble(variant),
                set_text=training.set_text(settings),
            )
        )
    return WhatIf(
        layouts=tuple(_marked(layouts)),
        too_large=len(peaks) - len(layouts),
        refused=refused,
        least_peak_bytes=min(peaks, default=None),
    )


def _layouts_of(training: Training, largest_tensor: int) -> Iterator[Settings]:
    """Every combination of degrees, ZeRO stage and recomputation, valid or not."""
    world_size = training.settings.world_size
    for tp in divisors(world_size):
        for pp in divisors(world_size // tp):
            if tp > largest_tensor or pp > training.stated.model.num_hidden_layers:
                continue
            degrees = replace(training.settings, pp=pp, dp=world_size // (pp * tp), tp=tp)
            for zero_stage in range(4):
                plain = replace(degrees, zero_stage=zero_stage, activation_checkpointing="none")
                yield plain
                yield replace(plain, activation_checkpointing="full")


def _marked(layouts: list[Layout]) -> Iterator[Layout]:
    """The layouts by peak, then by sent bytes, with the Pareto-optimal ones marked."""
    best: tuple[int, int] | None = None
    for layout in sorted(layouts, key=lambda layout: (layout.peak_bytes, layout.sent_bytes)):
        point = layout.peak_bytes, layout.sent_bytes
        is_best = best is None or point == best or point[1] < best[1]
        if is_best:
            best = point
        yield replace(layout, is_best=is_best)

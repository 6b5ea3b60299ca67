"""Every layout of one world size, what it holds and what it sends.

All (pp, dp, tp) whose product is the world size, with each ZeRO stage, with and without
recomputation; the train batch, the micro-batch and every other key stay as the configuration has
them. Left out is what the configuration's own laws refuse, and tensor groups that are wider than
``largest_tensor``: beyond a node, the collectives of every block go over the network.

A layout is Pareto-optimal (``is_best``) if no other holds less without sending more, or sends less
without holding more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megaspeed.analysis.planning.devices import Device
from megaspeed.analysis.planning.plan import map_ranks
from megaspeed.analysis.planning.prediction import (
    ideal_bubble,
    predict_busiest,
    predict_peak_bytes,
    sent_along,
)
from megaspeed.analysis.planning.variants import Settings, Training
from megaspeed.config.errors import ConfigError
from megaspeed.config.resolve import Run
from megaspeed.config.rules import divisors
from megaspeed.topology.grid import Grid


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to lay the run out.

    Attributes:
        run: the run in this layout.
        peak_bytes: of the rank that holds most.
        sent_bytes: of the rank that sends most, in one step.
        sent_across_nodes_bytes: the part of it along axes that cross nodes.
        bubble: the ideal pipeline bubble, a share of the step.
        set_text: what to type after ``--set`` to get it.
        is_best: Pareto-optimal in peak and sent bytes among the layouts beside it.
    """

    run: Run
    peak_bytes: int
    sent_bytes: int
    sent_across_nodes_bytes: int
    bubble: float
    set_text: tuple[str, ...]
    is_best: bool = False

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
    """The layouts of a world size.

    Attributes:
        layouts: those that fit, by memory (least first); all where no device is named.
        too_large: how many do not fit.
        refused: how many the configuration's laws refuse.
        least_peak_bytes: of all that are not refused; None where there are none.
    """

    layouts: tuple[Layout, ...]
    too_large: int
    refused: int
    least_peak_bytes: int | None

    @property
    def by_traffic(self) -> tuple[Layout, ...]:
        """The same layouts, those that send least first."""
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
        device: what a rank has; None: nothing is left out for its size.
        gpus_per_node: where nodes begin and end.
        largest_tensor: the widest tensor groups; None: as wide as a node.
    """
    layouts: list[Layout] = []
    peaks: list[int] = []
    refused = 0
    for settings in layouts_of(training, largest_tensor or gpus_per_node):
        try:
            variant = training.under(settings)
        except ConfigError:
            refused += 1
            continue
        peaks.append(predict_peak_bytes(variant))
        if device is None or peaks[-1] <= device.usable_bytes:
            layouts.append(_laid_out(training, settings, peaks[-1], gpus_per_node))
    ordered = sorted(layouts, key=lambda layout: (layout.peak_bytes, layout.sent_bytes))
    return WhatIf(
        layouts=tuple(_marked(ordered)),
        too_large=len(peaks) - len(layouts),
        refused=refused,
        least_peak_bytes=min(peaks, default=None),
    )


def layouts_of(training: Training, largest_tensor: int) -> Iterator[Settings]:
    """Every combination of degrees, ZeRO stage and recomputation, whether it can run or not."""
    base = training.settings
    world_size = base.world_size
    for tp in divisors(world_size):
        if tp > largest_tensor:
            continue
        for pp in divisors(world_size // tp):
            if pp > training.stated.model.num_hidden_layers:
                continue
            for zero_stage in range(4):
                for activation_checkpointing in ("none", "full"):
                    yield replace(
                        base,
                        pp=pp,
                        dp=world_size // (pp * tp),
                        tp=tp,
                        zero_stage=zero_stage,
                        activation_checkpointing=activation_checkpointing,
                    )


def _laid_out(
    training: Training, settings: Settings, peak_bytes: int, gpus_per_node: int
) -> Layout:
    variant = training.under(settings)
    traffic = predict_busiest(variant)
    ranks = map_ranks(Grid(settings.pp, settings.dp, settings.tp), gpus_per_node)
    return Layout(
        run=variant,
        peak_bytes=peak_bytes,
        sent_bytes=sum(traffic.values()),
        sent_across_nodes_bytes=sent_along(traffic, ranks.axes_across_nodes),
        bubble=ideal_bubble(variant),
        set_text=training.set_text(settings),
    )


def _marked(layouts: Sequence[Layout]) -> Iterator[Layout]:
    """Marks the Pareto-optimal ones of layouts that are ordered by peak, then by sent bytes."""
    best: tuple[int, int] | None = None
    for layout in layouts:
        point = layout.peak_bytes, layout.sent_bytes
        is_best = best is None or point == best or point[1] < best[1]
        if is_best:
            best = point
        yield replace(layout, is_best=is_best)

"""The plan of one run: its ranks, its pipeline stages, memory and traffic at each ZeRO stage.

Run --> rank map            which axes cross nodes
    --> pipeline stages     layers, parameters
    --> ZeRO 0, 1, 2, 3     memory, traffic   (costs.stage_memory, costs.traffic)
    --> bubble
    --> fits the device?    if not: the cheapest change

The what-if is every layout of the run's world size: all (pp, dp, tp) whose product is the world
size, with each ZeRO stage and each kind of recomputation. The train batch, the micro-batch and
every other key stay as configured. Layouts that break a rule of the configuration are omitted.
Tensor groups larger than ``largest_tensor`` are omitted, too, because across nodes the collectives
of every block would go over the network.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from megaspeed.analysis.costs.memory import elements_of, local_parameters
from megaspeed.analysis.costs.traffic import by_axis
from megaspeed.analysis.planning.machines import RankMap, map_ranks
from megaspeed.analysis.planning.prediction import (
    Prediction,
    StagePrediction,
    alike_stages,
    ideal_bubble,
    predict,
    sent_along,
)
from megaspeed.analysis.planning.variants import CheapestChange, Settings, Training, cheapest_change
from megaspeed.config.errors import ConfigError
from megaspeed.config.resolve import Run
from megaspeed.config.rules import divisors
from megaspeed.pipeline.partition import layers_of_stages, parameters_of_stages
from megaspeed.topology.devices import USABLE_FRACTION, Device


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """One pipeline stage."""

    pipeline_stage: int  # its number, from 0
    layers: range  # 0 is the embedding, then come the blocks, then the head
    parameters: int  # logical; a tied embedding counts on the first pipeline stage only
    # Elements of one rank's tensors before ZeRO, with tensor-parallel padding and the second copy
    # of a tied embedding.
    parameters_per_rank: int


@dataclass(frozen=True, kw_only=True)
class PlannedZero:
    """The layout at one ZeRO stage: a prediction, or the reasons why it is refused."""

    zero_stage: int
    prediction: Prediction | None
    refusals: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is known about a run before it starts."""

    run: Run
    device: Device | None  # the accelerator of each rank; None if no device was named
    ranks: RankMap  # the placement of ranks on nodes
    stages: tuple[PlannedStage, ...]  # all pipeline stages
    zero_stages: tuple[PlannedZero, ...]  # ZeRO 0 to 3 at this layout
    bubble: float  # the ideal pipeline bubble, as a fraction of the step
    change: CheapestChange | None  # the cheapest change after which the run fits; None if it fits

    @property
    def prediction(self) -> Prediction:
        """The prediction for the run as it is configured."""
        own = self.zero_stages[self.run.zero_stage].prediction
        assert own is not None, "the run itself was accepted"
        return own

    @property
    def parameters(self) -> int:
        """Logical parameters of the model."""
        return sum(stage.parameters for stage in self.stages)

    @property
    def fits(self) -> bool | None:
        """Whether the run as configured fits the device; None if no device was named."""
        return self.fits_at(self.run.zero_stage)

    def fits_at(self, zero_stage: int) -> bool | None:
        """Whether the layout fits at this ZeRO stage; None without a device or a prediction."""
        prediction = self.zero_stages[zero_stage].prediction
        if self.device is None or prediction is None:
            return None
        return prediction.fullest.peak_bytes <= self.device.usable_bytes

    def as_json(self) -> dict[str, Any]:
        """Every figure as JSON values; sizes in bytes, traffic in bytes a step."""
        grid, device = self.run.grid, self.device
        return {
            "name": self.run.name,
            "world_size": grid.world_size,
            "degrees": {"pp": grid.pp, "dp": grid.dp, "tp": grid.tp},
            "zero_stage": self.run.zero_stage,
            "precision": self.run.precision,
            "batch": asdict(self.run.batch),
            "parameters": self.parameters,
            "device": None
            if device is None
            else {
                "name": device.name,
                "memory_bytes": device.memory_bytes,
                "usable_bytes": device.usable_bytes,
                "usable_fraction": USABLE_FRACTION,
            },
            "rank_map": self.ranks.as_json(),
            "pipeline_stages": [
                {**asdict(stage), "layers": [stage.layers.start, stage.layers.stop]}
                for stage in self.stages
            ],
            "bubble_fraction": self.bubble,
            "zero_stages": [
                {**_zero_as_json(planned), "fits": self.fits_at(planned.zero_stage)}
                for planned in self.zero_stages
            ],
            "fits": self.fits,
            "cheapest_change": None if self.change is None else self.change.as_json(),
        }


def plan(training: Training, device: Device | None, gpus_per_node: int) -> Plan:
    """Plans a training on nodes of ``gpus_per_node`` GPUs.

    If a device is named and the run does not fit it, the plan has the cheapest change.
    """
    run = training.run
    planned = Plan(
        run=run,
        device=device,
        ranks=map_ranks(run.grid, gpus_per_node),
        stages=_stages(run),
        zero_stages=tuple(_at_zero_stage(training, zero_stage) for zero_stage in range(4)),
        bubble=ideal_bubble(run),
        change=None,
    )
    if device is None or planned.fits:
        return planned
    return replace(planned, change=cheapest_change(training, device.usable_bytes, gpus_per_node))


def _stages(run: Run) -> tuple[PlannedStage, ...]:
    layers, parameters = layers_of_stages(run), parameters_of_stages(run)
    stages = []
    for alike in alike_stages(run):
        # Alike pipeline stages hold tensors of the same shapes.
        per_rank = elements_of(local_parameters(run, alike.pipeline_stages.start))
        stages += [
            PlannedStage(
                pipeline_stage=stage,
                layers=layers[stage],
                parameters=parameters[stage],
                parameters_per_rank=per_rank,
            )
            for stage in alike.pipeline_stages
        ]
    return tuple(stages)


def _at_zero_stage(training: Training, zero_stage: int) -> PlannedZero:
    try:
        variant = training.under(replace(training.settings, zero_stage=zero_stage))
    except ConfigError as error:
        return PlannedZero(zero_stage=zero_stage, prediction=None, refusals=error.problems)
    return PlannedZero(zero_stage=zero_stage, prediction=predict(variant))


def _zero_as_json(planned: PlannedZero) -> dict[str, Any]:
    prediction = planned.prediction
    if prediction is None:
        return {"zero_stage": planned.zero_stage, "refused": list(planned.refusals)}

    def stage_as_json(stage: StagePrediction) -> dict[str, Any]:
        return {
            "pipeline_stage": stage.pipeline_stage,
            "states": asdict(stage.memory.states),
            "peak": asdict(stage.memory.peak),
            "traffic": by_axis(stage.traffic),
        }

    return {
        "zero_stage": planned.zero_stage,
        "gradient_reduction": prediction.run.gradient_reduction,
        "model_state_bytes": prediction.heaviest.state_bytes,
        "peak_bytes": prediction.fullest.peak_bytes,
        "sent_bytes": prediction.busiest.sent_bytes,
        "pipeline_stages": [stage_as_json(stage) for stage in prediction.stages],
    }


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
            "recomputed_blocks": self.run.config.parallel.recomputed_blocks,
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
    """Every layout of the run's world size that fits the device; if none is named, every layout.

    Tensor groups have at most ``largest_tensor`` ranks; if it is None, at most a node's GPUs.
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
                at_stage = replace(degrees, zero_stage=zero_stage)
                yield replace(at_stage, activation_checkpointing="none", recomputed_blocks=None)
                yield replace(at_stage, activation_checkpointing="selective")
                yield replace(at_stage, activation_checkpointing="full")


def _marked(layouts: list[Layout]) -> Iterator[Layout]:
    """The layouts by peak, then by sent bytes, with the Pareto-optimal ones marked."""
    best: tuple[int, int] | None = None
    for layout in sorted(layouts, key=lambda layout: (layout.peak_bytes, layout.sent_bytes)):
        point = layout.peak_bytes, layout.sent_bytes
        is_best = best is None or point == best or point[1] < best[1]
        if is_best:
            best = point
        yield replace(layout, is_best=is_best)

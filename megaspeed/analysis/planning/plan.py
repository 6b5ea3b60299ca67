"""The plan of one run: its ranks, its pipeline stages, memory and traffic at each ZeRO stage.

Run --> rank map            which axes cross nodes
    --> pipeline stages     layers, parameters
    --> ZeRO 0, 1, 2, 3     memory, traffic   (costs.stage_memory, costs.traffic)
    --> bubble
    --> fits the device?    if not: the cheapest change

The rank map: launchers count ranks node by node, so with k GPUs a node, rank r is on node r // k.
tp is innermost and pp outermost (``topology.grid``). pp 2 x dp 4 x tp 4 on nodes of 8 GPUs is

    node 0   ranks  0..7     tp [0 1 2 3]       within a node
    node 1   ranks  8..15    dp [0 4 8 12]      2 nodes
    node 2   ranks 16..23    pp [0 16]          2 nodes
    node 3   ranks 24..31

GPUs of one node exchange data several times as fast as GPUs of different nodes, so the axis that
sends most should stay within a node.
"""

import math
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from megaspeed.analysis.costs.memory import elements_of, local_parameters
from megaspeed.analysis.costs.traffic import by_axis
from megaspeed.analysis.planning.devices import USABLE_FRACTION, Device
from megaspeed.analysis.planning.prediction import (
    Prediction,
    StagePrediction,
    alike_stages,
    ideal_bubble,
    predict,
)
from megaspeed.analysis.planning.variants import CheapestChange, Training, cheapest_change
from megaspeed.config.errors import ConfigError
from megaspeed.config.resolve import Run
from megaspeed.pipeline.partition import layers_of_stages, parameters_of_stages
from megaspeed.topology.grid import AXES, Axis, Grid


@dataclass(frozen=True, kw_only=True)
class AxisMap:
    """How the groups of one axis are placed on the nodes."""

    axis: Axis  # pp, dp or tp
    size: int  # ranks of each group
    stride: int  # distance in ranks between two neighbours of a group
    first_group: tuple[int, ...]  # the ranks of the group that rank 0 is in
    groups: int  # number of groups
    groups_across_nodes: int  # number of groups with ranks on more than one node
    most_nodes: int  # the largest number of nodes on which one group has ranks

    @property
    def crosses_nodes(self) -> bool:
        """Whether any group of the axis sends from one node to another."""
        return self.groups_across_nodes > 0


@dataclass(frozen=True, kw_only=True)
class RankMap:
    """All ranks of a grid on nodes of equal size. The last node may have unused GPUs."""

    grid: Grid
    gpus_per_node: int
    axes: tuple[AxisMap, ...]

    @property
    def nodes(self) -> int:
        """Nodes that have at least one rank."""
        return math.ceil(self.grid.world_size / self.gpus_per_node)

    @property
    def axes_across_nodes(self) -> frozenset[str]:
        """The axes whose traffic goes over the network, and "world" if there are several nodes."""
        crossing = {axis.axis for axis in self.axes if axis.crosses_nodes}
        return frozenset({*crossing, "world"} if self.nodes > 1 else ())

    def as_json(self) -> dict[str, Any]:
        """The numbers of the map as JSON values, without a list of all ranks."""
        axes = {}
        for each in self.axes:
            figures = {**asdict(each), "first_group": list(each.first_group)}
            axes[figures.pop("axis")] = figures
        return {"nodes": self.nodes, "gpus_per_node": self.gpus_per_node, "axes": axes}


@cache
def map_ranks(grid: Grid, gpus_per_node: int) -> RankMap:
    """Places the ranks of a grid on nodes of ``gpus_per_node`` GPUs."""
    assert gpus_per_node >= 1
    axes = tuple(_map_axis(grid, axis, gpus_per_node) for axis in AXES)
    return RankMap(grid=grid, gpus_per_node=gpus_per_node, axes=axes)


def _map_axis(grid: Grid, axis: Axis, gpus_per_node: int) -> AxisMap:
    groups = grid.groups_along(axis)
    nodes = [len({rank // gpus_per_node for rank in group}) for group in groups]
    first = groups[0]
    return AxisMap(
        axis=axis,
        size=len(first),
        stride=first[1] - first[0] if len(first) > 1 else 1,
        first_group=tuple(first),
        groups=len(groups),
        groups_across_nodes=sum(count > 1 for count in nodes),
        most_nodes=max(nodes),
    )


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """One pipeline stage."""

    pipeline_stage: int  # its number, from 0
    layers: range  # 0 is the embedding, then come the blocks, then the head
    parameters: int  # logical parameters. A tied embedding counts on the first pipeline stage only.
    # Elements of one rank's tensors before ZeRO. They include tensor-parallel padding and the
    # second copy of a tied embedding.
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

    run: Run  # the run
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

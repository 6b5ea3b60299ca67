"""The plan of one run: its ranks, its pipeline stages; memory, traffic and time at each ZeRO stage.

Run --> rank map            which axes cross nodes
    --> pipeline stages     layers, parameters
    --> ZeRO 0, 1, 2, 3     memory, traffic, step time   (costs.stage_memory, .traffic, .step_time)
    --> fits the device?    if not: the cheapest change
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megaspeed.config.errors import ConfigError
from megaspeed.config.resolve import Run
from megaspeed.data_axis.parameters import elements_of, local_parameters
from megaspeed.files.json_values import json_value, picked
from megaspeed.model.parameters import active_parameters
from megaspeed.pipeline.partition import layers_of_stages, parameters_of_stages
from megaspeed.pipeline.schedules import peak_in_flight, pipeline_of
from megaspeed.pipeline.visits import holds_of
from megaspeed.planning.changes import Change, cheapest_change
from megaspeed.planning.costs.activations import activations_of
from megaspeed.planning.costs.placement import GPUS_PER_NODE, Placement
from megaspeed.planning.costs.reserved_memory import (
    ReservedMemory,
    Verdict,
    reserved_memory,
    verdict,
)
from megaspeed.planning.costs.traffic import by_axis
from megaspeed.planning.costs.workload import Cluster
from megaspeed.planning.forecast import Forecast, forecast
from megaspeed.planning.micro_batch import choose_micro_batch
from megaspeed.planning.prediction import Prediction, StagePrediction, predict
from megaspeed.planning.variants import Training


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """One pipeline stage."""

    pipeline_stage: int  # its number, from 0
    layers: tuple[int, ...]  # 0 is the embedding, then come the blocks, then the head
    parameters: int  # logical; a tied embedding counts on the first pipeline stage only
    # Elements of one rank's tensors before ZeRO, with tensor-parallel padding and the second copy
    # of a tied embedding.
    parameters_per_rank: int
    messages: int  # that a rank sends to other stages in a step
    in_flight: int  # most forwards of its chunks whose activations are kept at the same time


@dataclass(frozen=True, kw_only=True)
class PlannedZero:
    """The layout at one ZeRO stage: a prediction, or the reasons why it is refused."""

    zero_stage: int
    prediction: Prediction | None
    refusals: tuple[str, ...] = ()
    # The following are None if no cluster is known or the layout is refused.
    forecast: Forecast | None = None
    reserved: ReservedMemory | None = None  # memory of the fullest rank besides tensors
    verdict: Verdict | None = None

    @property
    def chunk_gathers(self) -> int:
        """Gathers of chunks in a step, on the stage with the most; 0 if layers are gathered."""
        assert self.prediction is not None, "only for stages that are not refused"
        shape = pipeline_of(self.prediction.run)
        return max(len(holds_of(shape, stage)) for stage in range(shape.stages))

    @property
    def interval_bytes(self) -> tuple[int, int] | None:
        """What the fullest rank needs at least, and what nine of ten published runs needed."""
        if self.prediction is None or self.reserved is None:
            return None
        tensors = self.prediction.fullest.peak_bytes
        return tensors + self.reserved.certain, tensors + self.reserved.most

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        prediction = self.prediction
        if prediction is None:
            return {**picked(self, "zero_stage", "verdict"), "refused": list(self.refusals)}
        return {
            **picked(self, "zero_stage", "verdict", "interval_bytes"),
            "time": None if self.forecast is None else self.forecast.as_json(),
            "reserved_bytes": json_value(self.reserved),
            "gradient_reduction": prediction.run.gradient_reduction,
            "reductions": prediction.reductions,
            "gathers_of_chunks": self.chunk_gathers,
            "model_state_bytes": prediction.heaviest.state_bytes,
            "peak_bytes": prediction.fullest.peak_bytes,
            "sent_bytes": prediction.busiest.sent_bytes,
            "pipeline_stages": [_stage_as_json(stage) for stage in prediction.stages],
        }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is known about a run before it starts."""

    run: Run
    cluster: Cluster | None  # the machines; None if no device was named
    ranks: Placement  # of ranks on nodes
    stages: tuple[PlannedStage, ...]  # all pipeline stages
    zero_stages: tuple[PlannedZero, ...]  # ZeRO 0 to 3 at this layout
    bubble: float  # the ideal pipeline bubble, as a fraction of the step
    change: Change | None  # the cheapest, if the run does not fit; None if no single one is enough

    @property
    def prediction(self) -> Prediction:
        """The prediction for the run as it is configured."""
        own = self.zero_stages[self.run.zero_stage].prediction
        assert own is not None, "the run itself was accepted"
        return own

    @property
    def forecast(self) -> Forecast | None:
        """The step time of the run as configured; None if no device was named."""
        return self.zero_stages[self.run.zero_stage].forecast

    @property
    def parameters(self) -> int:
        """Logical parameters of the model."""
        return sum(stage.parameters for stage in self.stages)

    @property
    def active_parameters(self) -> int:
        """Logical parameters that a token uses: all except those of its unused experts."""
        return active_parameters(self.run.config.model)

    @property
    def mask_bytes(self) -> int:
        """Bytes of a rank's attention mask, a part of the activations; 0 if there is none."""
        return activations_of(self.run, self.prediction.fullest.device_type).mask

    @property
    def verdict(self) -> Verdict | None:
        """Whether the run as configured fits the device; None if no device was named."""
        return self.zero_stages[self.run.zero_stage].verdict

    def as_json(self) -> dict[str, Any]:
        """Return every figure as JSON values; sizes in bytes, traffic in bytes a step."""
        run, cluster = self.run, self.cluster
        speed = None if cluster is None else 1e9 * cluster.network_bandwidth
        change: dict[str, Any] | None = None
        if self.change is not None:
            change = {"set": list(self.change.set_text), "peak_bytes": self.change.peak_bytes}
        return {
            **picked(run, "name", "zero_stage", "precision", "batch"),
            "world_size": run.grid.world_size,
            "degrees": picked(run.grid, "pp", "dp", "cp", "tp", "ep", "replicate"),
            **picked(self, "parameters", "active_parameters", "mask_bytes", "verdict"),
            "device": None if cluster is None else json_value(cluster.device),
            "network_bytes_per_second": speed,
            "rank_map": self.ranks.as_json(),
            **picked(run.config.parallel, "schedule", "extra_in_flight"),
            **picked(run.config.parallel, "virtual_stages", "micro_batch_groups"),
            "pipeline_stages": json_value(self.stages),
            "bubble_fraction": self.bubble,
            "zero_stages": [planned.as_json() for planned in self.zero_stages],
            "cheapest_change": change,
        }


def plan(training: Training, cluster: Cluster | None, gpus_per_node: int = GPUS_PER_NODE) -> Plan:
    """Plan a training. Without a cluster, the plan has neither times nor a verdict.

    If the micro-batch is "auto" and there is a cluster, the plan's run has the chosen size.

    Args:
        training: the run, and the configuration that its variants are resolved from.
        cluster: the machines, if they are known. If the run does not fit them, the plan has the
            cheapest change.
        gpus_per_node: for the placement of ranks, if there is no cluster.
    """
    per_node = gpus_per_node if cluster is None else cluster.gpus_per_node
    if cluster is not None and training.run.stated is not None:
        choice = choose_micro_batch(training.run, training.device_type, cluster.device, per_node)
        training = replace(training, run=choice.run)
    run = training.run
    planned = Plan(
        run=run,
        cluster=cluster,
        ranks=Placement(run.grid, per_node),
        stages=tuple(_stages(run)),
        zero_stages=tuple(_at_zero_stage(training, stage, cluster) for stage in range(4)),
        bubble=pipeline_of(run).ideal_bubble,
        change=None,
    )
    if cluster is None or planned.verdict == "fits":
        return planned
    return replace(planned, change=cheapest_change(training, cluster))


def _stages(run: Run) -> Iterator[PlannedStage]:
    layers, parameters, shape = layers_of_stages(run), parameters_of_stages(run), pipeline_of(run)
    for stage in range(run.grid.pp):
        yield PlannedStage(
            pipeline_stage=stage,
            layers=layers[stage],
            parameters=parameters[stage],
            parameters_per_rank=elements_of(local_parameters(run, stage)),
            messages=shape.sends_of(stage),
            in_flight=peak_in_flight(shape, stage),
        )


def _at_zero_stage(training: Training, zero_stage: int, cluster: Cluster | None) -> PlannedZero:
    try:
        run = training.under(replace(training.settings, zero_stage=zero_stage))
    except ConfigError as error:
        return PlannedZero(zero_stage=zero_stage, prediction=None, refusals=error.problems)
    prediction = predict(run, training.device_type)
    planned = PlannedZero(zero_stage=zero_stage, prediction=prediction)
    if cluster is None:
        return planned
    peak = prediction.fullest.peak_bytes
    reserved = reserved_memory(run, cluster.device, cluster.gpus_per_node, peak)
    return replace(
        planned,
        forecast=forecast(run, cluster, simulates=True),
        reserved=reserved,
        verdict=verdict(peak, reserved, cluster.device),
    )


def _stage_as_json(stage: StagePrediction) -> dict[str, Any]:
    return {
        "pipeline_stage": stage.pipeline_stage,
        "states": json_value(stage.memory.states),
        "peak": json_value(stage.memory.peak),
        "traffic": by_axis(stage.traffic),
    }

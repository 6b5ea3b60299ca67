"""Memory and traffic of every kind of pipeline stage of a run.

Two pipeline stages are of the same kind if they have the same number of blocks, both or neither
have the embedding, both or neither have the head, and they have neighbours on the same sides.
Stages of one kind send the same number of bytes. The first of them holds the most memory: with
1f1b, a pipeline stage keeps at most ``pp - pipeline_stage`` micro-batches (Narayanan et al. 2021,
section 2.2.1); with gpipe, every stage keeps all of them. So it is enough to predict the first
stage of each kind:

    pp 35 over 105 blocks    0: embedding + 3 blocks    1..33: 3 blocks    34: 3 blocks + head
"""

from dataclasses import dataclass
from itertools import groupby

from megaspeed.config.resolve import Run
from megaspeed.model.parameters import layer_count
from megaspeed.pipeline.partition import layers_of_stages
from megaspeed.pipeline.schedules import SCHEDULES
from megaspeed.pipeline.simulation import bubble_fraction
from megaspeed.planning.costs.stage_memory import StageMemory, predict_memory
from megaspeed.planning.costs.traffic import Traffic, predict_traffic


@dataclass(frozen=True, kw_only=True)
class AlikeStages:
    """Neighbouring pipeline stages that hold layers of the same kinds."""

    pipeline_stages: range  # their numbers. The first stage holds the most memory.
    blocks: int  # number of transformer blocks of each
    has_embedding: bool  # whether they hold the first layer
    has_head: bool  # whether they hold the last layer


@dataclass(frozen=True, kw_only=True)
class StagePrediction:
    """What the fullest rank of one pipeline stage holds, and what it sends in one step."""

    pipeline_stage: int
    memory: StageMemory
    traffic: Traffic

    @property
    def peak_bytes(self) -> int:
        """Memory at the peak of the step."""
        return self.memory.peak.total

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer states: the model states of the ZeRO paper."""
        states = self.memory.states
        return states.parameters + states.gradients + states.optimizer_states

    @property
    def sent_bytes(self) -> int:
        """Bytes sent over all axes."""
        return sum(self.traffic.values())


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The first pipeline stage of each kind, in the order of the pipeline."""

    run: Run
    stages: tuple[StagePrediction, ...]

    @property
    def fullest(self) -> StagePrediction:
        """The pipeline stage with the highest peak, the earliest if several are equal."""
        return max(self.stages, key=lambda stage: stage.peak_bytes)

    @property
    def heaviest(self) -> StagePrediction:
        """The pipeline stage with the most model states, the earliest if several are equal."""
        return max(self.stages, key=lambda stage: stage.state_bytes)

    @property
    def busiest(self) -> StagePrediction:
        """The pipeline stage that sends the most bytes, the earliest if several are equal."""
        return max(self.stages, key=lambda stage: stage.sent_bytes)


def predict(run: Run, device_type: str = "cuda") -> Prediction:
    """Memory and traffic of the first pipeline stage of each kind, on "cuda" or "cpu"."""
    stages = tuple(
        StagePrediction(
            pipeline_stage=stage,
            memory=predict_memory(run, stage, device_type=device_type),
            traffic=predict_traffic(run, stage, device_type),
        )
        for stage in _first_of_each_kind(run)
    )
    return Prediction(run=run, stages=stages)


def predict_peak_bytes(run: Run, device_type: str = "cuda") -> int:
    """The peak of the rank with the highest peak, on "cuda" or "cpu"."""
    stages = _first_of_each_kind(run)
    return max(predict_memory(run, stage, device_type=device_type).peak.total for stage in stages)


def predict_peaks(run: Run) -> list[int]:
    """The peak of a rank of each pipeline stage, in the order of the pipeline."""
    peaks: list[int] = []
    for alike in alike_stages(run):
        peak = predict_memory(run, alike.pipeline_stages.start).peak.total
        peaks += [peak] * len(alike.pipeline_stages)
    return peaks


def alike_stages(run: Run) -> tuple[AlikeStages, ...]:
    """The pipeline stages of a run, grouped by kind."""
    layers = layers_of_stages(run)
    head, last = layer_count(run.config.model) - 1, len(layers) - 1

    def kind(stage: int) -> tuple[int, bool, bool, bool, bool]:
        has_embedding, has_head = 0 in layers[stage], head in layers[stage]
        blocks = len(layers[stage]) - has_embedding - has_head
        return blocks, has_embedding, has_head, stage == 0, stage == last

    found = []
    for (blocks, has_embedding, has_head, _, _), members in groupby(range(len(layers)), key=kind):
        first, *others = members
        stages = range(first, first + len(others) + 1)
        found.append(
            AlikeStages(
                pipeline_stages=stages,
                blocks=blocks,
                has_embedding=has_embedding,
                has_head=has_head,
            )
        )
    return tuple(found)


def _first_of_each_kind(run: Run) -> list[int]:
    return [alike.pipeline_stages.start for alike in alike_stages(run)]


def ideal_bubble(run: Run) -> float:
    """The fraction of a step in which pipeline stages of equal cost wait for each other.

    With P pipeline stages and M micro-batches, it is (P - 1) / (M + P - 1) for gpipe and 1f1b
    (Huang et al. 2019, section 2.3; Narayanan et al. 2021, section 2.2.1). A simulation of these
    schedules has the same result, but takes seconds if there are thousands of micro-batches.
    """
    pp, micro_batches = run.grid.pp, run.batch.gradient_accumulation_steps
    name = run.config.parallel.schedule
    if name in ("gpipe", "1f1b"):
        return (pp - 1) / (micro_batches + pp - 1)
    return bubble_fraction(SCHEDULES[name], pp, micro_batches)

"""Memory and traffic of every kind of pipeline stage of a run.

Many pipeline stages are alike: as many blocks, embedding or not, head or not, a neighbour on the
same sides. Alike stages send the same, and of them the earliest holds most, because under 1f1b a
pipeline stage keeps ``pp - pipeline_stage`` micro-batches (Narayanan et al. 2021, section 2.2.1)
and under gpipe all of them. So one prediction for each kind tells the largest of the run:

    pp 35 over 105 blocks    0: embedding + 3 blocks    1..33: 3 blocks    34: 3 blocks + head
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, repeat

from megaspeed.analysis.costs.stage_memory import StageMemory, predict_memory
from megaspeed.analysis.costs.traffic import Traffic, predict_traffic
from megaspeed.config.resolve import Run
from megaspeed.model.parameters import layer_count
from megaspeed.pipeline.partition import layers_of_stages
from megaspeed.pipeline.schedules import SCHEDULES
from megaspeed.pipeline.simulation import bubble_fraction

CLOSED_FORM_SCHEDULES = ("gpipe", "1f1b")


@dataclass(frozen=True, kw_only=True)
class AlikeStages:
    """Neighbouring pipeline stages that hold layers of the same kinds.

    Attributes:
        pipeline_stages: which they are; the first holds most.
        blocks: transformer blocks of each.
        has_embedding, has_head: whether the first or the last layer is here too.
    """

    pipeline_stages: range
    blocks: int
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True, kw_only=True)
class StagePrediction:
    """What the rank that holds most of one pipeline stage holds, and what it sends in one step."""

    pipeline_stage: int
    memory: StageMemory
    traffic: Traffic

    @property
    def peak_bytes(self) -> int:
        """At the step's highest moment."""
        return self.memory.peak.total

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer states: the model states of the ZeRO paper."""
        states = self.memory.states
        return states.parameters + states.gradients + states.optimizer_states

    @property
    def sent_bytes(self) -> int:
        """Over all axes."""
        return sum(self.traffic.values())


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One run, each kind of pipeline stage once, in the order of the pipeline."""

    run: Run
    stages: tuple[StagePrediction, ...]

    @property
    def fullest(self) -> StagePrediction:
        """The pipeline stage with the highest peak; the earliest of equals."""
        return max(self.stages, key=lambda stage: stage.peak_bytes)

    @property
    def heaviest(self) -> StagePrediction:
        """The pipeline stage with the most model states; the earliest of equals."""
        return max(self.stages, key=lambda stage: stage.state_bytes)

    @property
    def busiest(self) -> StagePrediction:
        """The pipeline stage that sends most; the earliest of equals."""
        return max(self.stages, key=lambda stage: stage.sent_bytes)


def predict(run: Run) -> Prediction:
    """Memory and traffic of the first pipeline stage of each kind."""
    return Prediction(
        run=run,
        stages=tuple(
            StagePrediction(
                pipeline_stage=stage,
                memory=predict_memory(run, stage),
                traffic=predict_traffic(run, stage),
            )
            for stage in _first_of_each_kind(run)
        ),
    )


def predict_peak_bytes(run: Run) -> int:
    """The peak of the rank that holds most, alone."""
    return max(predict_memory(run, stage).peak.total for stage in _first_of_each_kind(run))


def predict_peaks(run: Run) -> list[int]:
    """The peak of a rank of each pipeline stage, in the order of the pipeline."""
    return [
        peak
        for alike in alike_stages(run)
        for peak in repeat(
            predict_memory(run, alike.pipeline_stages.start).peak.total,
            len(alike.pipeline_stages),
        )
    ]


def predict_busiest(run: Run) -> Traffic:
    """The traffic of the rank that sends most, alone."""
    sent = (predict_traffic(run, stage) for stage in _first_of_each_kind(run))
    return max(sent, key=lambda traffic: sum(traffic.values()))


def sent_along(traffic: Traffic, axes: Iterable[str]) -> int:
    """Bytes sent along these axes ("world" is one) together."""
    wanted = frozenset(axes)
    return sum(sent for (axis, _), sent in traffic.items() if axis in wanted)


def alike_stages(run: Run) -> tuple[AlikeStages, ...]:
    """The pipeline stages of a run, neighbours of one kind together."""
    return tuple(_group(run))


def _first_of_each_kind(run: Run) -> list[int]:
    return [alike.pipeline_stages.start for alike in alike_stages(run)]


def _group(run: Run) -> Iterator[AlikeStages]:
    layers = layers_of_stages(run)
    head = layer_count(run.config.model) - 1

    def kind(stage: int) -> tuple[int, bool, bool, bool, bool]:
        held = layers[stage]
        has_embedding, has_head = 0 in held, head in held
        blocks = len(held) - has_embedding - has_head
        return blocks, has_embedding, has_head, stage == 0, stage == len(layers) - 1

    for (blocks, has_embedding, has_head, _, _), members in groupby(range(len(layers)), key=kind):
        stages = list(members)
        yield AlikeStages(
            pipeline_stages=range(stages[0], stages[-1] + 1),
            blocks=blocks,
            has_embedding=has_embedding,
            has_head=has_head,
        )


def ideal_bubble(run: Run) -> float:
    """The share of a step in which pipeline stages of equal cost wait for each other.

    (P - 1) / (M + P - 1) with P pipeline stages and M micro-batches, for gpipe and 1f1b (Huang et
    al. 2019, section 2.3; Narayanan et al. 2021, section 2.2.1): what ``bubble_fraction`` finds by
    running the schedule, which takes seconds where there are thousands of micro-batches.
    """
    pp, micro_batches = run.grid.pp, run.batch.gradient_accumulation_steps
    name = run.config.parallel.schedule
    if name in CLOSED_FORM_SCHEDULES:
        return (pp - 1) / (micro_batches + pp - 1)
    return bubble_fraction(SCHEDULES[name], pp, micro_batches)

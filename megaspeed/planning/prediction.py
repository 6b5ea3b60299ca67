"""Memory and traffic of every kind of pipeline stage of a run.

Two pipeline stages are of the same kind if their chunks have the same number of blocks, and both or
neither are the first stage, which has the embedding, or the last one, which has the head.
Stages of one kind send the same number of bytes. The first of them holds the most memory: with
1f1b, an earlier pipeline stage keeps more micro-batches (Narayanan et al. 2021, section 2.2); with
gpipe, every stage keeps all of them. So it is enough to predict the first stage of each kind:

    pp 35 over 105 blocks    0: embedding + 3 blocks    1..33: 3 blocks    34: 3 blocks + head
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from megaspeed.config.resolve import Run
from megaspeed.pipeline.partition import chunks_of_stages
from megaspeed.pipeline.schedules import pipeline_of
from megaspeed.planning.costs.stage_memory import StageMemory
from megaspeed.planning.costs.traffic import Traffic, predict_traffic


@dataclass(frozen=True, kw_only=True)
class StagePrediction:
    """What the fullest rank of one pipeline stage holds, and what it sends in one step."""

    run: Run
    pipeline_stage: int
    device_type: str

    @cached_property
    def memory(self) -> StageMemory:
        """Memory of the states and at the peak."""
        return StageMemory(self.run, self.pipeline_stage, self.device_type)

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes sent, by axis and collective."""
        return predict_traffic(self.run, self.pipeline_stage, self.device_type)

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
    def reductions(self) -> int:
        """How many times a step reduces the gradient of a matrix over the shards."""
        return self.fullest.memory.axis.matrix_reduction.times(pipeline_of(self.run))

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
    """Return memory and traffic of the first pipeline stage of each kind, on "cuda" or "cpu"."""
    stages = tuple(
        StagePrediction(run=run, pipeline_stage=alike.start, device_type=device_type)
        for alike in alike_stages(run)
    )
    return Prediction(run=run, stages=stages)


def alike_stages(run: Run) -> list[range]:
    """Return the pipeline stages by kind. The first of each range holds the most memory."""
    sizes, last = [[*map(len, chunks)] for chunks in chunks_of_stages(run)], run.grid.pp - 1
    kinds = groupby(range(run.grid.pp), lambda stage: (sizes[stage], stage == 0, stage == last))
    return [range(first, first + 1 + len(others)) for _, (first, *others) in kinds]

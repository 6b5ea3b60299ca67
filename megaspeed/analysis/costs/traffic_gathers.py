"""ZeRO-3: how many elements a rank gathers in one optimizer step.

    for each forward and backward of the schedule: replay what DeepSpeed's coordinator gathers
    after the step: what is persistent

A parameter travels padded to a multiple of dp. Where nothing is fetched ahead and nothing is kept,
each micro-batch gathers every parameter in its forward and again in its backward (2 x; with
gradients 3 x: Rajbhandari et al. 2020, section 7.2.2), and recomputation gathers a block's a third
time but for those of its last matrix. What is kept from forward to backward travels once.

Not replayed, and a little different in number: ``stage3_allgather_sequential`` together with
fetching ahead, and ``stage3_module_granularity_threshold``.
"""

from dataclasses import dataclass

from megaspeed.analysis.costs.local_parameters import (
    LocalParameter,
    local_parameters,
    partition_elements,
)
from megaspeed.analysis.costs.model_states import stay_whole
from megaspeed.analysis.costs.zero3_coordinator import Coordinator, GatherSettings
from megaspeed.analysis.costs.zero3_visits import Pass, visits_of_passes
from megaspeed.config.resolve import Run
from megaspeed.pipeline.instructions import Backward, Forward
from megaspeed.pipeline.schedules import SCHEDULES

_REPLAYED_MICRO_BATCHES = 64
_MOST_STEPS = 8  # two or three are enough


@dataclass(frozen=True, kw_only=True)
class Gathers:
    """Elements gathered, padding included, and held.

    Attributes:
        together: in collectives of several parameters.
        alone: in collectives of one.
        after_step: persistent ones, once the optimizer has taken its step.
        most_whole: the most that were whole at one moment, without padding.
    """

    together: int
    alone: int
    after_step: int
    most_whole: int

    @property
    def total(self) -> int:
        """All that is gathered."""
        return self.together + self.alone + self.after_step


def gathers_of_a_step(run: Run, pipeline_stage: int) -> Gathers:
    """Of a rank of ``pipeline_stage`` at ZeRO-3, once each step goes like the one before it.

    That is from the second or third step on: DeepSpeed records the order of modules first.
    """
    micro_batches = run.batch.gradient_accumulation_steps
    replayed = _REPLAYED_MICRO_BATCHES + 2 * run.grid.pp
    if micro_batches <= replayed:
        return _replay(run, pipeline_stage, micro_batches)
    # The schedule repeats itself long before: each further micro-batch gathers as much as the last.
    fewer = _replay(run, pipeline_stage, replayed)
    last = _replay(run, pipeline_stage, replayed + 1)
    further = micro_batches - replayed
    return Gathers(
        together=fewer.together + further * (last.together - fewer.together),
        alone=fewer.alone + further * (last.alone - fewer.alone),
        after_step=fewer.after_step,
        most_whole=fewer.most_whole,
    )


def _replay(run: Run, pipeline_stage: int, micro_batches: int) -> Gathers:
    parameters = local_parameters(run, pipeline_stage)
    coordinator = Coordinator(_settings(run, parameters), visits_of_passes(run, pipeline_stage))
    passes = _passes(run, pipeline_stage, micro_batches)
    for _ in range(_MOST_STEPS):
        before = coordinator.state()
        counts = coordinator.run(passes)
        if coordinator.state() == before:
            break
    dp = run.grid.dp
    padded = {p.name: dp * partition_elements(p, dp) for p in parameters}
    alone = sum(times * padded[name] for name, times in counts.alone.items())
    return Gathers(
        together=sum(times * padded[name] for name, times in counts.times.items()) - alone,
        alone=alone,
        after_step=sum(padded[parameter.name] for parameter in stay_whole(run, parameters)),
        most_whole=counts.most_whole_elements,
    )


def _passes(run: Run, pipeline_stage: int, micro_batches: int) -> list[Pass]:
    schedule = SCHEDULES[run.config.parallel.schedule]
    passes: list[Pass] = []
    for instruction in schedule(run.grid.pp, pipeline_stage, micro_batches):
        if isinstance(instruction, Forward):
            passes.append("forward")
        elif isinstance(instruction, Backward):
            passes.append("backward")
    return passes


def _settings(run: Run, parameters: list[LocalParameter]) -> GatherSettings:
    zero = run.config.zero_optimization
    prefetch, live = zero.stage3_prefetch_bucket_size, zero.stage3_max_live_parameters
    assert prefetch is not None and live is not None, "the run is definite"
    return GatherSettings(
        sizes={parameter.name: parameter.elements for parameter in parameters},
        persistent=frozenset(parameter.name for parameter in stay_whole(run, parameters)),
        prefetch_elements=prefetch,
        reuse_elements=zero.stage3_max_reuse_distance,
        live_elements=live,
    )

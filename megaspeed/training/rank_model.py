"""One rank's part of the model, on the meta device, and the initial values of its parameters.

GPT(layers of this pipeline stage) --parallelize--> RankModel --zero.build_engine--> ZeroEngine
GPT(all layers) -----------------------------------------------> the baselines of `compare`
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megaspeed.config.resolve import Run
from megaspeed.model.gpt import GPT
from megaspeed.pipeline.stages import layers_of_stages
from megaspeed.tensor_parallel.axis import TensorAxis
from megaspeed.tensor_parallel.parallelize import initial_shard, parallelize
from megaspeed.tensor_parallel.plan import ParameterShard
from megaspeed.topology.context import ParallelContext


@dataclass(frozen=True)
class RankModel:
    """The layers of one pipeline stage, each with this tensor rank's shards.

    Attributes:
        module: on the meta device.
        shards: full name -> the part of the parameter that this rank holds.
        axis: the tensor axis.
        run: the resolved run.
    """

    module: GPT
    shards: dict[str, ParameterShard]
    axis: TensorAxis
    run: Run

    def initial_value(self, name: str) -> Tensor:
        """This rank's shard of a parameter's initial value: fp32, on the CPU."""
        config = self.run.config
        return initial_shard(config.model, config.training.seed, name, self.shards[name])


def rank_model(run: Run, context: ParallelContext) -> RankModel:
    """The part of the model that this rank trains."""
    axis = TensorAxis(
        group=context.tp_group,
        rank=context.tp_rank,
        size=context.tp_size,
        sequence_parallel=run.config.parallel.sequence_parallel and context.tp_size > 1,
        timeline=context.timeline,
    )
    module = plain_model(run, layers_of_stages(run)[context.pp_rank])
    return RankModel(module, parallelize(module, run.config.model, axis), axis, run)


def plain_model(run: Run, layers: range | None = None) -> GPT:
    """The layers ``layers`` of the run's model on the meta device; all layers if omitted."""
    with torch.device("meta"):
        return GPT(
            run.config.model,
            layers=layers,
            seed=run.config.training.seed,
            recompute_blocks=run.config.parallel.activation_checkpointing == "full",
        )

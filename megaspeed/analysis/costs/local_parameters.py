"""What one rank holds of the model before ZeRO partitions it, and in which optimizer group.

    full shapes of the pipeline stage -> tensor shard of each -> optimizer groups -> ZeRO's padding

The groups are those that DeepSpeed is given (``zero.build``, ``training.optimizer``): a weight that
two pipeline stages share stands alone, then what decays, then what does not. At ZeRO-1 and 2 each
group is one flat tensor, cut into dp equal partitions; at ZeRO-3 each parameter is cut by itself.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from megaspeed.config.resolve import Run
from megaspeed.model.parameters import EMBEDDING_WEIGHT, HEAD_WEIGHT, Parameter, parameters_of
from megaspeed.pipeline.stages import layers_of_stages
from megaspeed.tensor_parallel.plan import shard_of

OptimizerGroup = Literal["tied", "decaying", "other"]
OPTIMIZER_GROUPS: tuple[OptimizerGroup, ...] = ("tied", "decaying", "other")

_ELEMENTS_ALIGNED = 2  # DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py:369: 4 bytes in bf16


@dataclass(frozen=True, kw_only=True)
class LocalParameter:
    """One parameter of one rank.

    Attributes:
        name: full name.
        layer: name of its layer, such as "blocks.3".
        shape: of the local tensor, tensor-parallel padding included.
        group: the optimizer group that it is in.
    """

    name: str
    layer: str
    shape: tuple[int, ...]
    group: OptimizerGroup

    @property
    def elements(self) -> int:
        """Of the local tensor."""
        return math.prod(self.shape)


def local_parameters(run: Run, pipeline_stage: int, tensor_rank: int = 0) -> list[LocalParameter]:
    """The parameters of one rank, in the order of the module's; the data axis makes no difference.

    Local shapes are the same for every ``tensor_rank``.
    """
    model, grid = run.config.model, run.grid
    parameters = parameters_of(model, layers_of_stages(run)[pipeline_stage])
    return [
        LocalParameter(
            name=name,
            layer=parameter.layer,
            shape=shard_of(model, parameter, rank=tensor_rank, size=grid.tp).local_shape,
            group=_group_of(run, parameter),
        )
        for name, parameter in parameters.items()
    ]


def elements_of(parameters: Iterable[LocalParameter]) -> int:
    """Elements of all of them together, without ZeRO's padding."""
    return sum(parameter.elements for parameter in parameters)


def flat_group_elements(parameters: Iterable[LocalParameter], dp: int) -> dict[OptimizerGroup, int]:
    """ZeRO-1 and 2: elements of each group's flat tensor, padded to a multiple of 2 x dp.

    A rank's partition is 1/dp of it. Groups without parameters are left out.
    """
    own = list(parameters)
    totals = {
        group: elements_of(parameter for parameter in own if parameter.group == group)
        for group in OPTIMIZER_GROUPS
    }
    return {
        group: _up_to(total, _ELEMENTS_ALIGNED * dp) for group, total in totals.items() if total
    }


def partition_elements(parameter: LocalParameter, dp: int) -> int:
    """ZeRO-3: elements of one rank's equal part of a parameter, the last part padded."""
    return math.ceil(parameter.elements / dp)


def _group_of(run: Run, parameter: Parameter) -> OptimizerGroup:
    shared = run.config.model.tie_word_embeddings and run.grid.pp > 1
    if shared and parameter.name in (EMBEDDING_WEIGHT, HEAD_WEIGHT):
        return "tied"
    return "decaying" if parameter.decays else "other"


def _up_to(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple

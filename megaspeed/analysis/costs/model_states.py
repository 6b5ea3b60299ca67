"""Model states of one rank: parameters, gradients and optimizer states by ZeRO stage.

With P parameters on a rank, a bytes an element, g bytes a gradient element, dp data-parallel ranks
(Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
section 5 and Figure 1, where a = g = 2 and K = 12):

    zero_stage   parameters   gradients   optimizer states (fp32 master weights, two moments)
    0            a P          g P         12 P
    1            a P          g P         12 P / dp
    2            a P          g P / dp    12 P / dp
    3            a P / dp     g P / dp    12 P / dp

What is exact here beyond the paper: tensor shards with their vocabulary padding, each pipeline
stage's own parameters, DeepSpeed's padding of flat groups (stages 0 to 2) or of each parameter
(stage 3), parameters small enough to stay whole (stage 3), and gradients that stay whole at stages
2 and 3 where they are reduced once a step. fp32 runs hold master weights as well: DeepSpeed's
optimizers keep them apart from the parameters in every precision. Offloaded states are in host
memory and do not count.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from megaspeed.analysis.costs.memory import BYTES_OF, MemoryBytes
from megaspeed.config.resolve import Run
from megaspeed.model.parameters import EMBEDDING_WEIGHT, HEAD_WEIGHT, Parameter, parameters_of
from megaspeed.pipeline.partition import layers_of_stages
from megaspeed.tensor_parallel.plan import shard_of

# What one rank holds of the model before ZeRO partitions it, and in which optimizer group.
#
#     full shapes of the stage -> tensor shard of each -> optimizer groups -> ZeRO's padding
#
# The groups are those that DeepSpeed is given (``zero.build``, ``training.optimizer``): a weight
# that two pipeline stages share stands alone, then what decays, then what does not. At ZeRO-1 and 2
# each group is one flat tensor, cut into dp equal partitions; at ZeRO-3 each parameter is cut by
# itself.

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


_OPTIMIZER_BYTES_PER_ELEMENT = 12  # fp32 master weight and AdamW's two fp32 moments


def model_states(
    run: Run, parameters: Sequence[LocalParameter], *, on_host: bool = False
) -> MemoryBytes:
    """What a rank with these parameters holds between two micro-batches of a step.

    Gradients are those added up so far; at ZeRO-2 and 3 with one reduction a step, whole ones.
    ``on_host``: the device is the host's processor, whose memory holds offloaded states too.
    """
    gradient = BYTES_OF[run.accumulation_dtype]
    whole = elements_of(parameters) * gradient if keeps_whole_gradients(run) else 0
    partition = gradient_partition_bytes(run, parameters)
    # ZeRO-3's partition stays from step to step; that of the others is made by the reduction.
    partitioned = partition if run.zero_stage == 3 or not keeps_whole_gradients(run) else 0
    states = partitioned_elements(run, parameters) * _OPTIMIZER_BYTES_PER_ELEMENT
    offloads = run.config.zero_optimization.offloads_optimizer
    elsewhere = offloads and not on_host
    if offloads and on_host and run.zero_stage != 2:  # DeepSpeed's fp32 copy beside the partition
        whole += partitioned_elements(run, parameters) * BYTES_OF["fp32"]
    return MemoryBytes(
        parameters=parameter_bytes(run, parameters, on_host=on_host),
        gradients=whole + (0 if elsewhere else partitioned),
        optimizer_states=0 if elsewhere else states,
    )


def keeps_whole_gradients(run: Run) -> bool:
    """Whether a rank adds up whole gradients over a step's micro-batches."""
    return run.zero_stage < 2 or run.gradient_reduction == "per_step"


def partitioned_elements(run: Run, parameters: Sequence[LocalParameter]) -> int:
    """Elements of the parameters that this rank steps, padding included."""
    dp = run.grid.dp
    if run.zero_stage == 3:
        return sum(partition_elements(parameter, dp) for parameter in parameters)
    owners = 1 if run.zero_stage == 0 else dp
    return sum(elements // owners for elements in flat_group_elements(parameters, owners).values())


def gradient_partition_bytes(run: Run, parameters: Sequence[LocalParameter]) -> int:
    """The reduced gradients that this rank steps with."""
    return partitioned_elements(run, parameters) * BYTES_OF[run.accumulation_dtype]


def parameter_bytes(
    run: Run, parameters: Sequence[LocalParameter], *, on_host: bool = False
) -> int:
    """What the model computes with, and at ZeRO-3 keeps between steps."""
    element = BYTES_OF[run.precision]
    if run.zero_stage < 3:
        owners = 1 if run.zero_stage == 0 else run.grid.dp
        return element * sum(flat_group_elements(parameters, owners).values())
    whole = element * elements_of(stay_whole(run, parameters))
    if run.config.zero_optimization.offloads_parameters and not on_host:
        return whole
    return whole + element * partitioned_elements(run, parameters)


def stay_whole(run: Run, parameters: Sequence[LocalParameter]) -> list[LocalParameter]:
    """ZeRO-3: parameters up to the threshold, which are kept whole beside their partitions.

    DeepSpeed 0.19.8, runtime/zero/parameter_offload.py:328.
    """
    zero = run.config.zero_optimization
    threshold = zero.stage3_param_persistence_threshold
    assert threshold is not None, "a resolved run states it"
    allowed = zero.stage3_model_persistence_threshold
    whole: list[LocalParameter] = []
    total = 0
    for parameter in parameters:
        fits = allowed is None or total + parameter.elements <= allowed
        if parameter.elements <= threshold and fits:
            whole.append(parameter)
            total += parameter.elements
    return whole


def bucket_elements(run: Run, parameters: Sequence[LocalParameter]) -> int:
    """Elements of the buffer in which gradients are laid end to end before they are reduced."""
    stated = run.config.zero_optimization.reduce_bucket_size
    assert stated is not None, "a resolved run states it"
    return min(stated, elements_of(parameters))


# ZeRO-3: what a rank gathers, layer by layer.
#
#     forward     gathers every layer once
#     backward    gathers every layer once, but not the embedding
#     step        gathers once what stays whole from step to step
#
# So a step of M micro-batches gathers M (2 P - E) + K elements: P of all layers and E of the
# embedding without what stays whole, which is K. A tied head counts in the embedding and in the
# head. (Rajbhandari et al. 2020, section 7.2.2, has 2 P.) A parameter travels padded to a multiple
# of dp.
#
#     partition of every rank --all-gather--> arriving --copy--> the layer's parameters
#
# While they are copied, the parameters of a layer are in memory twice. If a layer has one
# parameter, it arrives in its final place. With one data rank nothing is gathered, because its
# partitions are the parameters; but offloaded partitions are copied to the device.

Pass = Literal["forward", "backward"]


@dataclass(frozen=True)
class GatheredBytes:
    """Bytes of gathered parameters on a rank while a pass computes one layer.

    Attributes:
        at_work: the layer's parameters.
        arriving: the buffer in which they arrived, until they are copied out of it.
        ahead: the next layer's parameters, which are gathered while this layer computes.
    """

    at_work: int = 0
    arriving: int = 0
    ahead: int = 0


def gathered_in_pass(
    run: Run, parameters: Sequence[LocalParameter], direction: Pass, *, on_host: bool = False
) -> list[GatheredBytes]:
    """Gathered bytes at each layer, in the order of the forward pass (in both directions).

    Args:
        run: the resolved run.
        parameters: those of the rank.
        direction: of the pass.
        on_host: whether the rank computes on the CPU, where offloaded partitions are already.
    """
    layers = [
        [] if direction == "backward" and name == "embedding" else layer
        for name, layer in _travelling_by_layer(run, parameters).items()
    ]
    is_there = run.grid.dp == 1 and (
        on_host or not run.config.zero_optimization.offloads_parameters
    )
    if run.zero_stage < 3 or is_there:
        return [GatheredBytes() for _ in layers]
    following = [*layers[1:], []] if direction == "forward" else [[], *layers[:-1]]
    apart = run.grid.dp > 1
    return [
        GatheredBytes(
            at_work=_bytes(run, layer),
            arriving=_bytes(run, layer) if apart and len(layer) > 1 else 0,
            ahead=_bytes(run, later) if _fetches_ahead(run, layer, later) else 0,
        )
        for layer, later in zip(layers, following, strict=True)
    ]


def _parameters_by_layer(
    parameters: Sequence[LocalParameter],
) -> dict[str, list[LocalParameter]]:
    """Name of each layer -> all parameters that it computes with, a tied head's weight included."""
    layers: dict[str, list[LocalParameter]] = {}
    for parameter in parameters:
        layers.setdefault(parameter.layer, []).append(parameter)
    named = {parameter.name: parameter for parameter in parameters}
    if "head" in layers and HEAD_WEIGHT not in named:
        layers["head"].append(named[EMBEDDING_WEIGHT])
    return layers


def gathered_elements_of_a_step(run: Run, parameters: Sequence[LocalParameter]) -> int:
    """Elements that a rank with these parameters gathers in an optimizer step, padded."""
    layers = _travelling_by_layer(run, parameters)
    padded = {name: _padded(run, layer) for name, layer in layers.items()}
    each_micro_batch = 2 * sum(padded.values()) - padded.get("embedding", 0)
    kept = _padded(run, stay_whole(run, parameters))
    return run.batch.gradient_accumulation_steps * each_micro_batch + kept


def _travelling_by_layer(
    run: Run, parameters: Sequence[LocalParameter]
) -> dict[str, list[LocalParameter]]:
    whole = {parameter.name for parameter in stay_whole(run, parameters)}
    return {
        name: [parameter for parameter in layer if parameter.name not in whole]
        for name, layer in _parameters_by_layer(parameters).items()
    }


def _fetches_ahead(
    run: Run, layer: Sequence[LocalParameter], later: Sequence[LocalParameter]
) -> bool:
    zero = run.config.zero_optimization
    return zero.prefetches(elements_of(layer), elements_of(later))


def _padded(run: Run, parameters: Sequence[LocalParameter]) -> int:
    dp = run.grid.dp
    return sum(dp * partition_elements(parameter, dp) for parameter in parameters)


def _bytes(run: Run, parameters: Sequence[LocalParameter]) -> int:
    return _padded(run, parameters) * BYTES_OF[run.precision]

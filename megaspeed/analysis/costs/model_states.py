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

from collections.abc import Sequence

from megaspeed.analysis.costs.local_parameters import (
    LocalParameter,
    elements_of,
    flat_group_elements,
    partition_elements,
)
from megaspeed.analysis.costs.memory import MemoryBytes
from megaspeed.analysis.costs.number_bytes import BYTES_OF
from megaspeed.config.resolve import Run

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

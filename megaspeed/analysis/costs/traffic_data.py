"""What ZeRO sends over the data axis (Rajbhandari et al. 2020, section 7), P parameters of a rank.

    stage   gradients                            parameters
    0       all-reduce P, once a step            -                                    2 x
    1       reduce P to its owners               all-gather P after the step          2 x
    2       the same                             the same                             2 x
    3       reduce-scatter P                     all-gather P in each pass            3 x

"Once" is once a step or once a micro-batch, as ``parallel.gradient_reduction`` says; the counts on
the right are of one reduction. At stage 3 a backward does not gather the embedding, so it moves
slightly less. Gradients travel in the type in which they are added up, or in
``communication_data_type``; parameters in their own. At ZeRO-1 and 2 every optimizer group is
padded to a multiple of 2 x dp before it is gathered, at ZeRO-3 every parameter to a multiple of dp.

Three keys of DeepSpeed turn stages 1 and 2 into 3 x, because each bucket of gradients is then
all-reduced: ``use_multi_rank_bucket_allreduce`` turned on (its own default), ``reduce_scatter`` or
``contiguous_gradients`` turned off.
"""

from megaspeed.analysis.costs.collective_cost import Collective, Messages
from megaspeed.analysis.costs.gathered_parameters import gathered_elements_of_a_step
from megaspeed.analysis.costs.local_parameters import (
    LocalParameter,
    elements_of,
    flat_group_elements,
    local_parameters,
    partition_elements,
)
from megaspeed.analysis.costs.number_bytes import BYTES_OF
from megaspeed.config.resolve import Run


def add_data_axis(messages: Messages, run: Run, pipeline_stage: int) -> None:
    """Adds one step's messages of a rank of ``pipeline_stage``."""
    dp = run.grid.dp
    if dp == 1:
        return
    parameters = local_parameters(run, pipeline_stage)
    for collective, message_bytes in _gradient_messages(run, parameters):
        messages.add("dp", collective, message_bytes, ranks=dp)
    if run.zero_stage in (1, 2):
        gathered = sum(flat_group_elements(parameters, dp).values())
        messages.add("dp", "all_gather", gathered * BYTES_OF[run.precision], ranks=dp)
    if run.zero_stage == 3:
        gathered = gathered_elements_of_a_step(run, parameters)
        messages.add("dp", "all_gather", gathered * BYTES_OF[run.precision], ranks=dp)


def _gradient_messages(run: Run, parameters: list[LocalParameter]) -> list[tuple[Collective, int]]:
    """Collectives that sum gradients, with the bytes of all their messages in one step."""
    elements = elements_of(parameters)
    if run.zero_stage == 0:
        return [("all_reduce", elements * BYTES_OF[run.accumulation_dtype])]
    number_bytes = BYTES_OF[run.config.communication_data_type or run.accumulation_dtype]
    number_bytes *= _reductions(run)
    if run.zero_stage < 3:
        collective: Collective = "all_reduce" if _reduces_everywhere(run) else "reduce"
        return [(collective, elements * number_bytes)]
    dp = run.grid.dp
    whole = elements_of(p for p in parameters if _stays_whole(run, p))
    parts = sum(partition_elements(p, dp) for p in parameters if not _stays_whole(run, p))
    return [
        ("all_reduce", whole * number_bytes),
        ("reduce_scatter", dp * parts * number_bytes),
    ]


def _stays_whole(run: Run, parameter: LocalParameter) -> bool:
    """ZeRO-3: whether a gradient is all-reduced, as ``reduce_scatter`` false asks for.

    One that is larger than a bucket is scattered all the same.
    """
    zero = run.config.zero_optimization
    assert zero.reduce_bucket_size is not None, "the run is definite"
    fits = parameter.elements <= zero.reduce_bucket_size
    return fits and zero.contiguous_gradients and not zero.reduce_scatter


def _reductions(run: Run) -> int:
    """How often a step reduces each gradient over the data axis.

    ZeRO-1 keeps whole gradients, and reduces them with the step's last micro-batch.
    """
    if run.zero_stage == 1 or run.gradient_reduction == "per_step":
        return 1
    return run.batch.gradient_accumulation_steps


def _reduces_everywhere(run: Run) -> bool:
    """ZeRO-1 and 2: whether every rank receives every gradient."""
    zero = run.config.zero_optimization
    contiguous = zero.contiguous_gradients or zero.offloads_optimizer
    return zero.use_multi_rank_bucket_allreduce or not zero.reduce_scatter or not contiguous

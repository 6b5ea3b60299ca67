"""What a pipeline stage sends its neighbours, and the sum of a tied weight's gradients.

    activations   to the next stage, each micro-batch       (B, S, D)      Narayanan et al. 2021,
    gradients     to the stage before, each micro-batch     (B, S, D)      section 3.2: b s h
    tied weight   the first and the last stage, once a step its local gradient to each other

With sequence parallelism both messages are (B, S/tp, D), as each tensor rank sends its own part.
"""

from megaspeed.analysis.costs.collective_cost import Messages
from megaspeed.analysis.costs.hidden_states import hidden_bytes
from megaspeed.analysis.costs.local_parameters import (
    elements_of,
    flat_group_elements,
    local_parameters,
)
from megaspeed.analysis.costs.number_bytes import BYTES_OF
from megaspeed.config.resolve import Run


def add_pipeline_axis(messages: Messages, run: Run, pipeline_stage: int) -> None:
    """Adds one step's messages of a rank of ``pipeline_stage``."""
    stages = run.grid.pp
    neighbours = (pipeline_stage > 0) + (pipeline_stage < stages - 1)
    if neighbours:
        sends = neighbours * run.batch.gradient_accumulation_steps
        messages.add("pp", "send", sends * hidden_bytes(run), ranks=stages)
    tied = tied_gradient_bytes(run, pipeline_stage)
    if tied:
        messages.add("pp", "send", tied, ranks=stages)


def tied_gradient_bytes(run: Run, pipeline_stage: int) -> int:
    """A rank's part of the gradient of a weight that two pipeline stages hold; 0 without one.

    Whole at ZeRO-0; at ZeRO-1 to 3 the first data rank's partition, which is the longest.
    """
    tied = [p for p in local_parameters(run, pipeline_stage) if p.group == "tied"]
    if not tied:
        return 0
    elements = elements_of(tied)
    zero = run.config.zero_optimization
    if run.zero_stage > 0:
        dp = run.grid.dp
        flat = flat_group_elements(tied, dp)["tied"]
        partition = flat // dp if run.zero_stage < 3 else -(-elements // dp)
        elements = min(elements, partition)
    # Offloaded gradients are the master weights', in host memory.
    offloaded = zero.offloads_optimizer
    return elements * BYTES_OF["fp32" if offloaded else run.accumulation_dtype]

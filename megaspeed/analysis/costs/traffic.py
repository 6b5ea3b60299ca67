"""Bytes that one rank sends in one optimizer step, by axis and collective.

    dp      gradients and parameters, as ZeRO partitions them          traffic_data
    tp      activations within a layer, and the loss                   traffic_tensor
    pp      activations and their gradients, a tied weight's gradient  traffic_pipeline
    world   one report of a few fp64 numbers from every rank to every rank

Message sizes are exact, from shapes; ``collective_cost`` says what a message costs a rank.
"""

from megaspeed.analysis.costs.collective_cost import (
    Collective,
    Messages,
    Traffic,
    TrafficAxis,
    bytes_sent,
)
from megaspeed.analysis.costs.traffic_data import add_data_axis
from megaspeed.analysis.costs.traffic_pipeline import add_pipeline_axis
from megaspeed.analysis.costs.traffic_tensor import add_tensor_axis
from megaspeed.config.resolve import Run

__all__ = ["Collective", "Traffic", "TrafficAxis", "bytes_sent", "predict_traffic"]

# Squares of the norm, loss, peak memory, stop signal, and the timeline of a step: training.worker.
_NUMBERS_OF_A_REPORT = 4 + 1 + 8
_FP64_BYTES = 8


def predict_traffic(run: Run, pipeline_stage: int) -> Traffic:
    """Of a rank of ``pipeline_stage``, in bytes, for one step after the first.

    In the first step each direction of the pipeline also sends a header of 80 bytes. Ranks of one
    pipeline stage send the same number of bytes, except for a tied weight at ZeRO-1 to 3: its last
    partition may be shorter. The result is that of a rank with the longest partition.
    """
    messages = Messages()
    add_data_axis(messages, run, pipeline_stage)
    add_tensor_axis(messages, run, pipeline_stage)
    add_pipeline_axis(messages, run, pipeline_stage)
    messages.add(
        "world",
        "all_reduce",
        run.grid.world_size * _NUMBERS_OF_A_REPORT * _FP64_BYTES,
        ranks=run.grid.world_size,
    )
    return messages.traffic()

"""The pipeline axis: schedules as data, their check, the partition of layers, the executor."""

from megaspeed.pipeline.exchanges import stage_program
from megaspeed.pipeline.executor import Executor, StageEngine
from megaspeed.pipeline.p2p import Neighbours, PipelineProtocolError
from megaspeed.pipeline.partition import PartitionError, partition_layers
from megaspeed.pipeline.schedules import (
    SCHEDULES,
    Schedule,
    ScheduleError,
    forward_only,
    peak_micro_batches_in_flight,
)
from megaspeed.pipeline.simulation import bubble_fraction, check_schedule, format_grid
from megaspeed.pipeline.stages import layers_of_stages, parameters_of_stages

__all__ = [
    "SCHEDULES",
    "Executor",
    "Neighbours",
    "PartitionError",
    "PipelineProtocolError",
    "Schedule",
    "ScheduleError",
    "StageEngine",
    "bubble_fraction",
    "check_schedule",
    "format_grid",
    "forward_only",
    "layers_of_stages",
    "parameters_of_stages",
    "partition_layers",
    "peak_micro_batches_in_flight",
    "stage_program",
]

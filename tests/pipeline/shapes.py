"""Pipelines of any shape, and many with several chunks on each stage."""

from itertools import product
from typing import Any

from megaspeed.pipeline.schedules import Pipeline


def shape(
    schedule: Any,
    stages: int,
    micro_batches: int,
    chunks: int = 1,
    groups: int = 1,
    extra_in_flight: int = 0,
) -> Pipeline:
    """Return a pipeline without gathers, whose backward takes two ticks."""
    return Pipeline(
        schedule=schedule,
        stages=stages,
        micro_batches=micro_batches,
        chunks=chunks,
        groups=groups,
        extra_in_flight=extra_in_flight,
    )


CHUNKED = [
    shape("1f1b", stages, micro_batches, chunks, groups)
    for stages, chunks in product(range(2, 9), range(2, 5))
    for micro_batches in range(stages, 4 * stages + 3)
    for most in [micro_batches // stages]
    for groups in sorted({1, min(2, most), most})
]

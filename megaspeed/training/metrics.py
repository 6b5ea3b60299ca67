"""What a run records: JSON objects with the same keys at every layout.

metrics.jsonl   each optimizer step, each validation, and the samples of the model
parts.jsonl     the times of the parts of each timed step
loads.json      how many tokens each expert got in the last timed step
"""

import contextlib
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from megaspeed.config.resolve import Precision
from megaspeed.files.json_values import json_value, object_in
from megaspeed.topology.activity import OWN_WORK, PARTS
from megaspeed.topology.devices import peak_by_name


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One optimizer step, in full precision."""

    step: int  # counted from 1
    loss: float  # mean over the step's predicted tokens, nats
    grad_norm: float  # before clipping, over all logical parameters
    learning_rate: float  # the rate of this step
    tokens: int  # predicted tokens so far, this step included
    train_batch_size: int  # samples of this step
    # wall time of the step on the host. The GPU may still run the optimizer step after that; this
    # time is part of the next step.
    step_time_seconds: float
    tokens_per_second: float  # of this step, over all ranks
    tflops_per_rank: float  # useful matrix operations of this step, in 10^12 a second and rank
    # ``tflops_per_rank`` as a fraction of the device's dense peak; None if the peak is not known,
    # as in fp32
    mfu: float | None
    # for each pipeline stage, the largest peak memory of its ranks so far, read when the gradients
    # of this step were complete
    peak_memory_bytes: list[int]
    # whether the step was skipped, because loss or gradient norm was not finite or was a spike
    skipped: bool
    # how many standard deviations the loss or the norm lies above the mean of the steps before;
    # None if the step is no spike
    spike: float | None
    # mean of log(Z)^2 over the step's predicted tokens, without training.z_loss; None if that is 0
    z_loss: float | None


@dataclass(frozen=True, kw_only=True)
class MixtureMetrics(StepMetrics):
    """One optimizer step of a model with experts."""

    auxiliary_loss: float  # mean over sequences, summed over blocks, without its coefficient
    # for each block, the largest load of an expert, divided by the mean load
    load_factors: list[float]


@dataclass(frozen=True, kw_only=True)
class LoadMetrics:
    """How many tokens each expert of each block got in a step."""

    step: int
    loads: list[list[int]]  # by block, then by expert


@dataclass(frozen=True, kw_only=True)
class ValidationMetrics:
    """One evaluation: the step that it follows, the mean loss in nats, the perplexity e^loss."""

    step: int
    validation_loss: float
    validation_perplexity: float

    @classmethod
    def of(cls, step: int, loss: float) -> Self:
        """Compute the perplexity from the mean loss: infinity if it is too large for a float."""
        perplexity = math.exp(loss) if loss < 700 else math.inf
        return cls(step=step, validation_loss=loss, validation_perplexity=perplexity)


@dataclass(frozen=True, kw_only=True)
class SampleMetrics:
    """What the model writes after each of ``training.sample_prompts``, and after which step."""

    step: int
    samples: list[tuple[str, str]]  # each prompt with its continuation


@dataclass(frozen=True, kw_only=True)
class PartMetrics:
    """The times of the parts of one step.

    Every ``training.log_interval``-th step is timed, and each that ``training.profile`` states.
    """

    step: int  # the step that was timed
    parts_seconds: dict[str, float]  # seconds of each part, the mean over all ranks
    slowest_rank: int  # the rank that worked longest, without its waits for other ranks
    slowest_rank_seconds: float  # how long it worked
    median_rank_seconds: float  # how long the rank in the middle worked

    @classmethod
    def of(cls, timelines: Sequence[Sequence[float]]) -> Self | None:
        """Combine what ``Timeline.pop_seconds`` returned on each rank.

        Returns None if a rank has no times because its GPU had not finished the step.
        """
        if not timelines or not all(step > 0 for step, *_ in timelines):
            return None
        work = [own_work(seconds) for _, *seconds in timelines]
        step, *means = (statistics.fmean(column) for column in zip(*timelines, strict=True))
        slowest = max(range(len(work)), key=work.__getitem__)
        return cls(
            step=int(step),
            parts_seconds=dict(zip(PARTS, means, strict=True)),
            slowest_rank=slowest,
            slowest_rank_seconds=work[slowest],
            median_rank_seconds=statistics.median(work),
        )


def own_work(seconds: Sequence[float]) -> float:
    """Return how long a rank did not wait for other ranks, of the times of each of ``PARTS``."""
    return sum(own for part, own in zip(PARTS, seconds, strict=True) if part in OWN_WORK)


Metrics = StepMetrics | PartMetrics | ValidationMetrics | SampleMetrics

Record = Callable[[Metrics], object]
"""Writes metrics to ``metrics.jsonl``, or to other services."""


class MetricsFile:
    """``metrics.jsonl`` of a run: one object on each line, written without buffering.

    Appends to an existing file. Infinity and NaN, which JSON does not have, are written as null. If
    the disk is full, training continues. The write is tried again with each later object, and when
    the file is closed.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""

    def write(self, metrics: Metrics) -> None:
        self._unwritten += json.dumps(json_value(metrics)).encode() + b"\n"
        with contextlib.suppress(OSError):
            self._write()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._file:
            if kind is None:
                self._write()

    def _write(self) -> None:
        while self._unwritten:  # if the disk is almost full, only a part may be written
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]


def records_up_to(step: int, lines: bytes) -> bytes:
    """Return the lines of a metrics file for step ``step`` and earlier steps.

    A line that is incomplete, because its writer was killed, is dropped.
    """
    kept = [line for line in lines.splitlines() if 0 <= _step_of(line) <= step]
    return b"".join(line + b"\n" for line in kept)


def _step_of(line: bytes) -> int:
    """Return the step of a record; -1 if the line is not a record."""
    step = (object_in(line) or {}).get("step")
    return step if isinstance(step, int) else -1


def device_name(device: torch.device) -> str:
    """Return the GPU's name of its driver, such as "NVIDIA H100 80GB HBM3"; "cpu" for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def peak_flops_per_second(device: torch.device, precision: Precision) -> float | None:
    """Return the device's dense peak in a run's precision, for model FLOPs utilization (MFU).

    None if it is unknown, as in fp32, because it depends on whether TF32 is used.
    """
    if device.type != "cuda" or precision == "fp32":
        return None
    return peak_by_name(torch.cuda.get_device_name(device))

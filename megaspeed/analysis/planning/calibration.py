"""One factor by which a real run's steps differ from their prediction.

    factor = median of the measured steps / predicted step

The run's folder has its resolved configuration and the seconds of each step. The factor holds for
similar runs on the same machines. It includes all effects that the prediction does not know, such
as a slow network.
"""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, cast

from megaspeed.analysis.costs.workload import Cluster
from megaspeed.analysis.planning.forecast import forecast
from megaspeed.config.document import JsonSyntaxError, read_json_object
from megaspeed.config.errors import ConfigError
from megaspeed.config.loading import parse_config
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.config.section import LARGEST_SECONDS
from megaspeed.files.json_values import read_records

CONFIG, METRICS, STARTS = "config.json", "metrics.jsonl", "starts.jsonl"
"""Files of a run's folder (``training/run_folder.py``)."""

WARM_UP_STEPS = 5
"""Steps after each start that do not count, because they allocate memory and choose kernels."""

FEWEST_STEPS = 10
"""Number of steps that a calibration needs."""

_SAME_PEAK = 0.02
"""The peak that follows from MFU and operations a second may differ by this fraction from the peak
in the table."""


class CalibrationError(ConfigError):
    """The folder gives no factor. The text states the reason and the mend."""

    def __init__(self, problem: str) -> None:
        super().__init__([problem], "the calibration")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The factor of one run."""

    folder: Path
    factor: float  # median of the measured steps / predicted
    low: float  # with the first quartile of the measured steps
    high: float  # with the third quartile
    steps: int  # number of measured steps
    measured_seconds: float  # their median
    predicted_seconds: float

    def __str__(self) -> str:
        return (
            f"calibrated by {self.folder}: the median of {self.steps} steps took "
            f"{self.measured_seconds:.3g} s, predicted {self.predicted_seconds:.3g} s, so all "
            f"times are multiplied by {self.factor:.2f} (quartiles {self.low:.2f} to "
            f"{self.high:.2f})"
        )

    def as_json(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return {**vars(self), "folder": str(self.folder)}


def calibrate(folder: Path, cluster: Cluster) -> Calibration:
    """The factor of the run in a folder.

    If the run was restarted, only steps after its last start count, because the layout may have
    changed. Steps with a save, a validation, a profile or a skipped update do not count, and
    neither do the steps after them.

    Args:
        folder: the folder of a run that has trained on such machines.
        cluster: the machines of the plan.

    Raises:
        CalibrationError: the folder has no such run, or too few steps.
    """
    run = _run_of(folder, cluster.device_type)
    begin, starts = _last_start(folder)
    records = list(_steps(folder))
    _check_device(folder, run, cluster, records)
    seconds = list(_counted(run, records, begin))
    if len(seconds) < FEWEST_STEPS:
        since = f" since its last start, after step {begin}" if starts > 1 else ""
        raise CalibrationError(
            f"{folder} has {len(seconds)} steps to measure{since}, but a calibration needs "
            f"{FEWEST_STEPS}; the first {WARM_UP_STEPS} steps, and steps with a save or a "
            "validation, do not count; train more steps, or save less often"
        )
    try:
        predicted = forecast(run, cluster, simulates=True).seconds
    except ValueError as error:
        raise CalibrationError(f"{folder} cannot be predicted: {error}") from error
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Calibration(
        folder=folder,
        factor=median / predicted,
        low=low / predicted,
        high=high / predicted,
        steps=len(seconds),
        measured_seconds=median,
        predicted_seconds=predicted,
    )


def _run_of(folder: Path, device_type: str) -> Run:
    """The run as it was resolved when it started."""
    if not folder.is_dir():
        raise CalibrationError(f"{folder} is not a folder; name the folder of a run")
    try:
        values, _ = read_json_object(folder / CONFIG)
        config = parse_config(values)
        parallel = config.parallel
        if parallel.data == "auto":
            raise CalibrationError(
                f"{folder / CONFIG} does not state parallel.data, so no run has written it; name "
                "the folder of a run (training.run_dir)"
            )
        ranks = parallel.data * parallel.pipeline * parallel.tensor
        return resolve_run(
            config,
            name=folder.name,
            world_size=ranks,
            world_source=str(folder / CONFIG),
            device_type=device_type,
        )
    except JsonSyntaxError as error:
        raise CalibrationError(
            f"{folder} has no configuration of a run: {error}; name the folder of a run "
            "(training.run_dir)"
        ) from error
    except ConfigError as error:
        first = error.problems[0]
        raise CalibrationError(f"{folder / CONFIG} is not valid here: {first}") from error


def _records(file: Path) -> Iterator[dict[str, Any]]:
    """The records with a step, in the order of the file. Damaged lines are omitted."""
    try:
        for record in read_records(file):
            if record is not None and type(record.get("step")) is int:
                yield record
    except OSError as error:
        raise CalibrationError(f"{file} cannot be read: {error.strerror}") from error


def _steps(folder: Path) -> Iterator[dict[str, Any]]:
    file = folder / METRICS
    if not file.is_file():
        raise CalibrationError(
            f"{folder} has no {METRICS}, so no run has started in it; name the folder of a run "
            "(training.run_dir)"
        )
    for record in _records(file):
        seconds = record.get("step_time_seconds")
        if _is_positive(seconds) and seconds < LARGEST_SECONDS:
            yield record


def _last_start(folder: Path) -> tuple[int, int]:
    """The step after which the run last started, and how often it has started.

    Runs before version 0.2 recorded no starts.
    """
    file = folder / STARTS
    steps = [record["step"] for record in _records(file)] if file.is_file() else [0]
    return (steps[-1] if steps else 0), len(steps)


def _check_device(folder: Path, run: Run, cluster: Cluster, records: list[dict[str, Any]]) -> None:
    """Checks the peak of the run's device, which is operations a second / MFU.

    The metrics state no MFU on a CPU, in fp32, and on a GPU whose peak is not known. Devices of the
    same peak, such as H100 and H200, cannot be distinguished.
    """
    device = cluster.device
    rates = ((record.get("tflops_per_rank"), record.get("mfu")) for record in records)
    peaks = [rate / mfu for rate, mfu in rates if _is_positive(rate) and _is_positive(mfu)]
    if not peaks and (cluster.measured is not None or run.precision == "fp32" or not records):
        return
    if not peaks:
        trained = "on a CPU, or on a GPU whose peak is not known"
    else:
        peak = statistics.median(peaks)
        if cluster.measured is None and abs(peak / device.peak_16 - 1) < _SAME_PEAK:
            return
        trained = f"on a GPU with a peak of {peak:.0f} TFLOP/s"
    peak_of_plan = "" if cluster.measured is not None else f" ({device.peak_16:.0f} TFLOP/s)"
    raise CalibrationError(
        f"the run in {folder} trained {trained}, but the plan is for {device.name}{peak_of_plan}; "
        "name a run on the same device"
    )


def _is_positive(value: object) -> TypeGuard[float]:
    return type(value) in (int, float) and 0 < cast(float, value) < math.inf


def _counted(run: Run, records: list[dict[str, Any]], begin: int) -> Iterator[float]:
    """Seconds of the steps that count."""
    training = run.config.training
    profile = training.profile
    intervals = (
        training.save_interval,
        training.eval_interval,
        training.check_replicas_interval,
    )

    def is_disturbed(step: int) -> bool:
        is_profiled = profile is not None and 0 <= step - profile.start_step < profile.steps
        return is_profiled or any(each > 0 and step % each == 0 for each in intervals)

    last = {record["step"]: record for record in records}  # a step may have been repeated
    for step, record in sorted(last.items()):
        if step <= begin + WARM_UP_STEPS or record.get("skipped") is True:
            continue
        if not (is_disturbed(step) or is_disturbed(step - 1)):
            yield record["step_time_seconds"]

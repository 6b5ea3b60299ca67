"""One factor by which a real run's steps differ from their prediction.

    factor = median of the measured steps / predicted step

The run's folder has its resolved configuration and the seconds of each step. The factor holds for
similar runs on the same machines. It includes all effects that the prediction does not know, such
as a slow network.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaspeed.config.document import JsonSyntaxError, read_json_object
from megaspeed.config.errors import ConfigError
from megaspeed.config.loading import parse_config
from megaspeed.config.resolve import Run, resolve_recorded
from megaspeed.config.section import LARGEST_SECONDS
from megaspeed.files.json_values import json_value, read_records
from megaspeed.planning.costs.workload import Cluster
from megaspeed.planning.forecast import forecast
from megaspeed.topology.devices import Device, device_by_name

CONFIG, METRICS, STARTS = "config.json", "metrics.jsonl", "starts.jsonl"
"""Files of a run's folder (``training/run_folder.py``)."""

WARM_UP_STEPS = 5
"""Steps after each start that do not count, because they allocate memory and choose kernels."""

FEWEST_STEPS = 10
"""Number of steps that a calibration needs."""

_PLAUSIBLE = (0.5, 2.0)
"""A factor outside this range has another reason than the machine. The factors of nine of ten
published runs are between 0.87 and 1.15."""


_MEND = "name the folder of a run (training.run_dir)"


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
    device: str | None  # as the run has recorded it; None if it has not

    @property
    def warnings(self) -> tuple[str, ...]:
        """Why the factor may be wrong."""
        return tuple(self._warnings())

    def _warnings(self) -> Iterator[str]:
        low, high = _PLAUSIBLE
        if not low <= self.factor <= high:
            yield (
                f"a factor of {self.factor:.3g} is not plausible: on the same kind of machine it "
                f"is between {low:g} and {high:g}; another program or the network may have slowed "
                "the run, so find out why before you rely on this plan"
            )
        if self.device is None:
            yield (
                f"{self.folder} does not state the device, because a version before 0.3 wrote it; "
                "make sure that the run trained on the device of the plan"
            )

    def __str__(self) -> str:
        return (
            f"calibrated by {self.folder}: the median of {self.steps} steps took "
            f"{self.measured_seconds:.3g} s, predicted {self.predicted_seconds:.3g} s, so all "
            f"times are multiplied by {self.factor:.2f} (quartiles {self.low:.2f} to "
            f"{self.high:.2f})"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return {**json_value(self), "warnings": list(self.warnings)}


def calibrate(folder: Path, cluster: Cluster) -> Calibration:
    """Return the factor of the run in a folder.

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
    begin, starts, device = _last_start(folder)
    seconds = list(_counted(run, _steps(folder), begin))
    if device is not None and not _is_same_kind(device, cluster.device):
        raise CalibrationError(
            f"the run in {folder} trained on {device}, but the plan is for {cluster.device.name}; "
            "name a run on the same device"
        )
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
        device=device,
    )


def _run_of(folder: Path, device_type: str) -> Run:
    """Return the run as it was resolved when it started."""
    file = folder / CONFIG
    try:
        values, _ = read_json_object(file)
        config = parse_config(values)
        run = resolve_recorded(config, name=folder.name, source=str(file), device_type=device_type)
    except JsonSyntaxError as error:
        raise CalibrationError(f"{error}; {_MEND}") from error
    except ConfigError as error:
        raise CalibrationError(f"{file} is not valid here: {error.problems[0]}") from error
    if run is None:
        raise CalibrationError(
            f"{file} does not state parallel.data, so no run has written it; {_MEND}"
        )
    return run


def _records(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the records with a step, in the order of the file. Damaged lines are omitted."""
    try:
        for record in read_records(file):
            if record is not None and type(record.get("step")) is int:
                yield record
    except OSError as error:
        raise CalibrationError(f"{file} cannot be read: {error.strerror}; {_MEND}") from error


def _steps(folder: Path) -> dict[int, dict[str, Any]]:
    """Return each step -> its last record, because a step may have been repeated."""
    steps = {}
    for record in _records(folder / METRICS):
        seconds: Any = record.get("step_time_seconds")
        if type(seconds) in (int, float) and 0 < seconds < LARGEST_SECONDS:
            steps[record["step"]] = record
    return steps


def _last_start(folder: Path) -> tuple[int, int, str | None]:
    """Return the step after which the run last started, how often it has started, and its device.

    Runs before version 0.2 recorded no starts, and before 0.3 no device.
    """
    file = folder / STARTS
    starts = list(_records(file)) if file.is_file() else []
    last = starts[-1] if starts else {"step": 0}
    device = last.get("device")
    return last["step"], len(starts), device if isinstance(device, str) else None


def _is_same_kind(recorded: str, planned: Device) -> bool:
    """Return whether a device is of the planned kind.

    The driver's name does not always show the memory, so that may differ.
    """
    known = device_by_name(recorded)
    if known is None:
        return planned.name == recorded
    kinds = [(device.name.partition("-")[0], device.peak_16) for device in (known, planned)]
    return kinds[0] == kinds[1]


def _counted(run: Run, records: dict[int, dict[str, Any]], begin: int) -> Iterator[float]:
    """Yield the seconds of the steps that count."""
    training = run.config.training
    profile = training.profile
    intervals = (training.save_interval, training.eval_interval, training.check_replicas_interval)

    def is_disturbed(step: int) -> bool:
        is_profiled = profile is not None and 0 <= step - profile.start_step < profile.steps
        return is_profiled or any(each > 0 and step % each == 0 for each in intervals)

    for step, record in sorted(records.items()):
        if step <= begin + WARM_UP_STEPS or record.get("skipped") is True:
            continue
        if not (is_disturbed(step) or is_disturbed(step - 1)):
            yield record["step_time_seconds"]

"""Reads a run folder, even while the run is still writing to it.

A line that cannot be read is skipped and counted. A run that was killed may leave half a line, and
a run that is still training may have written only half of the next one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megaspeed.analysis.planning.prediction import ideal_bubble, predict_busiest, predict_peaks
from megaspeed.config.errors import ConfigError
from megaspeed.config.loading import parse_config
from megaspeed.config.resolve import Run, resolve_run
from megaspeed.config.strict_json import JsonSyntaxError, read_json_object
from megaspeed.training.metrics import read_records
from megaspeed.training.run_folder import CONFIG, METRICS, PARTS, STARTS

_LARGEST, _LARGEST_STEP = 1e100, 10**12
"""A record with larger values is damaged. Sums and axes would overflow."""


class RunFolderError(ValueError):
    """A folder is not a run folder; the message names it."""


class Recorded(NamedTuple):
    """A step or a validation, as in metrics.jsonl; None if missing or not finite.

    A tuple, because a run may have a million steps.
    """

    loss: Any = None
    grad_norm: Any = None
    learning_rate: Any = None
    tokens: Any = None
    step_time_seconds: Any = None
    tokens_per_second: Any = None
    tflops_per_rank: Any = None
    mfu: Any = None
    skipped: Any = None
    peak_memory_bytes: tuple[float, ...] = ()  # by pipeline stage
    validation_loss: Any = None
    validation_perplexity: Any = None


_NUMBERS = tuple(name for name in Recorded._fields if name != "peak_memory_bytes")


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a run.

    Attributes:
        step: the step after which it continued; 0 for a new run.
        time: in ISO 8601, with the time zone.
        layout: such as "pp 2 x dp 2 x tp 1, ZeRO-3".
    """

    step: int
    time: str
    layout: str


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run.

    Attributes:
        folder: the run folder.
        steps: step -> what was recorded, in ascending order. Values are finite numbers, booleans or
            None.
        validations: the same for evaluations.
        parts: step -> part -> seconds, of the steps that were timed.
        starts: in order of time; empty for runs before version 0.2.
        config: the resolved configuration; empty if it cannot be read.
        notes: what could not be read, one sentence each.
    """

    folder: Path
    steps: Mapping[int, Recorded]
    validations: Mapping[int, Recorded]
    parts: Mapping[int, Mapping[str, float]]
    starts: tuple[Start, ...]
    config: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def last_step(self) -> int:
        """The last recorded step; 0 if there is none yet."""
        return max(self.steps, default=0)

    @property
    def planned_steps(self) -> int | None:
        """``training.steps``; None if the configuration cannot be read."""
        training = self.config.get("training")
        steps = training.get("steps") if isinstance(training, dict) else None
        return steps if isinstance(steps, int) else None


def read_run(folder: Path) -> RunRecord:
    """The run of that folder.

    Raises:
        RunFolderError: the folder has no metrics.jsonl, or it cannot be read.
    """
    file = folder / METRICS
    if not folder.is_dir():
        raise RunFolderError(f"{folder} is not a folder; name the folder of a run")
    if not file.is_file():
        raise RunFolderError(
            f"{folder} holds no {METRICS}, so it is not the folder of a run that has started; name "
            "one that has (training.run_dir, by default runs/<config name>)"
        )
    notes: list[str] = []
    steps: dict[int, Recorded] = {}
    validations: dict[int, Recorded] = {}
    peaks: tuple[float, ...] = ()
    for record in _records(file, notes):
        step = record.get("step")
        if isinstance(step, int) and not isinstance(step, bool) and 0 < step < _LARGEST_STEP:
            found = _recorded(record, peaks)
            peaks = found.peak_memory_bytes or peaks
            (validations if "validation_loss" in record else steps)[step] = found
    return RunRecord(
        folder=folder,
        steps=dict(sorted(steps.items())),
        validations=dict(sorted(validations.items())),
        parts=dict(sorted(dict(_parts(folder / PARTS, notes)).items())),
        starts=tuple(_starts(folder / STARTS, notes)),
        config=_config(folder / CONFIG, notes),
        notes=tuple(notes),
    )


def number(value: object) -> float | None:
    """A number of a record as a float; None if it is anything else, or too large to be drawn."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -_LARGEST < value < _LARGEST else None


def _records(file: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    unreadable = 0
    try:
        for record in read_records(file):
            if record is None:
                unreadable += 1
            else:
                yield record
    except OSError as error:
        raise RunFolderError(f"{file} cannot be read: {error.strerror}") from error
    if unreadable:
        notes.append(f"{unreadable:,} of the lines of {file.name} are not records and were skipped")


def _recorded(record: Mapping[str, Any], last_peaks: tuple[float, ...]) -> Recorded:
    """The values of a record that are numbers or booleans. Equal peaks share one tuple."""
    listed = record.get("peak_memory_bytes")
    numbers = map(number, listed) if isinstance(listed, list) else ()
    peaks = tuple(each for each in numbers if each is not None)
    values = {name: _sound(record[name]) for name in _NUMBERS if name in record}
    return Recorded(**values, peak_memory_bytes=last_peaks if peaks == last_peaks else peaks)


def _sound(value: object) -> Any:
    return value if isinstance(value, bool) or number(value) is not None else None


def _parts(file: Path, notes: list[str]) -> Iterator[tuple[int, dict[str, float]]]:
    for record in _records(file, notes) if file.is_file() else ():
        step, seconds = record.get("step"), record.get("parts_seconds")
        if isinstance(step, int) and 0 < step < _LARGEST_STEP and isinstance(seconds, dict):
            numbers = {name: number(value) for name, value in seconds.items()}
            yield step, {name: value for name, value in numbers.items() if value is not None}


def _starts(file: Path, notes: list[str]) -> Iterator[Start]:
    if not file.is_file():
        return
    for record in _records(file, notes):
        step = record.get("step")
        if isinstance(step, int) and 0 <= step < _LARGEST_STEP:
            degrees = " x ".join(f"{axis} {record.get(axis, '?')}" for axis in ("pp", "dp", "tp"))
            yield Start(
                step=step,
                time=str(record.get("time", "")),
                layout=f"{degrees}, ZeRO-{record.get('zero_stage', '?')}",
            )


def _config(file: Path, notes: list[str]) -> dict[str, Any]:
    try:
        if not file.is_file():
            raise JsonSyntaxError(f"{file} is not there")
        config, _ = read_json_object(file)
    except JsonSyntaxError as error:
        notes.append(f"no configuration: {error}")
        return {}
    return config


# Predictions for a run, from the configuration in its folder.


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """The predictions for one run.

    Attributes:
        run: the run, resolved again from its configuration.
        bubble: the share of a step in which pipeline stages of equal cost wait for each other.
        sent_bytes: axis -> bytes that the busiest rank sends in a step.
        peak_bytes: peak memory of a rank, for each pipeline stage.
    """

    run: Run
    bubble: float
    sent_bytes: Mapping[str, int]
    peak_bytes: tuple[int, ...]


def predictions_of(config: Mapping[str, Any], name: str) -> Predictions | None:
    """Predicts from a configuration; None if this version does not accept it."""
    try:
        parsed = parse_config(config)
        parallel = parsed.parallel
        if not isinstance(parallel.data, int):
            return None
        world_size = parallel.data * parallel.pipeline * parallel.tensor
        run = resolve_run(
            parsed,
            name=name,
            world_size=world_size,
            world_source="config.json",
            device_type="cuda",
        )
    except (ConfigError, OSError):
        return None
    sent: dict[str, int] = {}
    for (axis, _), number in predict_busiest(run).items():
        sent[axis] = sent.get(axis, 0) + number
    return Predictions(
        run=run, bubble=ideal_bubble(run), sent_bytes=sent, peak_bytes=tuple(predict_peaks(run))
    )

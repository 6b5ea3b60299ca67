"""Reads run folders, even while runs write to them, and finds where two runs differ.

A line that cannot be read is skipped and counted. A run that was killed or is still training may
have left an incomplete line.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megaspeed.config.document import JsonSyntaxError, read_json_object
from megaspeed.data.errors import DataError
from megaspeed.files.json_values import leaves, read_records
from megaspeed.training.run_folder import CONFIG, METRICS, PARTS, STARTS

_LARGEST, _LARGEST_STEP = 1e100, 10**12
"""A larger value is treated as damaged, because sums and axes would overflow."""


class RunFolderError(DataError):
    """A folder is not a run folder. The message names it."""


class Recorded(NamedTuple):
    """The values of a step or a validation in metrics.jsonl; None if missing or not finite.

    It is a tuple to save memory, because a run may have a million steps.
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
    """One start of a run."""

    step: int  # the step after which it continued; 0 for a new run
    time: str  # in ISO 8601, with the time zone
    layout: str  # such as "pp 2 x dp 2 x tp 1, ZeRO-3"


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run."""

    folder: Path
    # Step -> what was recorded, in ascending order. Values are finite numbers, booleans or None.
    steps: Mapping[int, Recorded]
    validations: Mapping[int, Recorded]  # the same for evaluations
    # Step -> part of a step -> seconds, for steps that were timed.
    parts: Mapping[int, Mapping[str, float]]
    starts: tuple[Start, ...]  # in order of time; empty for runs before version 0.2
    config: Mapping[str, Any]  # the resolved configuration; empty if it cannot be read
    notes: tuple[str, ...]  # what could not be read, one sentence each

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
            f"{folder} has no {METRICS}, so no run has started in it; name the folder of a run "
            "that has started (training.run_dir, by default runs/<config name>)"
        )
    notes: list[str] = []
    steps: dict[int, Recorded] = {}
    validations: dict[int, Recorded] = {}
    peaks: tuple[float, ...] = ()
    for step, record in _records(file, notes):
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
    """A number as a float; None if the value is anything else, or too large to draw."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -_LARGEST < value < _LARGEST else None


def _records(
    file: Path, notes: list[str], first_step: int = 1
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The step and the record of each line. Skips lines without a step of the run."""
    unreadable = 0
    try:
        for record in read_records(file):
            if record is None:
                unreadable += 1
                continue
            step = record.get("step")
            if type(step) is int and first_step <= step < _LARGEST_STEP:
                yield step, record
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
    for step, record in _records(file, notes) if file.is_file() else ():
        seconds = record.get("parts_seconds")
        if isinstance(seconds, dict):
            numbers = {name: number(value) for name, value in seconds.items()}
            yield step, {name: value for name, value in numbers.items() if value is not None}


def _starts(file: Path, notes: list[str]) -> Iterator[Start]:
    for step, record in _records(file, notes, first_step=0) if file.is_file() else ():
        degrees = " x ".join(f"{axis} {record.get(axis, '?')}" for axis in ("pp", "dp", "tp"))
        yield Start(
            step=step,
            time=str(record.get("time", "")),
            layout=f"{degrees}, ZeRO-{record.get('zero_stage', '?')}",
        )


def _config(file: Path, notes: list[str]) -> dict[str, Any]:
    try:
        if not file.is_file():
            raise JsonSyntaxError(f"{file} does not exist")
        config, _ = read_json_object(file)
    except JsonSyntaxError as error:
        notes.append(f"no configuration: {error}")
        return {}
    return config


QUANTITIES = (
    "tokens",
    "learning_rate",
    "loss",
    "grad_norm",
    "skipped",
    "validation_loss",
    "validation_perplexity",
)
"""The compared quantities, causes before effects. Times and memory are not compared, because
they always differ."""

_EXACT = frozenset({"tokens", "skipped"})


@dataclass(frozen=True, kw_only=True)
class Parting:
    """The first step at which a quantity differs by more than the tolerance."""

    step: int
    quantity: str  # its name in metrics.jsonl
    # In the first run and in the second; None is a number that is not finite.
    values: tuple[Any, Any]
    relative: float | None  # their difference divided by the larger; None if one is not a number


@dataclass(frozen=True, kw_only=True)
class Missing:
    """Steps or validations that only one of the runs recorded."""

    run: int  # the run without them: 0 for the first, 1 for the second
    quantity: str  # "step" or "validation"
    steps: tuple[int, ...]  # their steps, in ascending order; at least one


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """Two runs side by side."""

    common_steps: int  # number of steps that both recorded
    # Steps and validations that only one run recorded, from the first step of the later run to the
    # last step of the shorter run.
    missing: tuple[Missing, ...]
    # The first difference of each quantity that differs, in the order of steps.
    partings: tuple[Parting, ...]
    largest: Mapping[str, float]  # quantity -> largest relative difference over common steps
    # Keys whose values differ: key, value in the first run, value in the second.
    config: tuple[tuple[str, str, str], ...]

    @property
    def equal(self) -> bool:
        """Whether no quantity differs and nothing is missing."""
        return not self.partings and not self.missing

    def as_json(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        return {"equal": self.equal, **asdict(self)}


def compare_runs(one: RunRecord, two: RunRecord, tolerance: float) -> RunComparison:
    """Compares the steps that both runs recorded.

    Relative differences up to ``tolerance`` count as equal. Tokens and skipped steps must be the
    same.
    """
    partings: dict[str, Parting] = {}
    largest: dict[str, float] = {}
    for of_one, of_two in ((one.steps, two.steps), (one.validations, two.validations)):
        for step in sorted(of_one.keys() & of_two.keys()):
            for parting in _differences(step, of_one[step], of_two[step]):
                if parting.relative is not None:
                    before = largest.get(parting.quantity, 0.0)
                    largest[parting.quantity] = max(before, parting.relative)
                allowed = 0.0 if parting.quantity in _EXACT else tolerance
                if parting.relative is None or parting.relative > allowed:
                    partings.setdefault(parting.quantity, parting)
    return RunComparison(
        common_steps=len(one.steps.keys() & two.steps.keys()),
        missing=tuple(_missing(one, two)),
        # sorted is stable, so within a step the order of QUANTITIES is kept.
        partings=tuple(
            sorted(
                (partings[name] for name in QUANTITIES if name in partings),
                key=lambda parting: parting.step,
            )
        ),
        largest=largest,
        config=tuple((key, values[0], values[1]) for key, values in config_differences([one, two])),
    )


def _missing(one: RunRecord, two: RunRecord) -> Iterator[Missing]:
    begin = max(min(run.steps, default=0) for run in (one, two))
    end = min(one.last_step, two.last_step)
    # A run validates at its end, so only a run that has ended has a validation at its last step.
    end_of_validations = end if one.last_step == two.last_step else end - 1
    for run, (lacking, having) in enumerate(((one, two), (two, one))):
        for quantity, lacked, had, last in (
            ("step", lacking.steps, having.steps, end),
            ("validation", lacking.validations, having.validations, end_of_validations),
        ):
            steps = tuple(s for s in had if begin <= s <= last and s not in lacked)
            if steps:
                yield Missing(run=run, quantity=quantity, steps=steps)


def _differences(step: int, one: Recorded, two: Recorded) -> Iterator[Parting]:
    for name in QUANTITIES:
        values = getattr(one, name), getattr(two, name)
        if values[0] == values[1]:
            continue
        a, b = (number(float(v) if isinstance(v, bool) else v) for v in values)
        relative = None if a is None or b is None else abs(a - b) / max(abs(a), abs(b))
        yield Parting(step=step, quantity=name, values=values, relative=relative)


def config_differences(runs: Sequence[RunRecord]) -> Iterator[tuple[str, list[str]]]:
    """Each key whose values differ among the runs, with its value in each run; "-" if missing."""
    flat = [{key: json.dumps(value) for key, value in leaves(run.config)} for run in runs]
    for settings in flat:
        settings.pop("training.run_dir", None)  # always differs
    for key in sorted(set().union(*flat)):
        values = [settings.get(key, "-") for settings in flat]
        if len(set(values)) > 1:
            yield key, values

"""Read run folders, even while runs write to them, and find where two runs differ.

    metrics.jsonl, a line for each step   {"step": 7, "loss": 3.2, "peak_memory_bytes": [5, 4], ...}
    curves, by name                       loss: steps [..., 7], values [..., 3.2]
                                          peak_memory_bytes/0: steps [..., 7], values [..., 5.0]

If a run was resumed with another pipeline degree, only the peaks since then are kept.

A line that cannot be read is skipped and counted. A run that was killed or is still training may
have left an incomplete line.
"""

import json
import re
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megaspeed.checkpoint.folders import METRICS
from megaspeed.config.document import JsonSyntaxError, read_json_object
from megaspeed.data.errors import DataError
from megaspeed.files.json_values import leaves, read_records
from megaspeed.job import run_folder
from megaspeed.training.profile import PROFILE

_LARGEST, _LARGEST_STEP = 1e100, 10**12
"""A larger value is treated as damaged, because sums and axes would overflow."""

_COMPARED = ("tokens", "learning_rate", "loss", "grad_norm", "skipped")
_OF_STEPS = (
    *(*_COMPARED, "step_time_seconds", "tokens_per_second", "z_loss"),
    *("spike", "train_batch_size"),
)
_OF_VALIDATIONS = ("validation_loss", "validation_perplexity")

QUANTITIES = (*_COMPARED, *_OF_VALIDATIONS)
"""The compared quantities, causes before effects. Times and memory are not compared, because
they always differ."""

_EXACT = {"tokens": int, "skipped": bool}
"""The quantities that must be the same, with the type of their values in metrics.jsonl."""


class RunFolderError(DataError):
    """A folder is not a run folder. The message names it."""


class Curve(NamedTuple):
    """One quantity of a run."""

    steps: np.ndarray  # at which it was recorded, in ascending order
    values: np.ndarray  # as float64; NaN if missing, not a number or not finite


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run."""

    folder: Path
    # By name. A list has a curve for each number: "peak_memory_bytes/0" for pipeline stage 0.
    curves: Mapping[str, Curve]
    starts: Sequence[Mapping[str, Any]]  # the lines of starts.jsonl, in order of time
    config: Mapping[str, Any]  # the resolved configuration; empty if it cannot be read
    notes: Sequence[str]  # what could not be read, one sentence each
    # (blocks, experts): loads of the last timed step; None if there are none
    loads: np.ndarray | None = None
    # (number of a prompt, its text) -> step -> continuation. The last prompts come last.
    samples: Mapping[tuple[int, str], Mapping[int, str]] = field(default_factory=dict)

    @property
    def steps(self) -> np.ndarray:
        return self.curves["loss"].steps

    @property
    def last_step(self) -> int:
        """The last recorded step; 0 if there is none yet."""
        return int(self.steps.max(initial=0))

    @property
    def resumptions(self) -> list[int]:
        """The steps after which it was resumed."""
        return [start["step"] for start in self.starts if start["step"] > 0]

    @property
    def profile(self) -> Path | None:
        """The table of the last profile; its picture has the same name and the suffix .png."""
        files = filter(Path.is_file, (self.folder / PROFILE).glob("steps-*.txt"))
        by_steps = {tuple(map(int, re.findall(r"[0-9]+", file.name))): file for file in files}
        return by_steps[max(by_steps)] if by_steps else None

    def names_of(self, *beginnings: str) -> list[str]:
        """Return the names of the curves that begin with any of these."""
        return [name for name in self.curves if name.startswith(beginnings)]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The values of the configuration, by dotted key."""
        return dict(leaves(self.config))


def read_run(folder: Path) -> RunRecord:
    """Read the run of that folder.

    Raises RunFolderError if the folder has no metrics.jsonl, or it cannot be read.
    """
    file = folder / METRICS
    if not folder.is_dir():
        raise RunFolderError(f"{folder} is not a folder; name the folder of a run")
    if not file.is_file():
        raise RunFolderError(
            f"{folder} has no {file.name}, so no run has started in it; name the folder of a run "
            "that has started (training.run_dir, by default runs/<config name>)"
        )
    notes: list[str] = []
    config: dict[str, Any] = {}
    loads: np.ndarray | None = None
    points: dict[str, tuple[array[int], array[float]]]
    points = defaultdict(lambda: (array("q"), array("d")))
    samples = defaultdict[tuple[int, str], dict[int, str]](dict)
    stages = 0
    for step, record in _records(file, notes):
        peaks = record.get("peak_memory_bytes")
        if isinstance(peaks, list) and peaks and len(peaks) != stages:
            # Resumed with another pipeline degree: the peaks so far are those of other stages.
            for stage in range(stages):
                points.pop(f"peak_memory_bytes/{stage}", None)
            stages = len(peaks)
        for sample in _samples(record):
            samples[sample[:2]][step] = sample[2]
        for name, value in _values(record):
            points[name][0].append(step)
            points[name][1].append(_number(value))
    starts = [start for _, start in _records(folder / run_folder.STARTS, notes, first_step=0)]
    try:
        config, _ = read_json_object(folder / run_folder.CONFIG)
    except JsonSyntaxError as error:
        notes.append(f"no configuration: {error}")
    with suppress(OSError, ValueError, KeyError, TypeError):  # an older run has none
        read = np.array(json.loads((folder / run_folder.LOADS).read_text())["loads"], float)
        loads = read if read.ndim == 2 and read.size and np.isfinite(read).all() else None
    names = (*_OF_STEPS, *_OF_VALIDATIONS, *points)
    curves = {name: _curve(*points[name]) for name in names}
    return RunRecord(
        folder=folder,
        curves=curves,
        starts=starts,
        config=config,
        notes=notes,
        loads=loads,
        samples=samples,
    )


def _records(
    file: Path, notes: list[str], first_step: int = 1
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the step and the record of each line. Skips lines without a step of the run."""
    if not file.is_file():
        return
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


def _values(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of a record by the name of their curve."""
    if "samples" in record:
        return
    is_step, peaks = "validation_loss" not in record, record.get("peak_memory_bytes")
    for name in _OF_STEPS if is_step else _OF_VALIDATIONS:
        yield name, record.get(name)
    if is_step and isinstance(peaks, list):
        yield from ((f"peak_memory_bytes/{stage}", peak) for stage, peak in enumerate(peaks))
    if isinstance(factors := record.get("load_factors"), list):
        yield "auxiliary_loss", record.get("auxiliary_loss")
        yield "load_factor", max(map(_number, factors), default=None)


def _samples(record: Mapping[str, Any]) -> Iterator[tuple[int, str, str]]:
    """Yield the number of each prompt, its text and its continuation."""
    samples = record.get("samples")
    for number, sample in enumerate(samples if isinstance(samples, list) else ()):
        match sample:
            case [str(prompt), str(continuation)]:
                yield number, prompt, continuation


def _number(value: object) -> float:
    if isinstance(value, int | float) and -_LARGEST < value < _LARGEST:
        return float(value)
    return float("nan")


def _curve(steps: Sequence[int], values: Sequence[float]) -> Curve:
    """Sort by step. The last record of a step counts."""
    ascending, first = np.unique(np.array(steps, np.int64)[::-1], return_index=True)
    return Curve(ascending, np.array(values, np.float64)[::-1][first])


def compare_runs(one: RunRecord, two: RunRecord, tolerance: float) -> dict[str, Any]:
    """Compare the steps that both runs recorded.

    Relative differences up to ``tolerance`` count as equal. Tokens and skipped steps must be the
    same.

    Returns:
        What ``compare-runs --json`` writes:

        equal         whether no quantity differs
        common_steps  number of steps that both recorded
        partings      the first difference of each quantity that differs, in the order of steps: a
                      list of {"step", "quantity", "values" (of both), "relative"}. A value is None
                      if it is not a finite number, and then the relative difference is None, too
        config        keys with different values: a list of [key, value in one, value in two]
    """
    partings = []
    for name in QUANTITIES:
        steps, a, b = _differing(one.curves[name], two.curves[name])
        relative = np.abs(a - b) / np.maximum(np.abs(a), np.abs(b))
        is_within = relative <= (0.0 if name in _EXACT else tolerance)  # false for NaN
        for first in np.flatnonzero(~is_within)[:1]:
            partings.append(
                {
                    "step": int(steps[first]),
                    "quantity": name,
                    "values": [_recorded(name, value) for value in (a[first], b[first])],
                    "relative": _recorded("", relative[first]),
                }
            )
    return {
        "equal": not partings,
        "common_steps": len(np.intersect1d(one.steps, two.steps)),
        # sorted is stable, so within a step the order of QUANTITIES is kept.
        "partings": sorted(partings, key=lambda parting: parting["step"]),
        "config": [[key, *values] for key, values in config_differences([one, two])],
    }


def _differing(one: Curve, two: Curve) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the common steps with different values, and the values of both."""
    steps, in_one, in_two = np.intersect1d(one.steps, two.steps, return_indices=True)
    a, b = one.values[in_one], two.values[in_two]
    differs = ~np.isclose(a, b, rtol=0, atol=0, equal_nan=True)
    return steps[differs], a[differs], b[differs]


def _recorded(name: str, value: float) -> Any:
    """Return a value as metrics.jsonl has it."""
    return None if np.isnan(value) else _EXACT.get(name, float)(value)


def config_differences(runs: Sequence[RunRecord]) -> Iterator[tuple[str, list[str]]]:
    """Yield each key whose values differ, with its value in each run; "-" if missing."""
    for key in sorted(set().union(*(run.settings for run in runs)) - {"training.run_dir"}):
        values = [json.dumps(run.settings[key]) if key in run.settings else "-" for run in runs]
        if len(set(values)) > 1:
            yield key, values

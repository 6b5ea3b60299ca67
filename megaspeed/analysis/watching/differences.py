"""Where two runs differ: the first step and quantity, and the keys of their configurations."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megaspeed.analysis.watching.record import Recorded, RunRecord, number
from megaspeed.files.json_values import leaves

QUANTITIES = (
    "tokens",
    "learning_rate",
    "loss",
    "grad_norm",
    "skipped",
    "validation_loss",
    "validation_perplexity",
)
"""Quantities that training determines, causes first. (Times and memory always differ.)"""

_EXACT = frozenset({"tokens", "skipped"})


@dataclass(frozen=True, kw_only=True)
class Parting:
    """The first step at which a quantity differs by more than the tolerance.

    Attributes:
        step: the step.
        quantity: its name in metrics.jsonl.
        values: in the first run and in the second; None is a number that is not finite.
        relative: their difference divided by the larger; None if one is not a number.
    """

    step: int
    quantity: str
    values: tuple[Any, Any]
    relative: float | None


@dataclass(frozen=True, kw_only=True)
class Missing:
    """What one run did not record, and the other did.

    Attributes:
        run: 0 if the first run lacks it, 1 if the second does.
        quantity: "step" or "validation".
        steps: of which steps, in ascending order; at least one.
    """

    run: int
    quantity: str
    steps: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """Two runs side by side.

    Attributes:
        common_steps: number of steps that both recorded.
        missing: steps and validations that only one run recorded, from where the later run begins
            to where the shorter one ends.
        partings: the first difference of each quantity that differs, in the order of steps.
        largest: quantity -> the largest relative difference over all common steps.
        config: keys whose values differ: key, value in the first run, value in the second.
    """

    common_steps: int
    missing: tuple[Missing, ...]
    partings: tuple[Parting, ...]
    largest: Mapping[str, float]
    config: tuple[tuple[str, str, str], ...]

    @property
    def equal(self) -> bool:
        """Whether no quantity differs and nothing is missing."""
        return not self.partings and not self.missing

    def as_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {"equal": self.equal, **asdict(self)}


def compare_runs(one: RunRecord, two: RunRecord, tolerance: float) -> RunComparison:
    """Compares the steps that both recorded.

    Args:
        one: the first run.
        two: the second run.
        tolerance: largest relative difference that counts as equal; tokens and skipped steps must
            be the same.
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
    # After its last step a run is validated in any case, and a run under way not yet.
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
    """Each key whose values differ among the runs, with its value in each; "-" if missing."""
    flat = [{key: json.dumps(value) for key, value in leaves(run.config)} for run in runs]
    for settings in flat:
        settings.pop("training.run_dir", None)  # always differs
    for key in sorted(set().union(*flat)):
        values = [settings.get(key, "-") for settings in flat]
        if len(set(values)) > 1:
            yield key, values

"""Predictions for a run, from the configuration in its folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megaspeed.analysis.planning.prediction import ideal_bubble, predict_busiest, predict_peaks
from megaspeed.config.errors import ConfigError
from megaspeed.config.loading import parse_config
from megaspeed.config.resolve import Run, resolve_run


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

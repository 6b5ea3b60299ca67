"""The longest sequence that fits at each degree of the axes."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from megaspeed.config.errors import ConfigError
from megaspeed.config.section import LARGEST_LENGTH
from megaspeed.files.json_values import picked
from megaspeed.planning.costs.workload import Cluster
from megaspeed.planning.prediction import predict
from megaspeed.planning.variants import Settings, Training, degrees_of, verdict_of

_LENGTH_UNIT = 1024


@dataclass(frozen=True, kw_only=True)
class LongestSequence:
    """The longest sequence that fits at some degrees."""

    settings: Settings
    tokens: int
    peak_bytes: int  # predicted peak of the tensors of the fullest rank

    def as_json(self) -> dict[str, Any]:
        return {
            **picked(self.settings, "pp", "dp", "cp", "tp"),
            **picked(self, "tokens", "peak_bytes"),
        }


def longest_sequences(
    training: Training, cluster: Cluster, show: Callable[[float], object] = lambda done: None
) -> list[LongestSequence]:
    """Return the longest sequence that fits for each (pp, dp, cp, tp), the longest first.

    ``show`` is called with the part of the work that is done, from 0 to 1.

    A micro-batch is one sequence. A step has as many as configured, or one for each pipeline stage
    if this is more. All other settings are those of the run. Lengths are multiples of what the
    degrees need and, with rotary positions, of 1,024. Learned positions have a table, whose length
    is the limit.
    """
    count = training.run.batch.gradient_accumulation_steps
    degrees = list(degrees_of(training, cluster.gpus_per_node))
    found: list[LongestSequence] = []
    for pp, dp, cp, tp in degrees:
        show(len(found) / len(degrees))
        own = replace(training.settings, pp=pp, dp=dp, cp=cp, tp=tp, micro_batch_size=1)
        found.append(_longest_sequence(training, own, max(count, pp), cluster))
    fitting = [each for each in found if each.tokens]
    return sorted(fitting, key=lambda each: (-each.tokens, each.settings.degrees))


def _longest_sequence(
    training: Training, settings: Settings, micro_batches: int, cluster: Cluster
) -> LongestSequence:
    """Return the longest sequence with these settings; of 0 tokens if none fits."""
    model, peaks = training.run.config.model, {0: 0}
    unit, longest = 2 * settings.cp * settings.tp, model.max_position_embeddings
    if model.positions == "rotary":
        unit, longest = lcm(_LENGTH_UNIT, unit), LARGEST_LENGTH

    def is_too_long(units: int) -> bool:
        try:
            run = training.at_length(settings, units * unit, micro_batches)
        except ConfigError:
            return True
        peaks[units] = predict(run, training.device_type).fullest.peak_bytes
        return verdict_of(run, peaks[units], cluster) != "fits"

    # Memory grows with the length.
    units = bisect_left(range(1, longest // unit + 1), True, key=is_too_long)
    return LongestSequence(settings=settings, tokens=units * unit, peak_bytes=peaks[units])

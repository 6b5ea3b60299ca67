"""All rows of a comparison: whether their losses agree, and the row to use here.

    tied    slower than the fastest row by less than the noise (``measurement/turns.py``)

The verdict is the row to use here:

1. The candidates are the rows of megaspeed's ZeRO that trained and fit into the memory of a rank.
2. Those that are tied with the fastest candidate remain; if the noise is not known, all remain.
3. Of these, the row with the lowest peak is recommended. If several peaks are within 5 % of the
   lowest one, the row among these that sends the fewest bytes is recommended, and of several, the
   one with the lowest stage.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megaspeed.config.resolve import Run
from megaspeed.measurement.compare.rows import ComparedRow
from megaspeed.measurement.turns import Result, noise_of
from megaspeed.measurement.verification.comparison import TOLERANCES, relative_difference
from megaspeed.units import readable_memory, three_digits

_SIMILAR = 1.05


@dataclass(frozen=True, kw_only=True)
class ComparisonResult(Result[ComparedRow]):
    """All rows of one run."""

    run: Run  # the layout, model, data and batch that the rows share

    @property
    def watched(self) -> list[ComparedRow]:
        """Those whose memory and traffic are known."""
        return [row for row in self.done if row.watched]

    @property
    def disagreements(self) -> list[str]:
        """Each row whose last loss differs from the first row's, with both numbers.

        If the first row's loss is not finite, only this is reported. With compressed gradients,
        losses agree only approximately, so they must only be finite.
        """
        if not self.done:
            return []
        first = self.done[0]
        if not math.isfinite(first.loss):
            return [
                f"{first.label} has loss {first.loss:.9g}, so no row can agree with it; lower the "
                "learning rate or lengthen the warmup"
            ]
        allowed = TOLERANCES["fp32" if self.run.precision == "fp32" else "bf16"].loss
        if self.run.config.parallel.gradient_compression != "none":
            allowed = math.inf
        return [
            f"{row.label}: loss {row.loss:.9g}, but {first.label} has {first.loss:.9g}; the "
            f"relative difference is {difference:.1e}, but only {allowed:.0e} is allowed in "
            f"{self.run.precision}"
            for row in self.done
            # "not <=" instead of ">", because NaN must not agree.
            if not (difference := relative_difference(row.loss, first.loss)) <= allowed
        ]

    @property
    def succeeded(self) -> bool:
        """Whether no row failed, all figures are known, and all losses are the same."""
        return super().succeeded and not self.disagreements

    @property
    def noise(self) -> float | None:
        """The relative difference of two rows' steps that chance explains; None if not known."""
        return noise_of([row.turn_seconds for row in self.done])

    def slower(self, row: ComparedRow, than: ComparedRow) -> float:
        """Return how much longer a row's step takes in the same turns, as a fraction."""
        pairs = zip(row.turn_seconds, than.turn_seconds, strict=False)
        return statistics.geometric_mean(a / b for a, b in pairs) - 1

    def is_tied(self, row: ComparedRow, fastest: ComparedRow) -> bool:
        """Return whether the noise explains by how much a row is slower."""
        return self.noise is None or self.slower(row, fastest) <= self.noise


def verdict(result: ComparisonResult) -> str:
    """Return one sentence with figures: the recommended row, or why no row can be recommended."""
    if result.disagreements:
        return "no row is recommended, because the losses disagree."
    trained = [row for row in result.done if row.engine == "zero"]
    if not trained:
        return "no row is recommended, because no ZeRO row was measured."
    peaks = {row.label: row.peak_bytes for row in trained if row.peak_bytes is not None}
    if not peaks:
        return "no row is recommended, because no row's memory was measured."
    memory = result.device.memory_bytes if result.device is not None else 0
    candidates = [row for row in trained if peaks.get(row.label, math.inf) <= memory]
    if not candidates:
        lowest = min(peaks, key=peaks.__getitem__)
        return (
            f"no row is recommended, because none fits into the {readable_memory(memory)} of a "
            f"rank; {lowest} has the lowest peak, {readable_memory(peaks[lowest])}."
        )
    fastest = min(candidates, key=lambda row: row.step_seconds)
    tied = [row for row in candidates if result.is_tied(row, fastest)]
    lowest_peak = min(peaks[row.label] for row in tied)
    similar = [row for row in tied if peaks[row.label] <= _SIMILAR * lowest_peak]
    best = min(similar, key=lambda row: math.inf if row.sent_bytes is None else row.sent_bytes)
    reasons = [_why(best, tied, peaks[best.label], lowest_peak)]
    too_large = [label for label, peak in peaks.items() if peak > memory]
    if too_large:
        reasons.append(
            f"the peak of {', '.join(too_large)} exceeds the {readable_memory(memory)} of a rank"
        )
    reasons += [
        f"torch's {row.label} is faster, {three_digits(1e3 * row.step_seconds)} ms"
        for row in result.done
        if row.engine != "zero" and not result.is_tied(best, row)
    ]
    return f"use {best.label} here (--set {_settings(best)}): {'; '.join(reasons)}."


def _why(best: ComparedRow, tied: Sequence[ComparedRow], peak: int, lowest_peak: int) -> str:
    if len(tied) == 1:
        return f"it is the fastest row, {three_digits(1e3 * best.step_seconds)} ms a step"
    *labels, last = [row.label for row in tied]
    text = f"{', '.join(labels)} and {last} are tied, and of these {best.label}"
    if peak == lowest_peak:
        return f"{text} has the lowest peak, {readable_memory(peak)}"
    if best.sent_bytes is not None:
        text += f" sends the fewest bytes, {readable_memory(best.sent_bytes)} a step, and"
    return f"{text} has a peak of {readable_memory(peak)} (lowest: {readable_memory(lowest_peak)})"


def _settings(row: ComparedRow) -> str:
    """The settings for ``--set`` that select this row."""
    settings = f"zero_optimization.stage={row.run.zero_stage}"
    if row.label != f"ZeRO-{row.run.zero_stage}":
        settings += f" parallel.gradient_reduction={row.run.gradient_reduction}"
    return settings

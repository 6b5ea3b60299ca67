"""Which row to use at this layout, and why: one sentence.

1. The candidates are the rows of megaspeed's ZeRO that trained and fit into the memory of a rank.
2. The fastest candidate has the shortest median step. A candidate counts as equally fast if the
   quartiles of its step time overlap with those of the fastest.
3. Of the candidates that are equally fast, the row with the lowest peak is recommended. If several
   peaks are within 5 % of the lowest one, the row among these that sends the fewest bytes is
   recommended.
"""

from collections.abc import Iterator, Sequence

from megaspeed.analysis.compare.result import ComparisonResult, Row
from megaspeed.analysis.units import readable_memory

_SIMILAR = 1.05


def verdict(result: ComparisonResult) -> str:
    """One sentence with figures: the recommended row, or why no row can be recommended."""
    if result.disagreements:
        return "no row is recommended, because the losses disagree."
    trained = [row for row in result.done if row.engine == "zero"]
    if not trained:
        return "no row is recommended, because no ZeRO row was measured."
    memory = result.device_memory_bytes
    candidates = [row for row in trained if memory is None or row.peak_bytes <= memory]
    if not candidates:
        lowest = min(trained, key=lambda row: row.peak_bytes)
        return (
            f"no row is recommended, because none fits into the {readable_memory(memory or 0)} of "
            f"a rank; {lowest.label} has the lowest peak, {_peak_text(lowest)}."
        )
    fastest = min(candidates, key=lambda row: row.step_time.median)
    equal = [row for row in candidates if row.step_time.lower <= fastest.step_time.upper]
    lowest = min(equal, key=lambda row: row.peak_bytes)
    similar = [row for row in equal if row.peak_bytes <= _SIMILAR * lowest.peak_bytes]
    best = min(similar, key=lambda row: row.sent_bytes)
    reasons = [_why(best, fastest, lowest, equal), *_limits(best, trained, candidates, result)]
    return f"use {best.label} here (--set {_settings(best)}): {'; '.join(reasons)}."


def _why(best: Row, fastest: Row, lowest: Row, equal: Sequence[Row]) -> str:
    if len(equal) == 1:
        return f"it is the fastest row, with a median step of {_time_text(best)}"
    *labels, last = [row.label for row in equal]
    text = f"{', '.join(labels)} and {last} are equally fast within their spread"
    text += f" ({fastest.label} takes {_time_text(fastest)}"
    text += ")" if best is fastest else f", {best.label} {_time_text(best)})"
    if best is lowest:
        return f"{text}, and of these {best.label} has the lowest peak, {_peak_text(best)}"
    return (
        f"{text}, and of these {best.label} sends the fewest bytes, "
        f"{readable_memory(best.sent_bytes)} a step, at a peak of {_peak_text(best)}, close to the "
        f"lowest, {_peak_text(lowest)}"
    )


def _limits(
    best: Row, trained: Sequence[Row], candidates: Sequence[Row], result: ComparisonResult
) -> Iterator[str]:
    """Limits of the recommendation, which the user should know."""
    too_large = [row.label for row in trained if row not in candidates]
    if too_large:
        memory = readable_memory(result.device_memory_bytes or 0)
        yield f"the peak of {', '.join(too_large)} exceeds the {memory} of a rank"
    for row in result.done:
        if row.engine != "zero" and row.step_time.upper < best.step_time.lower:
            yield f"torch's {row.label} is faster, {_time_text(row)}"
    if result.steps == 2:
        yield "only one step was measured after the first, so the spread is unknown"


def _settings(row: Row) -> str:
    """The settings for ``--set`` that select this row."""
    run = row.run
    assert run is not None
    settings = f"zero_optimization.stage={run.zero_stage}"
    if row.label != f"ZeRO-{run.zero_stage}":
        settings += f" parallel.gradient_reduction={run.gradient_reduction}"
    return settings


def _peak_text(row: Row) -> str:
    return readable_memory(row.peak_bytes)


def _time_text(row: Row) -> str:
    return f"{row.step_time.median_ms} ms (quartiles {row.step_time.quartiles_ms})"

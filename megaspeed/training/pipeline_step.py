"""A measured step of a pipeline, and why it takes longer than the computations of a stage.

    measured --messages and jitter--> steady --imbalance--> equal --bubble--> work

Each arrow removes one cause. ``steady`` is a simulation with free messages, in which a chunk always
takes its mean time. In ``equal``, all chunks take the same time. In ``work``, no stage waits.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from megaspeed.pipeline.picture import Line, Panel, draw
from megaspeed.pipeline.schedules import Backward, Compute, Forward, Pipeline, order_of
from megaspeed.pipeline.simulation import Durations, SimulatedStep, Span, simulate
from megaspeed.topology.activity import Part

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXPOSED = "this much of a box is exposed communication, dp"


class StageTimes(NamedTuple):
    """When a rank computed in a step, in ms. Time 0 is when all ranks had exchanged loss and norm.

    This exchange ends at the same moment on all ranks, so the clocks of machines need not agree.
    """

    begin: float  # of the step
    end: float
    # Of each computation, in order: its start, its end, its exposed communication over dp.
    computes: list[tuple[float, float, float]]

    @classmethod
    def of(cls, intervals: Iterable[tuple[Part, object, float]]) -> "StageTimes":
        """From the intervals of a step. A computation starts when its input has arrived."""
        clock = zero = 0.0
        computes: dict[Compute, tuple[float, float, float]] = {}
        for part, work, seconds in intervals:
            before, clock = clock, clock + 1000 * seconds
            if part == "world":
                zero = clock
            elif isinstance(work, Compute):
                start, _, exposed = computes.get(work, (before, before, 0.0))
                start = clock if part == "pipeline" else start
                exposed += clock - before if part == "data" else 0.0
                computes[work] = (start, clock, exposed)
        times = [(start - zero, end - zero, exposed) for start, end, exposed in computes.values()]
        return cls(-zero, clock - zero, times)


class PipelineStep:
    """A step of one rank of each pipeline stage. Its first forward begins at 0; in ms."""

    def __init__(self, pipeline: Pipeline, stages: Sequence[StageTimes]) -> None:
        zero = min(stage.computes[0][0] for stage in stages)
        spans: list[list[Span[Compute]]] = [[] for _ in stages]
        times = defaultdict[tuple[type[Compute], int], list[float]](list)
        self._pipeline, self._exposed = pipeline, [list[Line]() for _ in stages]
        for index, stage in enumerate(stages):
            computes = zip(order_of(pipeline, index), stage.computes, strict=True)
            for compute, (start, end, exposed) in computes:
                span, chunk = Span(compute, start - zero, end - zero), compute.chunk
                spans[index].append(span)
                times[type(compute), pipeline.virtual(index, chunk)].append(end - start)
                if exposed:
                    line = Line(chunk, span.start, span.start + exposed, EXPOSED)
                    self._exposed[index].append(line)
        forwards, backwards = (
            [statistics.fmean(times[kind, virtual]) for virtual in range(pipeline.virtual_stages)]
            for kind in (Forward, Backward)
        )
        forward, backward = statistics.fmean(forwards), statistics.fmean(backwards)
        equal = Durations(forward=[forward] * len(forwards), backward=[backward] * len(backwards))
        self.length = max(stage.end for stage in stages) - min(stage.begin for stage in stages)
        self.measured = SimulatedStep(spans, [[] for _ in stages])
        self.steady = simulate(pipeline, Durations(forward=forwards, backward=backwards))
        self.equal = simulate(pipeline, equal)
        self.work = pipeline.chunks * pipeline.micro_batches * (forward + backward)

    @property
    def lost(self) -> dict[str, float]:
        """How many ms each cause adds to the step."""
        return {
            "bubble": self.equal.length - self.work,
            "imbalance": self.steady.length - self.equal.length,
            "messages and jitter": self.measured.length - self.steady.length,
        }

    def draw(self, title: str) -> "Figure":
        """Draw the measured step above the two simulations."""
        bubble, imbalance, jitter = (
            f"{cause} {ms:,.1f} ms ({ms / self.length:.1%} of the step)"
            for cause, ms in self.lost.items()
        )
        titles = (
            f"measured, first forward to last backward: {self.measured.length:,.1f} ms",
            f"free messages, no jitter: {self.steady.length:,.1f} ms.  Lost: {jitter}",
            f"also equal chunks: {self.equal.length:,.1f} ms.  Lost: {imbalance}, {bubble}",
        )
        measured = Panel(titles[0], self.measured, self._exposed, self.length)
        panels = (measured, Panel(titles[1], self.steady), Panel(titles[2], self.equal))
        return draw(self._pipeline, panels, "ms", f"{title}: {self.length:,.1f} ms")

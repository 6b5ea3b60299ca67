"""Predict the peak memory of a rank of one pipeline stage in an optimizer step.

The peak is in one of

    forward       of a micro-batch while others are in flight
    backward      of the first micro-batch, or of a later one
    reduction     of the complete gradients, if they are copied for it
    optimizer     the optimizer step

The schedule determines how many micro-batches are in flight: up to P - s for 1f1b at pipeline stage
s of P, and all of them for gpipe (Narayanan et al. 2021, section 2.2; Korthikanti et al. 2022,
section 4.2.3 for the activations of the first stage). ``moments`` counts messages, and what several
chunks hold.

A pass computes one layer after the other. Memory grows or falls by the same number of bytes at each
of several equal layers, so the peak of such a run is at its first or at its last layer.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from operator import mul
from typing import NamedTuple, TypeVar

from megaspeed.config.resolve import Run
from megaspeed.model.parameters import layer_count
from megaspeed.pipeline.partition import chunks_of_stages
from megaspeed.pipeline.schedules import Forward, order_of, peak_in_flight, pipeline_of
from megaspeed.planning.costs.activations import (
    Activations,
    LayerMemory,
    activations_of,
    hidden_bytes,
)
from megaspeed.planning.costs.memory import MemoryBytes
from megaspeed.planning.costs.moments import Moment, moments_of, moments_of_one_chunk
from megaspeed.planning.costs.stage_states import Alike, LayerStates, states_of


class _Held(NamedTuple):
    """Bytes of a rank besides parameters and optimizer states."""

    gradients: int
    activations: int
    buffers: int


class _LayerActivations(NamedTuple):
    """Bytes of activations in the pass of one layer, in addition to those before it."""

    computing: int
    left: int  # when the layer has computed; negative in a backward


class StageMemory:
    """Bytes of a rank of a pipeline stage. All its data and tensor ranks hold them.

    Args:
        pipeline_stage: number of the stage, from 0.
        device_type: "cuda" or "cpu". RMSNorm keeps more on a CPU.
    """

    def __init__(self, run: Run, pipeline_stage: int, device_type: str = "cuda") -> None:
        # Of a batch schedule, the batch with which most activations are kept. A smaller batch may
        # have fewer groups of micro-batches, and so keep more.
        pipelines = map(pipeline_of, reversed([*run.phases.values()]))
        self._stage = pipeline_stage
        self._pipeline = max(pipelines, key=lambda each: peak_in_flight(each, pipeline_stage))
        self._states = states_of(run, pipeline_stage, self._pipeline.gather_policy, device_type)
        self.axis = self._states.axis
        """What the rank reduces and gathers."""
        self._sums_visits = self.axis.matrix_reduction.when == "visit"
        activations = activations_of(run, device_type)
        self._shared, self._hidden = activations.shared(), hidden_bytes(run)
        self._chunks = list(_chunks(run, pipeline_stage, activations))
        chunks, last = range(len(self._chunks)), self._pipeline.virtual_stages - 1
        virtual = [self._pipeline.virtual(pipeline_stage, chunk) for chunk in chunks]
        # The bytes of a chunk's input from the stage before, and of its gradient from the next one.
        self._input = [self._hidden * (each > 0) for each in virtual]
        self._gradient = [self._hidden * (each < last) for each in virtual]
        self._kept = [
            received + sum(count * layer.kept for count, layer in chunk)
            for received, chunk in zip(self._input, self._chunks, strict=True)
        ]

    @property
    def states(self) -> MemoryBytes:
        """Memory between two micro-batches of a step, without activations."""
        return self._states.between

    @cached_property
    def least_bytes(self) -> int:
        """A lower bound of the peak, which is computed much faster: the larger of the bytes held
        when the first and the second backward begin.
        """
        kept, most, backward = 0, 0, None
        for compute in order_of(self._pipeline, self._stage):
            if isinstance(compute, Forward):
                kept += self._kept[compute.chunk]
                continue
            held = kept
            if self._pipeline.gather_policy != "layers":
                held += self._states.gathered[compute.chunk, False]
            if backward is not None and self._sums_visits and compute.chunk == backward:
                held += self._states.visits[compute.chunk]
            most = max(most, held)
            if backward is not None:
                break
            kept, backward = kept - self._kept[compute.chunk], compute.chunk
        return self.states.total + self._shared + most

    @cached_property
    def peak(self) -> MemoryBytes:
        """Memory at the peak of the step; at the first one if several are equal."""
        held = max(self._peaks(), key=sum)
        return replace(
            self.states,
            gradients=held.gradients,
            activations=held.activations,
            communication_buffers=held.buffers,
        )

    def _peaks(self) -> Iterator[_Held]:
        """Yield what is held at the peak of each part of the step that may contain the highest."""
        for moment in self._moments():
            yield self._peak_of_pass(moment)
        gradients = self.states.gradients
        yield _Held(gradients, self._shared, self._states.reducing)
        yield _Held(gradients, self._shared, self._states.orthogonalizing)
        yield _Held(gradients + self._states.updating, self._shared, 0)

    def _moments(self) -> Iterator[Moment]:
        if len(self._chunks) == 1:
            yield from moments_of_one_chunk(self._pipeline, self._stage)
            return
        for alike in moments_of(self._pipeline, self._stage, sums_visits=self._sums_visits):
            yield max(alike, key=self._bytes_beside)

    def _bytes_beside(self, moment: Moment) -> int:
        """Return the bytes of the activations and messages beside a computation."""
        kept = sum(map(mul, moment.in_flight, self._kept))
        return kept + moment.messages * self._hidden

    def _peak_of_pass(self, moment: Moment) -> _Held:
        """Return what is held at the peak of a forward or a backward."""
        states, chunk = self._states, moment.chunk
        gradients = states.between.gradients
        activations, buffers = self._shared + self._bytes_beside(moment), 0
        if moment.has_head_sum:
            buffers += states.head_gradient
        if moment.summed is not None:
            gradients += states.visits[moment.summed]
        buffers += sum(states.gathered[each] for each in moment.gathered)
        own: Alike[_LayerActivations]
        if moment.direction == "forward":
            activations += self._input[chunk]
            own = [
                (count, _LayerActivations(layer.kept + layer.forward_working, layer.kept))
                for count, layer in self._chunks[chunk]
            ]
        else:
            activations += self._kept[chunk] + self._gradient[chunk]
            own = [
                (count, _LayerActivations(layer.backward_working, -layer.kept))
                for count, layer in reversed(self._chunks[chunk])
            ]
        return _peak(_Held(gradients, activations, buffers), states.layers_of(moment), own)


def _peak(
    start: _Held, states: Alike[LayerStates], activations_of_layers: Alike[_LayerActivations]
) -> _Held:
    """Return what is held at the peak of a pass over layers, at the first one if several are equal.

    A layer may have two peaks: while it computes, and while its gradients are added and reduced.
    """
    best, most = start, sum(start)
    gradients, activations, buffers = start
    for count, state, own in _together(states, activations_of_layers):
        growth = state.left_gradients + own.left + state.left_buffers
        before = count - 1 if growth > 0 else 0  # layers of the run before the one with the peaks
        held = gradients + activations + buffers + before * growth
        for peak in (
            (state.gradients, own.computing, state.buffers),
            (state.most_gradients, own.left, state.most_buffers),
        ):
            if held + sum(peak) > most:
                most = held + sum(peak)
                best = _Held(
                    gradients + before * state.left_gradients + peak[0],
                    activations + before * own.left + peak[1],
                    buffers + before * state.left_buffers + peak[2],
                )
        gradients += count * state.left_gradients
        activations += count * own.left
        buffers += count * state.left_buffers
    return best


_First = TypeVar("_First")
_Second = TypeVar("_Second")


def _together(one: Alike[_First], other: Alike[_Second]) -> Iterator[tuple[int, _First, _Second]]:
    """Yield (count, first, second): how often both values stay the same in a row."""
    others = iter(other)
    left, second = next(others)
    for count, first in one:
        while count:
            if not left:
                left, second = next(others)
            both = min(count, left)
            yield both, first, second
            count, left = count - both, left - both


def _chunks(
    run: Run, pipeline_stage: int, activations: Activations
) -> Iterator[Alike[LayerMemory]]:
    """Yield the layers of each chunk of the pipeline stage, equal neighbours counted together."""
    head, done = layer_count(run.config.model) - 1, 0
    recomputed = run.config.parallel.recomputed_blocks or head
    for chunk in chunks_of_stages(run)[pipeline_stage]:
        end = done + min(chunk.stop, head) - max(chunk.start, 1)
        # The first block of the chunk, its other recomputed blocks, and those that are not.
        bounds = sorted({done, min(done + 1, end), min(max(done, recomputed), end), end})
        runs = [(1, activations.embedding())] if chunk.start == 0 else []
        for start, stop in pairwise(bounds):
            kind = activations.first_block if start == done else activations.block
            runs.append((stop - start, kind(start)))
        if chunk.stop > head:
            runs.append((1, activations.head()))
        else:  # The output is working memory. It is freed once the next stage has it.
            count, last = runs.pop()
            output = hidden_bytes(run)
            working = last.forward_working + output
            sent = replace(last, kept=last.kept - output, forward_working=working)
            runs += [(count - 1, last)] * (count > 1) + [(1, sent)]
        done = end
        yield runs

"""Which computations of a pipeline stage can be the peak of its memory.

    order of the stage --> what it holds at each computation --> those that hold most

A stage holds the activations of the forwards in flight, the parameters of the chunks that ZeRO-3
has gathered, the sum of a visit's gradients, and messages. All of them follow from the pipeline. So
the order is walked once for all runs with this pipeline, and bytes are counted only at the few
computations that it finds.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megaspeed.pipeline.programs import timetable
from megaspeed.pipeline.schedules import (
    Forward,
    Pass,
    Pipeline,
    order_of,
    output_of,
    passes_of,
    peak_in_flight,
)
from megaspeed.pipeline.visits import ends_of, holds_by_index

_GROUPS = 3
"""The last of this many groups of one size holds as much as any further group would."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One computation of a pipeline stage, and what the stage holds beside it."""

    direction: Pass
    chunk: int = 0
    # Forwards of each chunk whose activations are kept, without that of this computation.
    in_flight: tuple[int, ...]
    messages: int  # being sent, or received for a later computation
    # Each chunk that is gathered as a whole, and whether for a forward.
    gathered: tuple[tuple[int, bool], ...] = ()
    summed: int | None = None  # the chunk whose gradients a visit has begun to sum
    has_head_sum: bool = False  # whether a forward of the loss has added to the head's gradient
    reduces: bool = True  # whether gradients are reduced in this backward
    following: Pass | None = None  # for which ZeRO-3 gathers layers ahead; None if it does not


@lru_cache(maxsize=4096)
def moments_of(
    pipeline: Pipeline, stage: int, *, sums_visits: bool
) -> tuple[tuple[Moment, ...], ...]:
    """Return the moments of which one is the peak, for any sizes of chunks and messages.

    Each inner tuple has the moments that differ only in ``in_flight`` and ``messages``.

    Args:
        pipeline: with several chunks.
        stage: of the pipeline.
        sums_visits: whether gradients are summed while a visit lasts, and then reduced.
    """
    size, larger = divmod(pipeline.micro_batches, pipeline.groups)
    enough = min(larger, _GROUPS), min(pipeline.groups - larger, _GROUPS)
    if sum(enough) < pipeline.groups:
        count = enough[0] + size * sum(enough)
        shorter = replace(pipeline, micro_batches=count, groups=sum(enough))
        return moments_of(shorter, stage, sums_visits=sums_visits)
    order, last = order_of(pipeline, stage), pipeline.virtual_stages - 1
    visit_ends, (begins, ends) = ends_of(pipeline, stage), holds_by_index(pipeline, stage)
    in_flight, gathered = [0] * pipeline.chunks, set[tuple[int, bool]]()
    summed, has_head_sum = None, False
    found: defaultdict[Moment, set[tuple[int, ...]]] = defaultdict(set)
    for index, (compute, messages) in enumerate(
        zip(order, messages_of(pipeline, stage), strict=True)
    ):
        chunk, is_forward = compute.chunk, isinstance(compute, Forward)
        reduces = not is_forward and (not sums_visits or compute in visit_ends)
        gathered |= {(hold.chunk, hold.forward) for hold in begins[index]}
        if not is_forward:
            in_flight[chunk] -= 1
        moment = Moment(
            direction="forward" if is_forward else "backward",
            chunk=chunk,
            in_flight=(),
            messages=0,
            gathered=tuple(sorted(gathered)),
            summed=summed,
            has_head_sum=has_head_sum,
            reduces=reduces,
        )
        found[moment].add((*in_flight, messages))
        if is_forward:
            in_flight[chunk] += 1
        elif sums_visits:
            summed = None if reduces else chunk
        if pipeline.virtual(stage, chunk) == last:
            has_head_sum = is_forward or (has_head_sum and not reduces)
        gathered -= {(hold.chunk, hold.forward) for hold in ends[index]}
    return tuple(
        tuple(
            replace(moment, in_flight=tuple(counts), messages=messages)
            for *counts, messages in _largest(held)
        )
        for moment, held in found.items()
    )


@lru_cache(maxsize=4096)
def moments_of_one_chunk(pipeline: Pipeline, stage: int) -> Sequence[Moment]:
    """Return the moments with the most micro-batches in flight, or one less, and of each the most
    messages. Beside a computation, messages may wait for later ones.
    """
    count, shortest = pipeline.micro_batches, pipeline.stages + pipeline.extra_in_flight + 2
    shorter = replace(pipeline, micro_batches=min(count, shortest))
    # With more micro-batches, 1f1b repeats its moments, and gpipe keeps more of them in flight.
    further = count - shorter.micro_batches if pipeline.schedule == "gpipe" else 0
    passes = [direction for direction, _ in passes_of(shorter, stage)]
    found: dict[Moment, int] = {}
    in_flight, most = 0, peak_in_flight(shorter, stage)
    beside = zip(passes, (*passes[1:], None), messages_of(shorter, stage), strict=True)
    for direction, following, messages in beside:
        in_flight -= direction == "backward"
        if in_flight >= most - 2:  # one less, because ZeRO-3 may hold more for another pass
            moment = Moment(
                direction=direction,
                in_flight=(in_flight + further,),
                messages=0,
                has_head_sum=direction == "backward",
                following=following,
            )
            found[moment] = max(messages, found.get(moment, 0))
        in_flight += direction == "forward"
    return [replace(moment, messages=messages) for moment, messages in found.items()]


def messages_of(pipeline: Pipeline, stage: int) -> Sequence[int]:
    """Return how many messages a stage holds at each computation, without its input.

    A message is received when its sender has computed it, which may be long before its use. What a
    stage sends is held until the next batch of messages starts, or the stage waits for its batch.
    """
    pipeline = replace(pipeline, gather_policy="layers")  # has the same timetable, which is cached
    own = timetable(pipeline)[stage]
    ticks = sorted(each.arrived for each in own if each.arrived is not None)
    held, used, sent_at = [], 0, -1
    for compute, (end, needed) in zip(order_of(pipeline, stage), own, strict=True):
        count = bisect_left(ticks, end)
        newest = ticks[count - 1] if count else 0
        if newest > sent_at or needed == sent_at:
            sent_at = -1  # the next batch has started, or the stage waits for this one
        used += needed is not None
        held.append(count - used + (sent_at >= 0))
        if output_of(pipeline, stage, compute) is not None:
            sent_at = end
    return held


def _largest(vectors: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the vectors that no other one exceeds in all components."""
    kept: list[tuple[int, ...]] = []
    for vector in sorted(vectors, key=sum, reverse=True):
        if not any(all(a >= b for a, b in zip(k, vector, strict=True)) for k in kept):
            kept.append(vector)
    return kept

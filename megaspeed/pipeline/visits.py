"""The visits of a stage to its chunks, and how long ZeRO-3 holds the parameters of each chunk.

A visit is a run of forwards, or of backwards, of one chunk:

    forwards     chunk 0            chunk 1            chunk 0          ...
    backwards                  chunk 1            chunk 0            chunk 1     ...
    held         |--- chunk 0 ---| |--- chunk 1 ----| ...

If a stage has several chunks, ZeRO-3 gathers a chunk when a visit begins, and frees it when the
visit ends. Visits of a chunk that overlap share one gather. So a step gathers each chunk at most
2 x ``groups`` times, for any number of micro-batches.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from types import MappingProxyType

from megaspeed.pipeline.schedules import Backward, Compute, End, Forward, Pipeline, order_of


@dataclass(frozen=True, slots=True)
class Hold:
    """A time in which a chunk is gathered: from before the computation ``first`` of the stage until
    after the computation ``last``. Both are indices into the ``order_of`` the stage.
    """

    chunk: int
    first: int
    last: int
    forward: bool  # whether it contains a forward, which needs more parameters than a backward


@lru_cache(maxsize=256)
def visits_of(pipeline: Pipeline, stage: int) -> tuple[Hold, ...]:
    """The visits of a stage, in the order in which they begin, as if each were held alone."""
    kinds: tuple[type[Compute], ...] = (Forward, Backward)
    found = []
    for kind in kinds:
        order = enumerate(order_of(pipeline, stage))
        own = [(index, each.chunk) for index, each in order if isinstance(each, kind)]
        for chunk, members in groupby(own, key=lambda each: each[1]):
            indices = [index for index, _ in members]
            found.append(Hold(chunk, indices[0], indices[-1], kind is Forward))
    return tuple(sorted(found, key=lambda visit: visit.first))


@lru_cache(maxsize=256)
def ends_of(pipeline: Pipeline, stage: int) -> Mapping[Compute, End]:
    """The last backward of each visit, and what ends with it. With others, only a micro-batch."""
    order, last = order_of(pipeline, stage), dict[int, Compute]()  # chunk -> its last backward
    ends: dict[Compute, End] = {}
    for visit in visits_of(pipeline, stage):
        if not visit.forward:
            last[visit.chunk] = order[visit.last]
            ends[order[visit.last]] = "visit"
    return MappingProxyType({**ends, **dict.fromkeys(last.values(), "step")})


@lru_cache(maxsize=256)
def holds_of(pipeline: Pipeline, stage: int) -> tuple[Hold, ...]:
    """What ZeRO-3 holds for the visits of a stage, in the order of the gathers.

    With "chunks_ahead", a chunk is gathered when the visit before it begins, unless the stage would
    then hold all its chunks. Empty if the stage does not gather chunks.
    """
    if pipeline.gather_policy == "layers":
        return ()
    holds: list[Hold] = []
    newest: dict[int, int] = {}  # chunk -> index of its last hold
    opened: list[Hold] = []
    for visit in visits_of(pipeline, stage):
        first = visit.first
        if pipeline.gather_policy == "chunks_ahead" and opened:
            start = opened[-1].first
            opened = [each for each in opened if each.last >= start]
            # All chunks together are all weights of the stage, so partitions would save nothing.
            if len({visit.chunk, *(each.chunk for each in opened)}) < pipeline.chunks:
                first = start
        opened.append(visit)
        before = newest.get(visit.chunk)
        # + 1: a chunk is not freed if the next computation would gather it again.
        if before is None or holds[before].last + 1 < first:
            newest[visit.chunk] = len(holds)
            holds.append(replace(visit, first=first))
        else:
            hold = holds[before]
            last, forward = max(hold.last, visit.last), hold.forward or visit.forward
            holds[before] = replace(hold, last=last, forward=forward)
    return tuple(holds)


def holds_by_index(
    pipeline: Pipeline, stage: int
) -> tuple[Mapping[int, list[Hold]], Mapping[int, list[Hold]]]:
    """``holds_of`` a stage, by ``first`` and by ``last``; an empty list for other indices."""
    first, last = defaultdict[int, list[Hold]](list), defaultdict[int, list[Hold]](list)
    for hold in holds_of(pipeline, stage):
        first[hold.first].append(hold)
        last[hold.last].append(hold)
    return first, last

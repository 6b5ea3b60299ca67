"""What each instruction of a step reduces and gathers, and the check of it.

DataAxis, program --steps_of--> Work of each instruction --> check_data_axis, the printed table
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, zip_longest
from typing import NamedTuple

from megaspeed.data_axis.axis import DataAxis
from megaspeed.data_axis.buckets import Bucket
from megaspeed.data_axis.gathers import Gather, turns_of
from megaspeed.data_axis.orthogonalization import Orthogonalization
from megaspeed.pipeline import schedules
from megaspeed.pipeline.programs import stage_program
from megaspeed.pipeline.schedules import (
    Backward,
    Forward,
    Instruction,
    OptimizerStep,
    Pipeline,
    ReduceGradients,
    ScheduleError,
)
from megaspeed.pipeline.visits import ends_of


class Work(NamedTuple):
    """What the data axis does within an instruction."""

    instruction: Instruction
    gathers: Sequence[Gather] = ()
    reduces: Sequence[Bucket] = ()
    sums: Sequence[Bucket] = ()  # of which the parts are summed over replicas, or compressed


def steps_of(axis: DataAxis, pipeline: Pipeline, stage: int) -> Iterator[Work]:
    """Yield the work of each instruction of a step, in order."""
    ends, turns = ends_of(pipeline, stage), turns_of(pipeline, stage)
    gathers_layers = pipeline.gather_policy == "layers" and axis.passes and not axis.is_local
    persistent = [] if axis.persistent is None or axis.is_local else [axis.persistent]
    loss_gradients: Counter[Bucket] = Counter()  # gradients that forwards have added
    for instruction in stage_program(pipeline, stage):
        gathers: Sequence[Gather] = ()
        reduces: list[Bucket] = []
        sums: list[Bucket] = []
        match instruction:
            case Forward(_, chunk) | Backward(_, chunk):
                turn, own = next(turns), [each for each in axis.buckets if each.chunk == chunk]
                gathers = [*persistent, *(axis.gathered(*turn) if gathers_layers else ())]
                if isinstance(instruction, Forward):
                    loss_gradients.update(bucket for bucket in own if bucket.is_from_loss)
                else:
                    end = ends.get(instruction, "micro_batch")
                    reduces = [b for b in own if _is_reduced(b, end, loss_gradients[b])]
                    sums = [b for b in reduces if end == "step" and _sums_early(b)]
                    loss_gradients.subtract({bucket: loss_gradients[bucket] for bucket in reduces})
            case schedules.Gather(chunk, forward):
                gathers = [*persistent, *axis.chunk_gathers(chunk, forward=forward)]
            case ReduceGradients():
                reduces = [b for b in axis.buckets if b.reduction.when == "after"]
                sums = [b for b in axis.buckets if _sums_parts(b) and not _sums_early(b)]
            case OptimizerStep() if not axis.passes:
                gathers = axis.gathers_after_step
        persistent = [] if gathers else persistent
        yield Work(instruction, gathers, reduces, sums)


def _sums_parts(bucket: Bucket) -> bool:
    return bucket.reduction.replica_axis is not None or bucket.compression is not None


def _sums_early(bucket: Bucket) -> bool:
    """Whether the parts are summed over the replicas in the last backward."""
    how = bucket.reduction
    return how.replica_axis is not None and how.overlaps and bucket.compression is None


def _is_reduced(bucket: Bucket, end: schedules.End, loss_gradients: int) -> bool:
    """Whether a backward with which ``end`` ends reduces a bucket."""
    how = bucket.reduction
    has_gradient = loss_gradients > 0 or not bucket.is_from_loss or how.keeps != "partition"
    return how.collects(end) and has_gradient and (how.keeps != "packed" or end == how.when)


def check_data_axis(axis: DataAxis, pipeline: Pipeline, stage: int) -> None:
    """Raise ``ScheduleError`` if a plan breaks a rule.

    Each parameter is in one bucket, and each of its elements has one owner. Each gradient is
    reduced once, over all ranks. What a pass reads is gathered, and freed at the end of the step.
    Each element of a matrix that Muon orthogonalizes is sent to one owner.
    """
    for reason in chain(
        _of_parameters(axis),
        _of_gathers(axis),
        _of_gradients(axis, pipeline, stage),
        _of_orthogonalization(axis),
    ):
        raise ScheduleError(f"the data axis of pipeline stage {stage}: {reason}")


def _of_parameters(axis: DataAxis) -> Iterator[str]:
    counts = Counter(parameter for bucket in axis.buckets for parameter in bucket.parameters)
    for parameter in axis.parameters:
        if counts[parameter] != 1:
            yield f"{parameter.name} is in {counts[parameter]} buckets. It must be in exactly one."
    for bucket in axis.buckets:
        name, how, shards = bucket.parameters[0].name, bucket.reduction, bucket.shards
        kinds = {(p.group, p.chunk, len(p.shape), p.is_expert) for p in bucket.parameters}
        if len(kinds) > 1:
            yield f"the bucket of {name} has parameters of {len(kinds)} kinds. It must have one."
        # Each parameter is padded to equal parts, or the bucket is.
        padding = shards if bucket.layout == "rows" else 1
        fits = (
            size % padding == 0 and 0 <= size - parameter.elements < padding
            for parameter, size in zip(bucket.parameters, bucket.sizes, strict=True)
        )
        if not all(fits) or not 0 <= bucket.elements - sum(bucket.sizes) < 2 * shards:
            yield f"the shards do not own each element of the bucket of {name} once."
        count = how.holders
        if (how.collective is None) != (count == 1) or count % shards:
            yield f"the sum of the bucket of {name} is over {count} ranks and {shards} shards."
        if (how.replica_axis is None) != (shards in (1, count)):
            yield f"the parts of the bucket of {name} are not summed over its replicas."


def _of_gathers(axis: DataAxis) -> Iterator[str]:
    kept = {*(axis.persistent.parameters if axis.persistent else ())}
    for own, order in axis.passes.items():
        is_forward, layers = own[0] == "forward", axis.parameters.layers[own[1]]
        # A backward reads neither the embedding nor the head's weight.
        needed = [
            [p for p in layer.parameters if is_forward or not (p.is_head or p.layer == "embedding")]
            for layer in layers[:: 1 if is_forward else -1]
        ]
        gathered = [kept.union(gather.parameters) for gather in order]
        for parameters, there in zip_longest(needed, gathered, fillvalue=()):
            for parameter in parameters:
                if parameter not in there:
                    yield (
                        f"the {own[0]} of chunk {own[1]} reads {parameter.name}, which is neither "
                        "gathered for its layer nor persistent."
                    )
        for following in (*axis.passes, None):
            *held, last = axis.held(own, following)
            if not all(gather in hold for gather, hold in zip(order, held, strict=True)):
                yield f"the {own[0]} of chunk {own[1]} computes a layer that is not held."
            left = [parameter.name for gather in last for parameter in gather.parameters]
            if following is None and left:
                yield f"{left[0]} is still held after the last pass, which must free everything."


def _of_gradients(axis: DataAxis, pipeline: Pipeline, stage: int) -> Iterator[str]:
    added, reduced = Counter[Bucket](), Counter[Bucket]()  # gradients since the last reduction
    for instruction, _, reduces, _ in steps_of(axis, pipeline, stage):
        if isinstance(instruction, Forward | Backward):
            is_forward = isinstance(instruction, Forward)
            own = (bucket for bucket in axis.buckets if bucket.chunk == instruction.chunk)
            added.update(bucket for bucket in own if bucket.is_from_loss == is_forward)
        for bucket in reduces:
            reduced[bucket] += 1
            name = bucket.parameters[0].name
            if not added[bucket]:
                yield f"{instruction!r} reduces {name} without a gradient since the last reduction."
            if bucket.reduction.keeps != "partition" and reduced[bucket] > 1:
                yield f"{instruction!r} reduces the sum of {name} for the second time in this step."
            added[bucket] = 0
    for bucket in +added:
        name = bucket.parameters[0].name
        yield f"a gradient of {name} is computed after its last reduction. It must be reduced."


def _of_orthogonalization(axis: DataAxis) -> Iterator[str]:
    for plan in axis.orthogonalizations:
        yield from _of_plan(plan)


def _of_plan(plan: Orthogonalization) -> Iterator[str]:
    owned = Counter(section for batch in chain(*plan.rounds) for section in batch.sections)
    for section in plan.sections:
        if owned[section] != 1:
            name = f"{section.parameter.name} ({section.name})"
            yield f"{name} is in {owned[section]} batches. It must be in exactly one."
    for number, batches in enumerate(plan.rounds):
        if len({batch.owner for batch in batches}) < len(batches):
            yield f"a rank owns several batches of round {number}. It orthogonalizes one at a time."
    for batch in chain(*plan.rounds):
        members = range(plan.members)
        parts = (part for member in members for part in plan.parts(batch, member))
        sent = sorted((part.place, part.length) for part in parts if not part.is_copy)
        *starts, end = accumulate((length for _, length in sent), initial=0)
        if end != batch.elements or starts != [place for place, _ in sent]:
            name = batch.sections[0].parameter.name
            yield f"the parts of {name} do not fill its batch once."
